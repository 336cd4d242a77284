"""Kernels compile for GPUs that are not there, and the bench that compiles them sees what is wrong."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dkv.benches.results import read_rows

pytest.importorskip("triton")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parent.parent
# the checkout comes last: where dkv is installed without -e, the checkout's own would lack its kernels
RUN = (
    "import runpy, sys; sys.path.append({root!r}); sys.argv[0] = {name!r}; "
    "{run}({name!r}, run_name='__main__', **{options})"
)


def run(name, *arguments, script=False):
    """A module of the checkout, or a script, with kernels that are not interpreted."""
    how = ("runpy.run_path", {}) if script else ("runpy.run_module", {"alter_sys": True})
    code = RUN.format(root=str(ROOT), name=name, run=how[0], options=how[1])
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"  # else it warns
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bad():
    done = run(str(ROOT / "tests" / "bad_kernels.py"), "sm_90", "gfx942", script=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_bench_sees_every_fault(bad, target):
    expected = {"in_tf32": "tf32", "narrow": "32-bit", "widened_late": "32-bit", "spilling": "spills"}
    for kernel, word in expected.items():
        assert any(word in failure for failure in bad[f"{kernel} {target}"]["failures"]), kernel
    assert "does not compile" in bad[f"wrong {target}"]["failures"][0]
    for kernel in ("narrow", "widened_late"):
        assert len(bad[f"{kernel} {target}"]["failures"]) == 1


@pytest.mark.parametrize(("target", "matrix"), [("sm_90", "mma"), ("gfx942", "mfma")])
def test_a_good_kernel_has_nothing_wrong(bad, target, matrix):
    row = bad[f"good {target}"]
    assert row["failures"] == [] and row["dots"] == {"bf16": 1} and row["spills"] == 0
    assert row["registers"] > 0 and row["shared"] > 0 and not row["dots_without_matrix_unit"]
    assert all(matrix in name for name in row["matrix"]) and row["matrix"]
    assert set(row["loads"]) <= {"16", "8", "4"} and "16" in row["loads"]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_i10_both_makers_get_an_artefact_with_the_kernels_symbol(bad, target):
    """triton#3536: a tool asked for the artefact of the other maker; there is no GPU and no ROCm here."""
    assert bad[f"good {target}"]["entry"]


def test_t07_float32_is_multiplied_in_float32(bad):
    """triton#6265, #8654, #10176, #5895: a product of float32 numbers kept 10 bits of them on one vendor's GPUs."""
    row = bad["attend in float32"]
    assert set(row["dots"]) == {"f32"} and not row["tf32"] and row["failures"] == []


@pytest.mark.skipif(importlib.util.find_spec("dkv.kernels.triton.decode") is None, reason="no Triton kernels")
def test_t02_i05_i09_kernels_of_a_decode_step_compile_for_both_makers(tmp_path):
    """sglang#28788, triton#10141, #5504, #4197, aiter#3257, #3734, #4385: 32-bit offsets, tiny dots, shared memory."""
    file = tmp_path / "aot.json"
    ops = "route_blocks,decode_attention,merge_states"
    arguments = ("--ops", ops, "--targets", "sm_90,gfx942", "--quick", "--geometries", "1", "--every")
    done = run("bench.aot", *arguments, "--json", str(file))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = read_rows(file)
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    assert all(row["decode"] or row["kernel"].startswith("_merge") for row in rows)
    assert any(row["matrix"] for row in rows) and not any(row["spills"] for row in rows)
    assert {row["kernel"] for row in rows} >= {"attend", "_merge"}
    assert not any(row["narrow_addresses"] for row in rows)
    assert all(row["shared"] <= {"sm_90": 232448, "gfx942": 65536}[row["target"]] for row in rows)


def test_settings_meet_in_pairs():
    axes = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7), "d": (8, 9)}
    code = "import json, sys; sys.path.append({!r}); from bench.aot import pairs; print(json.dumps(list(pairs({!r}))))"
    done = subprocess.run([sys.executable, "-P", "-c", code.format(str(ROOT), axes)], capture_output=True, text=True)
    settings = json.loads(done.stdout)
    assert settings[0] == {"a": 1, "b": 4, "c": 6, "d": 8} and len(settings) <= 8
    for one, two in itertools.combinations(axes, 2):
        assert {(each[one], each[two]) for each in settings} == set(itertools.product(axes[one], axes[two]))


def test_unknown_targets_are_refused(tmp_path):
    done = run("bench.aot", "--json", str(tmp_path / "x"), "--targets", "sm_12")
    assert done.returncode == 2 and "sm_80" in done.stderr
