"""A kernel of one's own, held against the reference: merging attention states, in Triton.

    TRITON_INTERPRET=1 python examples/new_kernel.py     # on a CPU; without the variable on a GPU
    TRITON_INTERPRET=1 python examples/new_kernel.py --mistake     # what a failure looks like

``dkv.testing`` brings seeded inputs in which no two axes have one size, the reference in float64, and for each op and
dtype a tolerance with its reason.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

import dkv
from dkv import testing


@triton.jit
def _merge(
    outs, lses, out, lse, rows, STATES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BASE2: tl.constexpr
):
    """One row of every state: ``outs [STATES, rows, DIM]`` and ``lses [STATES, rows]``."""
    row = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    top = -float("inf")
    for state in range(STATES):
        score = tl.load(lses + state * rows + row)
        score = tl.where(score == float("inf"), -float("inf"), score)  # how some kernels mark an empty state
        top = tl.maximum(top, score)
    shift = tl.where(top == -float("inf"), 0.0, top)  # all empty: -inf - -inf would be NaN
    total = 0.0
    mixed = tl.zeros([WIDTH], dtype=tl.float32)
    for state in range(STATES):
        score = tl.load(lses + state * rows + row)
        score = tl.where(score == float("inf"), -float("inf"), score)
        weight = tl.exp2(score - shift) if BASE2 else tl.exp(score - shift)
        part = tl.load(outs + (state * rows + row) * DIM + channel, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.where(weight > 0, weight * part, 0.0)  # selected away: an empty state's out may hold anything
        total += weight
    mixed = tl.where(total > 0, mixed / total, 0.0)
    tl.store(out + row * DIM + channel, mixed, mask=inside)
    tl.store(lse + row, shift + tl.log(total))


def merge_states(states: Sequence[dkv.AttentionState], base2: bool = False) -> dkv.AttentionState:
    """As :func:`dkv.merge_states`."""
    outs, lses = (torch.stack(parts) for parts in zip(*states))  # [n, B, Hq, Sq, Dv] and [n, B, Hq, Sq]
    out, lse = torch.empty_like(outs[0], dtype=torch.float32), torch.empty_like(lses[0])
    dim = out.shape[-1]
    width = triton.next_power_of_2(dim)
    _merge[(lse.numel(),)](outs, lses, out, lse, lse.numel(), len(states), dim, width, base2)
    return dkv.AttentionState(out.to(outs.dtype), lse)  # Triton's interpreter would cut bfloat16 short, not round it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mistake", action="store_true", help="take the natural logarithm of lse for one of base 2")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = functools.partial(merge_states, base2=options.mistake)
    for seed in range(options.seeds):
        for dtype in ("float32", "float16", "bfloat16"):
            inputs = testing.make_inputs(seed, dtype=dtype, q_len=1 + seed)
            inputs = testing.to_library(inputs, "torch", device)
            testing.assert_matches_reference(kernel, "merge_states", inputs)

    nothing = dkv.AttentionState(torch.full((2, 3, 1, 5), torch.nan), torch.full((2, 3, 1), -torch.inf))
    nothing = dkv.AttentionState(*(part.to(device) for part in nothing))
    merged = kernel([nothing, nothing])
    assert not merged.out.any() and (merged.lse == -torch.inf).all(), "the empty state is (0, -inf)"
    print(f"merge_states matches the reference: {options.seeds} seeds, 3 dtypes, and the empty state")


if __name__ == "__main__":
    main()
