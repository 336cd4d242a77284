"""MLX's own text of a kernel. Without Metal it still writes the text while it exports a function."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from .host import Kernel, as_arrays

MLX_METAL_KERNEL = mx.fast.metal_kernel


def mlx_text(kernel: Kernel, inputs: list[Any], **call: Any) -> str:
    """What MLX would compile for this call of a kernel; ``call`` holds what the call takes besides ``inputs``."""
    real: Any = MLX_METAL_KERNEL(
        name=kernel.name,
        input_names=kernel.input_names,
        output_names=kernel.output_names,
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
        atomic_outputs=kernel.atomic_outputs,
    )
    sys.stdout.flush()
    stdout = os.dup(1)  # MLX prints past Python
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder:
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(
                str(Path(folder) / "f"), lambda *x: real(inputs=list(x), verbose=True, **call), *as_arrays(inputs)
            )
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        printed.seek(0)
        text = printed.read().decode()
    return text[text.index("```\n") + 4 : text.rindex("\n```")]
