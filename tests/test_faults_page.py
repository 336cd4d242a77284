"""``docs/faults.md`` lists each fault once, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "faults.md"
IDS = """
M01 M03 M04 M05 M07 M08 M09 M10 M11 M12 D01 D02 D03 D05 D06 D07 D08 D09 D10 D11 D12 D14 D15 D16 R01 R03 R04 R05 R06 R07
R08 R09 R11 R12 S01 S02 S03 S04 S05 S06 S07 S08 S10 S11 S13 S14 S15 S16 S17 S18 P01 P02 P03 P04 P05 P07 P08 P09 P10 C01
C02 C03 C04 C06 C07 C09 C10 C11 C12 C13 C15 C16 C17 C18 C20 C21 C22 C23 C24 C25 C26 C27 C28 C29 C30 C31 C32 T02 T03 T04
T05 T06 T07 T08 I01 I02 I03 I04 I05 I06 I07 I08 I09 I10 I11 I12 I13 I14 I16 I17 K01 K02 K03 K04 K05 K06 K07
""".split()
NOT_YET = {name for name in IDS if name.startswith("C")}


def rows() -> dict[str, str]:
    """The line of each id that begins a row of a table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [(match[1], line) for line in lines if (match := re.match(r"\| ([A-Z]\d\d) \|", line))]
    assert len({name for name, _ in found}) == len(found), "an id has two rows"
    return dict(found)


def test_every_fault_has_one_row() -> None:
    assert len(IDS) == len(set(IDS)) == 117
    listed = set(rows())
    assert listed <= set(IDS) and set(IDS) - listed <= NOT_YET


def test_rows_name_tests_that_exist_or_say_why_there_is_none() -> None:
    for name, line in rows().items():
        named = re.findall(r"`(test_\w+)::(test_\w+)`", line)
        assert named or "does not apply: " in line, name
        for file, test in named:
            assert f"def {test}(" in (TESTS / f"{file}.py").read_text(encoding="utf-8"), f"{name}: {file}::{test}"


def test_a_test_named_after_a_fault_is_in_its_row() -> None:
    page = rows()
    for file in TESTS.glob("test_*.py"):
        for test in re.findall(r"^def (test_(?:[a-z]\d\d_)+\w+)\(", file.read_text(encoding="utf-8"), re.M):
            for name in re.findall(r"(?<=_)[a-z]\d\d(?=_)", re.match(r"test_(?:[a-z]\d\d_)+", test)[0]):
                if name.upper() not in NOT_YET:
                    assert f"`{file.stem}::{test}`" in page[name.upper()], f"{name}: {file.stem}::{test}"
