"""The obvious computation that the reference is held against: decode row by row, then plain softmax attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from strategies import positions, widths

from dkv.reference import compress
from dkv.types import BlockFormat, CompressedBlocks

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass
class Case:
    """Shapes and settings of one random call."""

    B: int
    N: int
    H: int
    G: int
    Sq: int
    D: int
    Dv: int
    fmt: BlockFormat
    keep: str
    dtype: str
    seed: int

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def keys_values(self) -> tuple[np.ndarray, np.ndarray]:
        """Noise around a channel bias, so that nothing is centred."""
        rng, tokens, dtype = self.rng, self.N * self.fmt.block_size, DTYPES[self.dtype]
        k = rng.standard_normal((self.B, self.H, tokens, self.D)) + 3 * rng.standard_normal((self.H, 1, self.D))
        v = rng.standard_normal((self.B, self.H, tokens, self.Dv)) + 2 * rng.standard_normal((self.H, 1, self.Dv))
        return k.astype(dtype), v.astype(dtype)

    def blocks(self) -> CompressedBlocks:
        return compressed(*self.keys_values(), self.fmt, self.keep)

    def queries(self, dtype: Any = np.float64) -> np.ndarray:
        q = np.random.default_rng(self.seed + 1).standard_normal((self.B, self.H * self.G, self.Sq, self.D))
        return (0.7 * q).astype(dtype)

    def indices(self, width: int) -> np.ndarray:
        """Some blocks per kv head in any order, -1 among them."""
        rng, drawn = np.random.default_rng(self.seed + 2), np.full((self.B, self.H, width), -1, np.int32)
        for b, h in np.ndindex(self.B, self.H):
            chosen = rng.permutation(self.N)[: rng.integers(0, width + 1)]
            drawn[b, h, rng.permutation(width)[: len(chosen)]] = chosen
        return drawn


@st.composite
def cases(draw: st.DrawFn, min_blocks: int = 0, min_batch: int = 0) -> Case:
    """Shapes that differ on every axis. One case in eight is empty, one in eight has blocks of one or two tokens."""
    edge = draw(st.sampled_from(["none", "none", "none", "none", "none", "none", "empty", "tiny"]))
    size = draw(st.sampled_from([1, 2] if edge == "tiny" else [8, 16, 11, 4]))
    empty = draw(st.sampled_from(["batch", "blocks"])) if edge == "empty" else ""
    return Case(
        B=min_batch if empty == "batch" else draw(st.integers(1, 2)),
        N=min_blocks if empty == "blocks" else max(min_blocks, draw(st.integers(1, 3))),
        H=draw(st.integers(1, 3)),
        G=draw(st.sampled_from([2, 3, 1, 6, 7])),
        Sq=draw(st.integers(1, 3)),
        D=draw(st.sampled_from([4, 7, 6, 10, 3, 1])),
        Dv=draw(st.sampled_from([5, 8, 2, 1])),
        fmt=BlockFormat(
            block_size=size,
            rank=draw(st.sampled_from([3, 2, 128, 1, 0])),
            num_residuals=draw(st.sampled_from([size // 2, 3, 1, 0, size - 1, 300])),
            factor_bits=draw(st.sampled_from([8, 16, 32])),
            minmax=True,
            **draw(widths()),
        ),
        keep=draw(st.sampled_from(["distinct", "error"])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def compressed(
    k: np.ndarray,
    v: np.ndarray,
    fmt: BlockFormat,
    keep: str = "distinct",
    token_weight: np.ndarray | None = None,
    channel_weight: np.ndarray | None = None,
) -> CompressedBlocks:
    return CompressedBlocks(format=fmt, **compress.compress_blocks(k, v, fmt, keep, token_weight, channel_weight))


def poisoned(x: np.ndarray | None, where: Any) -> np.ndarray | None:
    """A copy with NaN at ``x[where]``, or the largest code of an integer array."""
    if x is None:
        return None
    x = x.copy()
    x[where] = np.iinfo(x.dtype).max if np.issubdtype(x.dtype, np.integer) else np.nan
    return x


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rebuild(blocks: CompressedBlocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``k`` and ``v`` of every row ``[B, N, H, S, D or Dv]`` as stored, and the keys of the low-rank part alone."""
    B, N, H, D = blocks.anchor_k.shape
    S, Dv = blocks.format.block_size, blocks.anchor_v.shape[3]
    k, v, low_k = np.zeros((B, N, H, S, D)), np.zeros((B, N, H, S, Dv)), np.zeros((B, N, H, S, D))
    for b, n, h in np.ndindex(B, N, H):
        for i in range(S):
            k[b, n, h, i] = blocks.anchor_k[b, n, h]
            v[b, n, h, i] = blocks.anchor_v[b, n, h]
            for j in range(blocks.rank):
                weight = float(blocks.u[b, n, i, j]) * float(blocks.u_unit[b, n])
                int8 = blocks.format.factor_bits == 8
                if int8:
                    weight *= float(blocks.u_scale[b, n, i])
                scale = float(blocks.basis_k_scale[b, n, j]) if int8 else 1.0
                k[b, n, h, i] += weight * scale * f64(blocks.basis_k[b, n, h, j])
                if blocks.basis_v is not None:
                    scale = float(blocks.basis_v_scale[b, n, j]) if int8 else 1.0
                    v[b, n, h, i] += weight * scale * f64(blocks.basis_v[b, n, h, j]) / float(blocks.v_gain[b, n])
        low_k[b, n, h] = k[b, n, h]
        for slot, i in enumerate(positions(blocks)[b, n]):
            k[b, n, h, i], v[b, n, h, i] = residual_row(blocks, b, n, h, slot)
    return k, v, low_k


