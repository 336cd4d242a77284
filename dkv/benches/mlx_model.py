"""Models for mlx-lm: a known one written as an MLX model once, any other by mlx-lm's own loader."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dkv import models
from dkv._download import scratch, status

BITS = 4
GROUP_SIZE = 64


def require() -> Any:
    """mlx-lm, or one line that says how to get it."""
    try:
        return importlib.import_module("mlx_lm")
    except ModuleNotFoundError as error:
        if error.name not in ("mlx_lm", "mlx"):
            raise
        raise models.MissingPackageError('this needs mlx-lm: pip install "dkv[cli,mlx-lm]"') from error


def load(name: str, cache_dir: str | os.PathLike[str] | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer of transformers and config of a known name, a folder or a hub id.

    Raises
    ------
    ModelLoadError
        Where mlx-lm cannot load it.
    """
    mlx_lm = require()
    source: str | Path = name
    if name in models.MODELS:
        source = converted(name, cache_dir)
    elif not Path(name).is_dir() and (name.startswith((".", "~", os.sep)) or name.count("/") != 1):
        known = ", ".join(sorted(models.MODELS))
        raise models.ModelLoadError(f"unknown model {name!r}: give a known name ({known}), a folder or a hub id")
    try:
        with _silent():
            model, tokenizer, config = mlx_lm.load(str(source), return_config=True)
    except Exception as error:  # many kinds; the user needs one line
        raise models.ModelLoadError(
            f"mlx-lm cannot load {name!r}: {' '.join(str(error).split())[:300] or type(error).__name__}"
        ) from error
    return model, getattr(tokenizer, "_tokenizer", tokenizer), config


def max_context(config: dict[str, Any]) -> int | None:
    """The longest context that a model's configuration allows, in tokens."""
    limit = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(limit) if limit else None


def converted(
    name: str, cache_dir: str | os.PathLike[str] | None = None, bits: int | None = BITS, progress: bool = True
) -> Path:
    """A known model as an MLX folder, made on first use; its weights in groups of 64 at ``bits``, or float16 if None.

    mlx-lm reads ``rope_theta`` from the top of a config, where transformers 5 no longer writes it: without it a model
    of another base computes nonsense, so it is put there.
    """
    mlx_lm = require()
    spec = models.MODELS[name]
    source = models.transformers_folder(name, cache_dir, progress)
    root = source.parent
    made = root / f"{name}-{spec.sha256[:8]}-mlx-{'float16' if bits is None else f'int{bits}'}"
    if (made / "config.json").is_file():
        return made
    with status(f"Writing {name} as an MLX model (once)", progress), scratch(root, "mlx") as work, _silent():
        plain = work / "plain"
        plain.mkdir()
        for file in source.iterdir():
            os.symlink(file, plain / file.name)
        (plain / "config.json").unlink()
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
        options = {} if bits is None else {"quantize": True, "q_bits": bits, "q_group_size": GROUP_SIZE}
        mlx_lm.convert(str(plain), str(work / "model"), dtype="float16", **options)
        try:
            os.replace(work / "model", made)
        except OSError:
            if not (made / "config.json").is_file():  # else another process was first
                raise
    return made


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """mlx-lm prints what it does; standard output is the caller's."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
