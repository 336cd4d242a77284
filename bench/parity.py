"""Every op of the Triton backend against the float64 reference, on the device that it is for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.launches import FITTED
from dkv import testing
from dkv.config import DKVConfig
from dkv.types import BlockFormat

EXACT = BlockFormat(num_residuals=128, factor_bits=16, residual_bits=16)
TINY = BlockFormat(16, 4, 15)
RESERVE = 12.0  # seconds that are kept for the end


class Clock:
    """Seconds since the start, and whether something that takes so long still fits."""

    def __init__(self, seconds: float):
        self.start, self.seconds, self.skipped = time.perf_counter(), seconds, list[str]()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    def fits(self, what: str, seconds: float) -> bool:
        if self.spent + seconds + RESERVE <= self.seconds:
            return True
        self.skipped.append(what)
        return False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the run takes place: a GPU, or a CPU that interprets the kernels."""

    device: str
    smoke: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def parity_cases(smoke: bool) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Name, op, arguments of :func:`dkv.testing.make_inputs` and options of the op."""
    if smoke:
        shape = {"num_q_heads": 4, "head_dim": 16, "head_dim_v": 16, "num_blocks": 3, "window": 20}
        for op in ("route_blocks", "decode_attention", "prefill_attention", "compress_blocks"):
            yield "tiny", op, shape | {"config": TINY}, {}
        return
    shape = {"num_q_heads": 8, "head_dim": 128, "head_dim_v": 128, "num_blocks": 5, "window": 300, "dtype": "bfloat16"}
    formats = {
        "default": BlockFormat(),
        "fitted": FITTED,
        "paper": EXACT,
        "64 rows": BlockFormat(num_residuals=64),
        "no rows": BlockFormat(num_residuals=0),
    }
    for name, fmt in formats.items():
        yield name, "decode_attention", shape | {"config": fmt}, {}
    yield "fp16, D 80, Dv 72", "decode_attention", shape | {"dtype": "float16", "head_dim": 80, "head_dim_v": 72}, {}
    yield "fp32", "decode_attention", shape | {"dtype": "float32", "head_dim": 64, "head_dim_v": 64}, {}
    yield "4 queries, softcap", "decode_attention", shape | {"config": BlockFormat(), "q_len": 4}, {"softcap": 20.0}
    yield "default", "lowrank_attention", shape | {"config": formats["64 rows"]}, {}
    yield "default", "residual_attention", shape | {"config": BlockFormat()}, {}
    for router in ("lowrank", "keys", "residual"):
        fmt = formats["64 rows" if router == "lowrank" else "default"]
        yield router, "route_blocks", shape | {"config": fmt, "num_blocks": 9}, {"top_k": 4, "router": router}
    minmax = BlockFormat(minmax=True)
    yield "minmax", "route_blocks", shape | {"config": minmax, "num_blocks": 9}, {"top_k": 4, "router": "minmax"}
    yield "window", "exact_attention", shape | {"q_len": 3}, {"window": 200}
    yield "bf16", "merge_states", shape, {}
    long = shape | {"config": DKVConfig(block_size=64, num_residuals=63), "num_blocks": 12, "q_len": 300}
    yield "bf16", "prefill_attention", long, {}
    for name in ("default", "fitted", "paper"):
        yield name, "compress_blocks", shape | {"config": formats[name], "num_blocks": 2, "window": 0}, {}
        yield name, "reconstruct_blocks", shape | {"config": formats[name], "num_blocks": 2, "window": 0}, {}


def parity(place: Place, clock: Clock, backend: str = "triton") -> list[dict[str, Any]]:
    """Every op against the float64 reference on this device."""
    rows = []
    for name, op, shape, options in parity_cases(place.smoke):
        if not clock.fits(f"parity of {op} ({name})", 5):
            continue
        start = time.perf_counter()
        inputs = testing.to_library(testing.make_inputs(len(rows), **shape), "torch", place.device)
        try:
            testing.assert_matches_reference(backend, op, inputs, **options)
            said = ""
        except Exception as error:  # one that crashes is as red as one that is wrong
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        took = round(time.perf_counter() - start, 2)
        rows.append({"op": op, "case": name, "ok": not said, "said": said, "seconds": took})
    return rows
