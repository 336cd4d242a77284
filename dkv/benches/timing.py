"""How long one call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(step: Callable[[], Any], device: str) -> float:
    """Time of one call, until the device has done its work."""
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
