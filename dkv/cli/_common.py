"""What the commands share: options, consoles, progress, models, files that they write, one kind of error."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dkv.benches import results
from dkv.cli import FAILED, REFUSED
from dkv.config import PRESETS, DKVConfig
from dkv.profile import HeadProfile, shipped_names

PIPED_WIDTH = 160  # columns where no terminal says how many it has
EVERY_SECONDS = 10  # between lines of progress where there is no terminal to draw a bar on


def _console(stderr: bool) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, markup=False, width=PIPED_WIDTH if piped else None)


out = _console(stderr=False)
err = _console(stderr=True)

DTYPES = ("float32", "bfloat16", "float16")


class CliError(Exception):
    """Bad input, or with another exit code what failed later; the message is one line."""

    def __init__(self, message: str, code: int = REFUSED) -> None:
        super().__init__(message)
        self.code = code


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Known name (smollm2-135m), folder, .gguf file or hub id.")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides every random choice.")]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the results to this file; - is stdout, tables go to stderr."),
]
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the results into this file: .png, .svg or .pdf."),
]
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


def described(config: DKVConfig, profile: str) -> dict[str, Any]:
    """Settings for a file of results: a profile by its name, not by all that it holds."""
    return config.to_dict() | ({} if config.profile is None else {"profile": profile})


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


def check_outputs(json_file: Path | None, plot: Path | None = None) -> Console:
    """Refuse before the work, not after it. Gives where tables go: JSON on standard output has it for itself."""
    if plot is not None:
        if plot.suffix not in PLOT_SUFFIXES:
            raise CliError(f"--plot must end in .png, .svg or .pdf, got {str(plot)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise CliError('--plot needs matplotlib: pip install "dkv[plot]"')
    to_stdout = json_file is not None and str(json_file) == results.STDOUT
    for path in (plot, None if to_stdout else json_file):
        if path is not None:
            check_writable(path)
    return err if to_stdout else out


def check_writable(path: Path) -> None:
    """A file comes into its folder under another name and is then renamed; a device or a pipe is written to."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            fine = os.access(target, os.W_OK)
        else:
            writable = not target.exists() or os.access(target, os.W_OK)
            fine = writable and not target.is_dir() and os.access(target.parent, os.W_OK | os.X_OK)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
    if not fine:
        raise CliError(f"cannot write {path}")


def write_json(path: Path | None, value: Any) -> None:
    """Results with what made them; see :func:`dkv.benches.results.write_json`."""
    with writing(path):
        results.write_json(path, value)


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """An error while a file is written is one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}", FAILED) from error


class Advance(Protocol):
    """Told what is done next, and for how many of the steps it counts."""

    def __call__(self, label: str, steps: int = 1) -> None: ...


@contextlib.contextmanager
def progress(total: int | None = None) -> Iterator[Advance]:
    """A bar on stderr that is gone at the end; a plain line now and then where stderr is no terminal."""
    begun = 0
    current = 0
    if not sys.stderr.isatty():  # not err.is_terminal: colours may be forced on a pipe, a bar never
        last = time.monotonic()

        def tell(label: str, steps: int = 1) -> None:
            nonlocal begun, current, last
            begun, current = begun + current, steps
            if time.monotonic() - last > EVERY_SECONDS:
                last = time.monotonic()
                share = "" if not total else f" ({min(100, 100 * begun // total)}%)"
                print(label + share, file=sys.stderr, flush=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("Starting", total=total)

        def draw(label: str, steps: int = 1) -> None:
            nonlocal begun, current
            begun, current = begun + current, steps
            bar.update(task, description=label, completed=begun)

        yield draw


@contextlib.contextmanager
def status(label: str) -> Iterator[None]:
    """Says on a terminal what takes a moment."""
    with err.status(label) if sys.stderr.isatty() else contextlib.nullcontext():
        yield


def examples(*lines: str) -> str:
    """The end of a command's help; click leaves a paragraph that begins so as it is."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def load_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer; what takes long shows its progress on stderr."""
    check_dtype(dtype)
    from dkv import models

    with status("Loading torch and transformers"):
        models.require("torch")
        models.require("transformers")
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
