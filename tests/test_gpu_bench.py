"""The GPU script, walked through without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("rich")
for op in ("route", "decode", "prefill", "compress"):
    pytest.importorskip(f"dkv.kernels.triton.{op}")

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from bench import gpu, parity  # noqa: E402
from bench.launches import launches  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.kernels.triton import _launch  # noqa: E402

interpreted = pytest.mark.skipif(not _launch.INTERPRETED, reason="TRITON_INTERPRET=1 runs kernels without a GPU")
SMOKE = ["--device", "cpu", "--smoke", "--json"]


@interpreted
def test_smoke_run(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert gpu.main([*SMOKE, str(file)]) == 0
    made = json.loads(file.read_text())
    assert made["parity_ok"] and {row["op"] for row in made["parity"]} >= {"route_blocks", "decode_attention"}
    assert {row["op"] for row in made["times"]} == {"decode", "prefill", "compress"}
    assert all(row["ms"]["dkv"] > 0 and row["ratio"] is None for row in made["times"])
    assert made["skipped"] == made["broken"] == []
    printed = capsys.readouterr().out
    assert "dense / dkv" in printed and "x │" not in printed


@interpreted
def test_red_parity_and_a_short_time(tmp_path, capsys, monkeypatch):
    def wrong(*arguments, **options):
        raise AssertionError("out is off by 3")

    monkeypatch.setattr(testing, "assert_matches_reference", wrong)
    file = tmp_path / "gpu.json"
    assert gpu.main([*SMOKE, str(file), "--seconds", "18"]) == 1
    made = json.loads(file.read_text())
    assert not made["parity_ok"] and made["times"] == []
    assert {what.split()[0] for what in made["skipped"]} == {"decode", "prefill", "compress"}
    printed = capsys.readouterr().out
    assert "Parity is red" in printed and "Stopped early" in printed and "off by 3" in printed


def test_a_ratio_needs_right_kernels_and_a_gpu():
    row = {"ms": {"dkv": 2.0, "torch backend": 1.0, "sdpa": 9.0, "sdpa flash": 8.0}}
    card, cpu = parity.Place("cuda", False), parity.Place("cpu", True)
    assert gpu.compared(row, card, True)["ratio"] == 4.0 and gpu.compared(row, card, True)["best_dense"] == "sdpa flash"
    assert gpu.compared(row, card, False)["ratio"] is None and gpu.compared(row, cpu, True)["ratio"] is None


def test_a_cpu_times_nothing_real(tmp_path):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--json", str(tmp_path / "x")])


def test_the_cases_of_parity_are_well_formed():
    """The kernels' own run needs a GPU; another backend takes the same arguments."""
    rows = parity.parity(parity.Place("cpu", False), parity.Clock(600), backend="torch")
    assert [row["said"] for row in rows if not row["ok"]] == []
    assert {row["op"] for row in rows} == set(testing.TOLERANCES)


def test_what_is_compiled_ahead_is_what_runs():
    for op, geometry in gpu.ahead():
        assert launches(op, geometry), op


def test_the_shell_script_is_one():
    assert subprocess.run(["bash", "-n", str(ROOT / "bench" / "gpu.sh")]).returncode == 0
