"""Kernels with one fault each, which the compile bench must find; run as a script it prints what it found.

Also what it finds in one of dkv's own, in float32.
"""

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl


@triton.jit
def good(x, y, out, stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = tl.arange(0, SIZE)
    a = tl.load(x + row[:, None] * stride + column[None, :])
    b = tl.load(y + column[:, None] * SIZE + column[None, :])
    tl.store(out + row[:, None] * SIZE + column[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def in_tf32(x, y, out, stride, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    a = tl.load(x + row[:, None] * SIZE + column[None, :]).to(tl.float32)
    b = tl.load(y + row[:, None] * SIZE + column[None, :]).to(tl.float32)
    tl.store(out + row[:, None] * SIZE + column[None, :], tl.dot(a, b, input_precision="tf32"))


@triton.jit
def narrow(x, y, out, stride, SIZE: tl.constexpr):
    row, column = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, SIZE)
    a = tl.load(x + row[:, None] * stride + column[None, :])
    tl.store(out + row[:, None].to(tl.int64) * SIZE + column[None, :], a.to(tl.float32))


@triton.jit
def widened_late(x, y, out, stride, SIZE: tl.constexpr):
    row, column = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, SIZE)
    a = tl.load(x + (row * stride).to(tl.int64)[:, None] + column[None, :])
    tl.store(out + row[:, None].to(tl.int64) * SIZE + column[None, :], a.to(tl.float32))


@triton.jit
def spilling(x, y, out, stride, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, 2 * SIZE)
    a = tl.load(x + row[:, None] * SIZE + column[None, :]).to(tl.float32)
    b = tl.load(y + row[:, None] * SIZE + column[None, :]).to(tl.float32)
    tl.store(out + row[:, None] * SIZE + column[None, :], tl.exp(a) * tl.sum(b, 0)[None, :] + b)


@triton.jit
def wrong(x, y, out, stride, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE + 1), 0.0)


def main() -> None:
    from bench import compiled
    from bench.launches import Geometry, Launch, launches

    rows = {}
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    out = torch.empty(64, 64, device="meta")
    for kernel in (good, in_tf32, narrow, widened_late, spilling, wrong):
        for target in sys.argv[1:]:
            size = {"sm_90": 64, "gfx942": 128}[target] if kernel is spilling else 32  # a wave has 512 registers
            options = {"SIZE": size, "num_warps": 1, "num_stages": 1}
            launch = Launch("test", kernel, (1,), (x, x, out, 64), options)
            job = compiled.specialised(launch, compiled.TARGETS[target])
            rows[f"{launch.name} {target}"] = compiled.compiled(job, target)
    (launch,) = launches("exact_attention", Geometry(dtype="fp32", window=256))
    rows["attend in float32"] = compiled.compiled(compiled.specialised(launch, compiled.TARGETS["sm_90"]), "sm_90")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
