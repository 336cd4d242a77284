"""Peak memory of a stretch of code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Peak:
    """Filled in by :func:`watch`: bytes, and in words what they are."""

    nbytes: int = 0
    meaning: str = ""


@contextlib.contextmanager
def watch(device: Any) -> Iterator[Peak]:
    """Measure the peak memory while the body runs.

    On a GPU the peak of the allocator. On Linux the peak resident memory of the process during the body, by resetting
    the kernel's mark. Elsewhere the kernel's mark since the process began, which earlier work may have set.
    """
    peak = Peak()
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.nbytes = int(torch.cuda.max_memory_allocated())
        peak.meaning = "peak GPU memory, model included"
        return
    reset = _reset_high_water_mark()
    yield peak
    peak.nbytes = _high_water_mark()
    peak.meaning = (
        "peak resident memory of the process during the row, model included"
        if reset
        else "peak resident memory of the process up to the end of the row, model included"
    )


def _reset_high_water_mark() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def resident() -> int:
    """Bytes of the process that are in memory now; its peak so far where the system does not tell."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _high_water_mark()
