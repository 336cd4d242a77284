"""Runs the Metal kernels of ``mx.fast.metal_kernel`` on a Linux CPU, and finds what is wrong with them.

>>> host = Host(check=True)
>>> kernel = host.metal_kernel(name="twice", input_names=["x"], output_names=["y"], source="...")

``docs/msl-host.md`` says how it works, what it catches and what it does not.
"""

from .build import unavailable
from .errors import MSLCompileError, MSLError, MSLRunError
from .host import Host, Kernel, Options, Report, totals
from .lint import lint_unavailable
from .oracle import mlx_text
from .signature import ATTRIBUTES, TYPES, Signature
from .source import Mutant, located, without_barriers, without_guards

__all__ = [
    "ATTRIBUTES",
    "TYPES",
    "Host",
    "Kernel",
    "MSLCompileError",
    "MSLError",
    "MSLRunError",
    "Mutant",
    "Options",
    "Report",
    "Signature",
    "lint_unavailable",
    "located",
    "mlx_text",
    "totals",
    "unavailable",
    "without_barriers",
    "without_guards",
]
