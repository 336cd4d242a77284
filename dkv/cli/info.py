"""``dkv info``."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from rich.table import Table

import dkv
from dkv._dispatch import which_mlx
from dkv._version import __version__
from dkv.benches import results
from dkv.cli import _common
from dkv.cli._common import out

PACKAGES = ("numpy", "torch", "triton", "mlx", "transformers", "safetensors", "mlx-lm", "gguf")


EXAMPLES = _common.examples("dkv info", "dkv info --json -")


def info(json_file: _common.JsonOption = None) -> None:
    """Versions, and which backends can run here."""
    show = _common.check_outputs(json_file)
    facts: dict[str, Any] = {
        "dkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": dkv.available_backends(),
        "mlx_runs": which_mlx(),
    }
    if json_file is not None:
        with _common.writing(json_file):
            results.dump(json_file, facts)
    if show is not out:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("backend")
    table.add_column("state")
    for name, reason in facts["backends"].items():
        ready = f"ready, runs {facts['mlx_runs']}" if name == "mlx" else "ready"
        table.add_row(name, ready if reason is None else f"unavailable: {' '.join(reason.split())}")
    show.print(f"dkv {facts['dkv']}, Python {facts['python']}, {facts['platform']}")
    packages = (f"{name} {version or '-'}" for name, version in facts["packages"].items())
    show.print(", ".join(packages))
    show.print(table)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