def residual_row(blocks: CompressedBlocks, b: int, n: int, h: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """One residual row, decoded channel by channel."""
    k, v = blocks.residual_k[b, n, h, slot], blocks.residual_v[b, n, h, slot]
    if blocks.format.exact_rows:
        return f64(k), f64(v)
    fmt, D, Dv = blocks.format, blocks.head_dim, blocks.head_dim_v
    order = list(range(D)) if blocks.residual_k_order is None else blocks.residual_k_order[b, n, h].tolist()
    at = (b, n, h, slot // 128)
    row_k, row_v = f64(blocks.anchor_k[b, n, h]), np.zeros(Dv)
    codes_k = codes(k, place_bits(fmt.key_bits or [fmt.residual_bits] * 8, D))
    for place, channel in enumerate(order):
        low, step = float(blocks.residual_k_min[at][place]), float(blocks.residual_k_scale[at][place])
        row_k[channel] += float(blocks.residual_k_unit[b, n, h]) * (low + step * codes_k[place])
    bits = fmt.residual_bits if fmt.value_bits is None else fmt.value_bits
    for channel, code in enumerate(codes(v, [bits] * Dv)):
        low, step = float(blocks.residual_v_min[at][channel]), float(blocks.residual_v_scale[at][channel])
        row_v[channel] = float(blocks.residual_v_unit[b, n, h]) * (low + step * code)
    return row_k, row_v


def place_bits(key_bits: Any, dim: int) -> list[int]:
    """Bits at each place of the stored order."""
    return [key_bits[e] for s in range(dim) for e in range(8) if e * dim // 8 <= s < (e + 1) * dim // 8]


def codes(stored: np.ndarray, bits: list[int]) -> list[int]:
    """The number at each place of one packed row."""
    found, start = [], 0
    for width, run in itertools.groupby(bits):
        numbers = [0] * len(list(run))
        for part in [p for p in (8, 4, 2, 1) if width & p]:
            size = math.ceil(len(numbers) * part / 8)
            for j in range(len(numbers)):
                field = int(stored[start + j % size]) >> (part * (j // size)) & (2**part - 1)
                numbers[j] = numbers[j] * 2**part + field
            start += size
        found += numbers
    assert start == len(stored)
    return found


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    sm_scale: float | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of ``q [B, Hq, Sq, D]`` over the rows of ``k [B, Hkv, n, D]`` in ``visible [B, Hkv, Sq, n]``."""
    B, Hq, Sq, D = q.shape
    out, lse = np.zeros((B, Hq, Sq, v.shape[3])), np.full((B, Hq, Sq), -np.inf)
    for b, h, s in np.ndindex(B, Hq, Sq):
        kv = h // (Hq // k.shape[1])
        rows = np.flatnonzero(visible[b, kv, s])
        logits = f64(k[b, kv, rows]) @ f64(q[b, h, s]) * (1 / math.sqrt(D) if sm_scale is None else sm_scale)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        values = f64(v[b, kv, rows])
        if sink is not None:
            logits, values = np.append(logits, sink[h]), np.vstack([values, np.zeros((1, v.shape[3]))])
        if len(logits):
            weights = np.exp(logits - logits.max())
            out[b, h, s] = weights @ values / weights.sum()
            lse[b, h, s] = logits.max() + np.log(weights.sum())
    return out, lse


def assert_states_close(got: Any, want: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(f64(got[0]), want[0], rtol=rtol, atol=atol)
    np.testing.assert_allclose(got[1], want[1], rtol=max(rtol, 1e-6), atol=max(atol, 1e-6))
