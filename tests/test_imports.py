"""What importing costs and which way imports point."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "triton", "mlx", "mlx_lm", "transformers", "safetensors", "ml_dtypes", "typer", "rich", "matplotlib")


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import dkv", "import dkv; dkv.available_backends()", "import dkv.models"])
def test_import_loads_numpy_and_nothing_heavier(statement):
    loaded = _loaded_by(statement)
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_import_dkv_needs_numpy_at_most_beside_the_standard_library():
    added = {name for name in _loaded_by("import dkv") - _loaded_by("pass") if not name.startswith("_")}
    assert added - set(sys.stdlib_module_names) - {"numpy"} == {"dkv"}


def test_the_reference_runs_on_numpy_alone():
    statement = (
        "import numpy as np, dkv\n"
        "x = np.random.default_rng(0).standard_normal((1, 2, 16, 4))\n"
        "cfg = dkv.DKVConfig(block_size=8, rank=2)\n"
        "blocks = dkv.compress_blocks(x.astype('f4'), x.astype('f4'), config=cfg)\n"
        "dkv.decode_attention(x[:, :, :1].astype('f4'), blocks, None, None, config=cfg)"
    )
    assert _loaded_by(statement).isdisjoint(HEAVY)


def _imported(path: Path) -> set[str]:
    """What a file imports from outside its own folder; a relative import may not leave it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path} reaches out of its folder by a relative import"
            if node.level:
                continue
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_import_arrows():
    for path in sorted((ROOT / "reference").rglob("*.py")):
        for name in _imported(path):
            assert not name.startswith("dkv") or name.startswith("dkv.reference"), f"{path.name} imports {name}"
            assert name.partition(".")[0] not in HEAVY, f"{path.name} imports {name}"
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        own = ".".join(("dkv", *path.parent.relative_to(ROOT).parts))
        for name in _imported(path):
            if name.startswith("dkv."):
                allowed = ("dkv.types", "dkv.config", own)
                assert name.startswith(allowed), f"{path.relative_to(ROOT)} imports {name}"
