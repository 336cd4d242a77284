"""mlx-lm's files of prompt caches, written whole or not at all, and refused where they were damaged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from dkv._files import CHECKSUM, UNSEALED, check_sealed, named, seal
from dkv._paths import check_path, replaced

SUFFIX = ".safetensors"  # by which mlx knows a file's kind
KEY = f"0.{CHECKSUM}"  # as mlx-lm flattens its metadata


def save_prompt_cache(
    path: str | os.PathLike[str], cache: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """``mlx_lm.models.cache.save_prompt_cache`` through a temporary file and an atomic rename, with a checksum.

    The file is mlx-lm's, and its own ``load_prompt_cache`` reads it too.

    Parameters
    ----------
    path : path
        Ends in ``.safetensors``.
    cache : sequence of caches, one a layer
    metadata : mapping of str to str, optional
        "sha256" is taken.

    Raises
    ------
    ValueError
        When the path has another ending, or metadata names "sha256".
    OSError
        As the system says; what was there is as before then.
    """
    _check_suffix(path)
    if metadata is not None and CHECKSUM in metadata:
        raise ValueError(f"metadata must leave {CHECKSUM!r} free, got {metadata[CHECKSUM]!r:.60}")
    mx.eval([layer.state for layer in cache])  # a cache that cannot be saved says so itself
    with replaced(path, SUFFIX) as temporary:
        open(temporary, "xb").close()
        try:
            mlx_cache.save_prompt_cache(temporary, list(cache), {**(metadata or {}), CHECKSUM: UNSEALED})
        except RuntimeError as error:
            raise OSError(f"mlx cannot write {check_path(path)}: {error}") from error
        seal(temporary, KEY)


def load_prompt_cache(path: str | os.PathLike[str]) -> list[Any]:
    """What :func:`save_prompt_cache` wrote, read at once and not when it is first used; attach the model before use.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When it is no prompt cache, or its bytes are not those that were written; the file is named.
    """
    _check_suffix(path)
    metadata = check_sealed(path, "prompt cache", KEY)
    name = check_path(path)
    kinds = [kind for key, kind in metadata.items() if key.startswith("1.")]
    with named(name):
        for kind in kinds:
            found = getattr(mlx_cache, kind, None)
            if not (isinstance(found, type) and issubclass(found, mlx_cache._BaseCache)):
                raise ValueError(f"{kind!r:.60} is no cache of mlx-lm")
        try:
            cache: list[Any] = mlx_cache.load_prompt_cache(name)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"it is no prompt cache of this mlx-lm: {error!r:.200}") from error
    mx.eval([layer.state for layer in cache])
    return cache


def _check_suffix(path: str | os.PathLike[str]) -> None:
    if not check_path(path).endswith(SUFFIX):
        raise ValueError(f"path must end in {SUFFIX}, got {os.fspath(path)!r:.200}")
