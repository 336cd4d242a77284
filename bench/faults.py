"""What was tried to break dkv, and what broke: ``python -m bench.faults [--minutes 10] [--json FILE]``.

The minutes are shared: spoilt files of every kind, writers that are killed, bad arguments to every public function, and
the state machines of tests/ with more examples; a soak follows. Exit status 1 when anything failed; a spoilt file that
was taken wrongly is kept in ``--keep``.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dkv
from bench import fuzz_files, hostile, kill_writer, lives
from dkv.benches.results import write_json

SHARES = {"spoilt files": 0.4, "killed writers": 0.1, "bad arguments": 0.2, "state machines": 0.3}  # of the minutes
FILES, KILLS, CALLS, LIVES = 200, 20, 20, 5  # between two looks at the clock

Trial = Callable[[int], tuple[Counter[str], list[str]]]  # of a seed: outcomes, and what failed


class Row:
    """One line of the table."""

    def __init__(self, what: str, name: str) -> None:
        self.what, self.name = what, name
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []

    def dict(self) -> dict[str, Any]:
        counts = dict(sorted(self.counts.items()))
        found = {"what": self.what, "of": self.name, "tried": self.counts.total(), "outcomes": counts}
        return {**found, "figures": self.figures, "failed": self.failed}


def rounds(seconds: float, seed: int) -> Iterator[int]:
    """Seeds, one after another until the time is over; one at least."""
    stop = time.monotonic() + seconds
    yield seed
    while time.monotonic() < stop:
        seed += 1
        yield seed


def tried(what: str, trials: dict[str, Trial], seconds: float, seed: int) -> list[Row]:
    """A row for each trial; they share the time, and each ends with its first failure."""
    rows = []
    for name, trial in trials.items():
        row = Row(what, name)
        for number in rounds(seconds / len(trials), seed):
            counts, row.failed = trial(number)
            row.counts += counts
            if row.failed:
                break
        rows.append(row)
    return rows


def spoilt_files(keep: Path) -> dict[str, Trial]:
    def spoilt(kind: fuzz_files.Kind, number: int) -> tuple[Counter[str], list[str]]:
        return listed(*fuzz_files.fuzzed(kind, keep, FILES, number))

    return {kind.name: functools.partial(spoilt, kind) for kind in fuzz_files.kinds(keep)}


def killed_writers(keep: Path) -> dict[str, Trial]:
    def killed(kind: fuzz_files.Kind, number: int) -> tuple[Counter[str], list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"file{kind.suffix}"
            try:
                return kill_writer.killed(*kind.saves, kind.load, path, KILLS, number), []
            except AssertionError as error:
                return Counter(), [f"{kind.name}: {error} (seed {number})"]

    return {kind.name: functools.partial(killed, kind) for kind in fuzz_files.kinds(keep) if kind.saves is not None}


def bad_arguments(keep: Path) -> dict[str, Trial]:
    return {library: lambda number, name=library: hostile.run(number, CALLS, name) for library in hostile.libraries()}


def state_machines(keep: Path) -> dict[str, Trial]:
    def lived(machine: Any, number: int) -> tuple[Counter[str], list[str]]:
        return listed(*lives.lived(machine, LIVES, number))

    return {name: functools.partial(lived, make()) for name, make in lives.machines().items()}


def listed(counts: Counter[str], failure: str | None) -> tuple[Counter[str], list[str]]:
    return counts, [] if failure is None else [failure]


def soak(tokens: int, seed: int) -> Row:
    row = Row("soak", "a bounded cache")
    row.figures, row.failed = lives.soaked(tokens, seed)
    row.counts["tokens"] = row.figures["tokens"]
    return row


PARTS: dict[str, Callable[[Path], dict[str, Trial]]] = {
    "spoilt files": spoilt_files,
    "killed writers": killed_writers,
    "bad arguments": bad_arguments,
    "state machines": state_machines,
}


def run(minutes: float, seed: int, keep: Path, parts: list[str]) -> list[Row]:
    """One row for each kind of what was tried."""
    total = sum(SHARES[name] for name in parts)
    rows = []
    for name in parts:
        with Console(stderr=True).status(name):
            rows += tried(name, PARTS[name](keep), 60 * minutes * SHARES[name] / total, seed)
    return rows


def table(rows: list[Row]) -> Table:
    shown = Table("what", "of", "tried", "survived", "failed", title=f"dkv {dkv.__version__}")
    for row in rows:
        survived = [f"{count:,} {name}" for name, count in sorted(row.counts.items()) if name != "failed"]
        survived += [f"{name} {value:,.3g}" for name, value in row.figures.items() if name != "tokens"]
        shown.add_row(row.what, row.name, f"{row.counts.total():,}", ", ".join(survived), str(len(row.failed)))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="leave the other parts out; may repeat")
    parser.add_argument("--keep", type=Path, help="a folder for spoilt files that were taken; temporary if unset")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the soak; 0 leaves it out")
    parser.add_argument("--json")
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="dkv-faults-"))
    keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # what is forked has no threads of its own
    rows = run(options.minutes, options.seed, keep, options.only or list(PARTS))
    if options.tokens:
        rows.append(soak(options.tokens, options.seed))
    console = Console()
    console.print(table(rows))
    failed = [failure for row in rows for failure in row.failed]
    for failure in failed:
        console.print(failure, markup=False)
    if options.json:
        write_json(
            options.json, {"minutes": options.minutes, "seed": options.seed, "rows": [row.dict() for row in rows]}
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
