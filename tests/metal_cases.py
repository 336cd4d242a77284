"""What hypothesis draws for the Metal kernels: calls that differ in all that is read at run time, of few builds."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st
from strategies import Case, widths

from dkv.types import BlockFormat


@dataclasses.dataclass(frozen=True)
class Build:
    """What a build is made for; all else of a call is read at run time.

    ``queries`` are group sizes and lengths of which a threadgroup takes the same number of rows, ``dims`` those that
    have room in the same width, and so are ``ranks``.
    """

    queries: tuple[tuple[int, int], ...]
    dims: tuple[tuple[int, int], ...]
    dtype: str
    factor_bits: int
    exact: bool
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    every: bool = True  # blocks that keep every row among them


BUILDS = {
    "narrow": Build(
        ((6, 1), (3, 3), (7, 2), (5, 16), (16, 1)), ((24, 20), (17, 5), (3, 8), (32, 31)), "float32", 8, False,
        (16, 11, 1, 4, 256), (5, 3, 0, 32),
    ),
    "wide": Build(
        ((2, 1), (1, 3), (4, 1)), ((72, 128), (128, 64), (96, 80)), "bfloat16", 16, True, (16, 11, 1, 140), (5, 1, 0)
    ),
    "widest": Build(
        ((1, 1),), ((192, 128), (130, 256), (256, 192)), "float16", 32, False, (256, 140), (128, 70), every=False
    ),
}  # fmt: skip


@st.composite
def of_build(draw: st.DrawFn, build: Build, minmax: bool = False) -> Case:
    size = draw(st.sampled_from(build.sizes))
    bits = {"residual_bits": 16} if build.exact else draw(widths().filter(lambda bits: bits["residual_bits"] < 16))
    kept = [size // 2, 3, 0, *([300] * 2 if build.every else [130])]
    fmt = BlockFormat(
        size, draw(st.sampled_from(build.ranks)), draw(st.sampled_from(kept)), build.factor_bits, minmax=minmax, **bits
    )
    group, length = draw(st.sampled_from(build.queries))
    dim, dim_v = draw(st.sampled_from(build.dims))
    heads, batch = draw(st.sampled_from([2, 1, 3])), draw(st.sampled_from([2, 1, 3]))
    num_blocks = draw(st.sampled_from([3, 2, 1, 0, 5] if size < 128 else [2, 1]))
    window = draw(st.sampled_from([9, 0, 1, 130, 257]))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    shape = {"batch": batch, "num_q_heads": heads * group, "num_kv_heads": heads, "head_dim": dim}
    shape |= {"head_dim_v": dim_v, "num_blocks": num_blocks, "window": window, "q_len": length}
    return Case(
        seed=seed,
        shape=shape,
        dtype=build.dtype,
        fmt=fmt,
        counts=rng.integers(0, num_blocks + 1, batch).tolist() if draw(st.booleans()) else None,
        lengths=rng.integers(0, window + 1, batch).tolist() if draw(st.booleans()) else None,
        width=draw(st.sampled_from([4, 1, 7, 0, 40])),
    )
