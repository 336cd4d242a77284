"""Files of results: what was measured, by which command, when and with which versions; whole or not at all."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from dkv import _json
from dkv._version import __version__

STDOUT = "-"
PACKAGES = ("numpy", "torch", "triton", "transformers", "mlx", "mlx-lm")
command_line: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("command_line", default=None)


def write_json(path: str | os.PathLike[str] | None, value: Any) -> None:
    """Write results and what made them.

    Parameters
    ----------
    path : str or path, optional
        "-" is standard output; nothing is written when None.
    value : list or dict
        Rows, which go under ``rows``, or a mapping. ``command``, ``date`` and ``versions`` are put before it.
    """
    if path is not None:
        rows = value if isinstance(value, dict) else {"rows": value}
        dump(path, {"command": command(), "date": datetime.date.today().isoformat(), "versions": versions()} | rows)


def dump(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON in place of a file, whole or not at all; straight into a pipe or a device."""
    if os.fspath(path) == STDOUT:
        sys.stdout.write(json.dumps(value, indent=1) + "\n")
        sys.stdout.flush()
    else:
        _json.write_json(path, value, indent=1)


def read_rows(path: str | os.PathLike[str]) -> list[Any]:
    """The rows of a file of results; ``ValueError`` where there are none."""
    value = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = value.get("rows") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise ValueError(f"{os.fspath(path)} holds no rows of results")
    return rows


def command() -> str:
    """The command that is running, as one would type it."""
    given = command_line.get()
    if given is not None:
        return shlex.join(["dkv", *given])
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    run = ["python", sys.argv[0]] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*run, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Of dkv, of Python and of the packages that are in use."""
    found = {"dkv": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        if name.replace("-", "_") in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return found
