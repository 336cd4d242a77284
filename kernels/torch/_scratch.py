"""Room on a CPU that is used again by every step: fresh pages cost more than the numbers that are written into them."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_kept = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised room of a thread, good until ``name`` is asked for again; fresh room where not on a CPU."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    rooms: dict[tuple[str, torch.dtype], Tensor] = _kept.__dict__.setdefault("rooms", {})
    needed, room = math.prod(shape), rooms.get((name, dtype))
    if room is None or room.numel() < needed:
        with torch.inference_mode(False):  # what is made in inference mode can be written there alone
            room = rooms[name, dtype] = torch.empty(needed, dtype=dtype, device=device)
    return room[:needed].view(shape)


def widened(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
    """``part`` in ``dtype``; where that is a copy, it lies in the room of ``name``."""
    return part if part.dtype == dtype else scratch(name, tuple(part.shape), dtype, part.device).copy_(part)


def nbytes() -> int:
    """Bytes that this thread keeps."""
    return sum(room.nbytes for room in _kept.__dict__.get("rooms", {}).values())
