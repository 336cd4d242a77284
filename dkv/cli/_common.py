"""What the commands share: options, consoles, models, JSON files, one kind of error."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dkv.config import PRESETS, DKVConfig
from dkv.profile import HeadProfile, shipped_names

out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

DTYPES = ("float32", "bfloat16", "float16")


class CliError(Exception):
    """Bad input; the message is one line."""


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Known name (smollm2-135m), folder, .gguf file or hub id.")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides every random choice.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]
RankOption = Annotated[int, typer.Option(help="Rank of the low-rank part, 0 to 128.")]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens in a compressed block, 2 to 256.")]
ResidualsOption = Annotated[
    int | None, typer.Option(help="Rows of a block kept beside the low-rank part; all if unset.")
]
PRESET_HELP = f"Settings by name: {', '.join(PRESETS)}."
ProfileOption = Annotated[
    str | None,
    typer.Option(help="Profile of the model's heads: a file of dkv profile, or the name of one that ships."),
]


def find_profile(model: str, profile: str | None) -> HeadProfile | None:
    """The profile that was given, else the one that ships for a model of this name."""
    if profile is not None:
        return load_profile(profile)
    return HeadProfile.shipped(model) if model in shipped_names() else None


def make_config(preset: str = "default", profile: str | None = None, model: str = "", **settings: Any) -> DKVConfig:
    """A configuration from options; those that are None are the preset's. Looks for the profile of ``model``."""
    scores = find_profile(model, profile) if profile is not None or needs_profile(preset) else None
    try:
        config = DKVConfig.preset(preset, scores, **{name: x for name, x in settings.items() if x is not None})
    except (TypeError, ValueError) as error:
        raise CliError(f"bad setting: {error}") from error
    if config.splits_heads and scores is None:
        raise CliError(f"preset {preset!r} needs --profile; `dkv profile MODEL -o FILE` makes one")
    if scores is not None and not config.splits_heads:
        err.print(f"preset {preset!r} treats all heads alike: --profile changes nothing")
    return config


def needs_profile(preset: str) -> bool:
    fields = PRESETS.get(preset, {})
    return "ratio" in fields or "tiers" in fields


def load_profile(name: str) -> HeadProfile:
    """A profile's file, or one that ships."""
    try:
        if not Path(name).exists() and name in shipped_names():
            return HeadProfile.shipped(name)
        return HeadProfile.load(name)
    except FileNotFoundError as error:
        raise CliError(f"--profile: {error}; those that ship are: {', '.join(shipped_names())}") from error
    except OSError as error:
        raise CliError(f"--profile: cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(f"--profile: {error}") from error


def check_profile(config: DKVConfig, model: Any) -> None:
    """The profile must be of this model."""
    if config.profile is None:
        return
    from dkv.integrations.transformers import model_shape

    try:
        config.profile.check_model(*model_shape(model.config))
    except ValueError as error:
        raise CliError(f"--profile: {error}") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error


def at_least(name: str, value: int, low: int) -> int:
    if value < low:
        raise CliError(f"{name} must be {low} or more, got {value}")
    return value


def integers(name: str, text: str, low: int = 1) -> list[int]:
    """A comma-separated list of integers, none below ``low``."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise CliError(f"{name} must be integers with commas between them, got {text!r}") from None
    return [at_least(name, value, low) for value in values]


def check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise CliError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def check_writable(path: Path | None) -> None:
    """Refuse before the work, not after it."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise CliError(f"cannot write {path}")


def write_json(path: Path | None, value: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def load_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer; what takes long shows its progress on stderr."""
    check_dtype(dtype)
    from dkv import models

    loaded = models.load(name, dtype=dtype, device=None if device == "cpu" else device)
    quiet_libraries()
    return loaded


def quiet_libraries() -> None:
    """No advice from libraries between our own lines."""

    warnings.filterwarnings("ignore")
    for name in ("transformers", "huggingface_hub", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_context(model: Any, tokens: int, extra: int) -> None:
    """``tokens`` of text and ``extra`` for question and answer must fit the model."""
    from dkv import models

    limit = models.max_context(model)
    if limit is not None and tokens + extra > limit:
        raise CliError(
            f"{tokens} tokens and {extra} for what follows are more than the model's context of {limit} tokens"
        )


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
