"""``docs/faults.md`` lists each fault once, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "faults.md"
NUMBERS = {
    "M": "01 03 04 05 07 08 09 10 11 12",
    "D": "01 02 03 05 06 07 08 09 10 11 12 14 15 16",
    "R": "01 03 04 05 06 07 08 09 11 12",
    "S": "01 02 03 04 05 06 07 08 10 11 13 14 15 16 17 18",
    "P": "01 02 03 04 05 07 08 09 10",
    "C": "01 02 03 04 06 07 09 10 11 12 13 15 16 17 18 20 21 22 23 24 25 26 27 28 29 30 31 32",
    "T": "02 03 04 05 06 07 08",
    "I": "01 02 03 04 05 06 07 08 09 10 11 12 13 14 16 17",
    "K": "01 02 03 04 05 06 07",
}
IDS = [section + number for section, numbers in NUMBERS.items() for number in numbers.split()]


def rows() -> dict[str, str]:
    """The line of each id that begins a row of a table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [(match[1], line) for line in lines if (match := re.match(r"\| ([A-Z]\d\d) \|", line))]
    assert len({name for name, _ in found}) == len(found), "an id has two rows"
    return dict(found)


def test_every_fault_has_one_row() -> None:
    assert len(IDS) == len(set(IDS)) == 117
    listed = set(rows())
    assert listed == set(IDS)


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
                assert f"`{file.stem}::{test}`" in page[name.upper()], f"{name}: {file.stem}::{test}"
