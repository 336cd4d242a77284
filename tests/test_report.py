"""README, docs/results.md and the picture say what the files under bench/results/ hold."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from bench import report, report_tables  # noqa: E402
from bench.report_tables import SECTIONS  # noqa: E402
from dkv.benches import results  # noqa: E402


@pytest.fixture
def copy(tmp_path):
    """A checkout of what the report reads and writes."""
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/results.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def check(root):
    return report.main(["--check", "--root", str(root)])


def test_readme_and_results_are_those_of_the_files():
    assert check(ROOT) == 0
    assert (ROOT / "docs" / "images" / "memory-and-recall.svg").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_changed_number_is_noticed(page, copy, capsys):
    assert check(copy) == 0
    ms = results.read_rows(copy / "bench" / "results" / "decode.json")[-1]["ms"]
    number = f"{ms:.2f}" if page == "README.md" else report_tables.cell(ms)
    file = copy / page
    text = file.read_text()
    assert f"| {number} |" in text
    file.write_text(text.replace(f"| {number} |", "| 1.23 |"))
    assert check(copy) == 1
    assert capsys.readouterr().out.startswith(f"{page} does not say what bench/results/ holds")


def test_a_changed_file_of_results_is_noticed_and_written(copy):
    pytest.importorskip("matplotlib")
    file = copy / "bench" / "results" / "decode.json"
    rows = results.read_rows(file)
    rows[0]["ms"] = 1234.5
    results.write_json(file, rows)  # in the newer form
    assert check(copy) == 1
    assert report.main(["--root", str(copy)]) == 0 and check(copy) == 0
    assert "| 1234.50 |" in (copy / "README.md").read_text()
    page = (copy / "docs" / "results.md").read_text()
    made = json.loads(file.read_text())
    assert f"`{made['command']}`" in page and f"Measured on {made['date']}. dkv" in page
    drawn = (copy / "docs" / "images" / "memory-and-recall.svg").read_text()
    assert report.main(["--root", str(copy)]) == 0
    assert (copy / "docs" / "images" / "memory-and-recall.svg").read_text() == drawn
    for text in ("dense", "published DKV, R=64", "balanced", "keep newest 1/4", "int4"):
        assert f"<!-- {text} -->" in drawn or f"<!-- {text}, " in drawn, text


def test_unknown_files_are_named_and_absent_ones_left_out(copy, capsys):
    folder = copy / "bench" / "results"
    (folder / "metal_mutants.txt").unlink()
    assert check(copy) == 1
    assert report.filled("<!-- report:mutants -->1<!-- /report -->", report.Results(folder)).count("--><!--") == 1
    (folder / "surprise.json").write_text("[]")
    capsys.readouterr()
    assert check(copy) == 1
    assert "surprise.json is in no section" in capsys.readouterr().err


def test_marks_must_pair_and_be_known(copy):
    found = report.Results(copy / "bench" / "results")
    for text, message in (
        ("<!-- report:memory -->", "do not pair"),
        ("<!-- report:memory --> <!-- report:recall --> <!-- /report -->", "do not pair"),
        ("<!-- report:nope --> <!-- /report -->", "README asks for 'nope'"),
    ):
        with pytest.raises(ValueError, match=message):
            report.filled(text, found)


def test_every_block_is_in_readme_and_every_file_has_a_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name, _ in report.BLOCK.findall(text)} == set(report.BLOCKS)
    assert {file for file, _ in report.BLOCKS.values()} <= set(SECTIONS)
    found = report.Results(ROOT / "bench" / "results")
    for name in found.values:
        assert found.command(name).startswith(("dkv ", "python ", "bash "))


def test_any_rows_make_a_table():
    rows = [{"op": "a|b", "ok": True, "us": {"x": 1.5, "y": 2}}, {"op": "c", "bytes": 12345, "none": None}]
    assert report_tables.plain(rows).splitlines() == [
        "| op | ok | us | bytes | none |",
        "| --- | --- | --- | --- | --- |",
        "| a\\|b | yes | x 1.5, y 2 | - | - |",
        "| c | - | - | 12,345 | - |",
    ]
    assert report_tables.plain({"tokens_seen": 1000, "rows": rows}).startswith(
        "- tokens seen: 1,000\n\nrows:\n\n| op |"
    )


def test_mutants_are_counted():
    lines = [
        "merge | a.metal:1 | barrier | race",
        "merge | a.metal:2 | x <\n   y ? | other",
        "merge | a.metal:3 | if x | same: y",
    ]
    text = "\n".join([*lines, "route | b.metal:4 | barrier | NOT CAUGHT", "1 not caught"])
    assert dict(report_tables.mutants(text)) == {
        ("merge", "barrier"): 1,
        ("merge", "guard"): 1,
        ("merge", "same"): 1,
        ("route", "missed"): 1,
    }
    with pytest.raises(ValueError, match="mutants that nothing notices"):
        report.mutants(text)
