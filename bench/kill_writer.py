"""Writers that are killed: what is at the path afterwards is the old file or the new one, whole."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from dkv import _paths

WRITERS = ("/_paths.py", "/_files.py", "/_json.py", "/_mlx_files.py", "/files.py", "/contextlib.py", "/profile.py")
END = 20  # lines of a save, the rename among them: half of the kills
PATIENCE = 1200  # seconds that a save may take, on a machine that is busy
OLD, NEW = "the old file", "the new file"


def killed(
    save_old: Callable[[str], None],
    save_new: Callable[[str], None],
    load: Callable[[str], Any],
    path: Path,
    times: int,
    seed: int,
) -> Counter[str]:
    """Save ``times`` times in a process that dies by SIGKILL at a random line of the writer; which file was there.

    Raises
    ------
    AssertionError
        When it was neither, or another save does not work or does not clear what a killed one left long ago.
    """
    rng, counts = Random(seed), Counter[str]()
    save_new(str(path))
    new = load(str(path))
    lines = _lines(lambda: save_new(str(path)))
    save_old(str(path))
    old = load(str(path))
    for _ in range(times):
        at = rng.randrange(lines) if rng.random() < 0.5 else lines - 1 - rng.randrange(END)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(PATIENCE)
                sys.settrace(_killer(at))
                save_new(str(path))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"line {at}: status {status}"
        found = load(str(path))
        assert found in (old, new), f"killed at line {at} of {lines}, seed {seed}: neither the old file nor the new one"
        counts[OLD if found == old else NEW] += 1
        left = [each for each in path.parent.iterdir() if each.name.startswith(_paths.MARK)]
        assert len(left) <= 1, f"killed at line {at}: left {left}"
        for each in left:
            os.utime(each, (0, 0))
        save_old(str(path))
        assert load(str(path)) == old and not any(each.exists() for each in left), f"killed at line {at}"
    return counts


def _lines(save: Callable[[], None]) -> int:
    """How many lines of the package one save runs."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not _ours(frame):
            return None
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save()
    finally:
        sys.settrace(before)
    return count[0]


def _killer(at: int) -> Any:
    """A trace function that kills its own process at a line."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not _ours(frame):
            return None
        if event == "line":
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
        return trace

    return trace


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(WRITERS)
