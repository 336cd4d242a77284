"""What every Triton kernel keeps to, read from its source; and that a GPU is needed to start one, not to import it."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

FILES = sorted(Path(importlib.import_module("dkv.kernels.triton").__path__[0]).glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_i03_every_masked_load_says_what_is_loaded_instead(file: Path) -> None:
    """sglang#27074, triton#3281, triton#5048: what a masked load gives without a fill value is undefined."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            names = {keyword.arg for keyword in node.keywords}
            assert len(node.args) == 1 and ("mask" in names) == ("other" in names), f"line {node.lineno}"


def test_k04_kernels_are_imported_without_a_gpu_and_refuse_to_start() -> None:
    """triton#6150, DeepSpeed#7028, Fast-LLM#143: a decorator asked for a GPU when it was imported."""
    modules = ", ".join(f"dkv.kernels.triton.{file.stem}" for file in FILES if file.stem != "__init__")
    script = (
        f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}\n"
        f"import dkv.integrations.torch_ops, {modules}\n"
        "import torch\n"
        "rows = torch.zeros(1, 1, 2, 4)\n"
        "from dkv.kernels.triton import decode\n"
        "try: decode.exact_attention(rows, rows, rows, True, None, None, None, None, 1.0)\n"
        "except ValueError as error: print(error)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "takes tensors on a GPU, got one on cpu" in done.stdout and "TRITON_INTERPRET=1" in done.stdout
