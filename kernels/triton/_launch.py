"""The one way a kernel starts, and what it takes to start one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

# read where triton reads it: when kernels are decorated
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
MOST_REGISTERS = 255  # a thread of NVIDIA's GPUs can have
_alone = threading.Lock() if INTERPRETED else contextlib.nullcontext()  # the interpreter has one grid for all threads
# takes (kernel, grid, arguments, options) instead of running it: the compile and traffic benches count launches so
recorder: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int,
    maxnreg: int | None = None,
    **constants: Any,
) -> None:
    """Start ``kernel`` over ``grid``; a grid without programs starts nothing.

    ``num_warps`` and ``maxnreg`` are for NVIDIA's GPUs: see :func:`options_of`.

    Raises
    ------
    ValueError
        When tensors lie in CPU memory and kernels were not interpreted from the start.
    """
    options = {**constants, "num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    if 0 in grid:
        return
    if recorder is not None:
        recorder(kernel, grid, arguments, options)
        return
    if not INTERPRETED:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device.type != "cuda":
                raise ValueError(
                    f"backend 'triton' takes tensors on a GPU, got one on {argument.device}; to run the kernels on a "
                    "CPU set TRITON_INTERPRET=1 before Python starts"
                )
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with _alone, torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel[grid](*arguments, **options_of(options, torch.version.hip is not None))


def options_of(options: dict[str, Any], hip: bool) -> dict[str, Any]:
    """What a launch is compiled with.

    ``maxnreg`` are the registers of a thread that NVIDIA's assembler uses before it spills. AMD's has no such option;
    there a warp has 64 threads, and more than 4 of them leave each but 256 registers.
    """
    options = {name: value for name, value in options.items() if name != "maxnreg" or (value is not None and not hip)}
    return {**options, "num_warps": min(options["num_warps"], 4)} if hip else options


def dot_dtype(*tensors: Tensor) -> tl.dtype:
    """What the matrix units multiply: the tensors' own 16-bit dtype where they share one, else float32.

    The interpreter multiplies bit patterns of bfloat16, so there it is float32.
    """
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if INTERPRETED or len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return tl.float32
    return tl.float16 if dtypes == {torch.float16} else tl.bfloat16


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return 1 << (max(n, least) - 1).bit_length()
