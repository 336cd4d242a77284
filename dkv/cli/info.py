"""``dkv info``."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer
from rich.table import Table

import dkv
from dkv._dispatch import which_mlx
from dkv._version import __version__
from dkv.cli._common import out

PACKAGES = ("numpy", "torch", "triton", "mlx", "transformers", "safetensors", "mlx-lm", "gguf")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Versions, and which backends can run here."""
    facts: dict[str, Any] = {
        "dkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": dkv.available_backends(),
        "mlx_runs": which_mlx(),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("backend")
    table.add_column("state")
    for name, reason in facts["backends"].items():
        ready = f"ready, runs {facts['mlx_runs']}" if name == "mlx" else "ready"
        table.add_row(name, ready if reason is None else f"unavailable: {' '.join(reason.split())}")
    out.print(f"dkv {facts['dkv']}, Python {facts['python']}, {facts['platform']}")
    packages = (f"{name} {version or '-'}" for name, version in facts["packages"].items())
    out.print(", ".join(packages))
    out.print(table)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
