"""What hypothesis draws: shapes, lengths, formats, edge switches and a seed, never the numbers themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import dkv
from dkv import testing
from dkv._dispatch import BACKENDS as KNOWN
from dkv.types import BlockFormat, CompressedBlocks

# "mlx" is one of the two that bear its name
SKIPPED = ("reference", "mlx")
BACKENDS = [name for name, reason in dkv.available_backends().items() if reason is None and name not in SKIPPED]
ALL_BACKENDS = ["reference", *BACKENDS]
# what users' faults are tried on: the Metal kernels too, which run by the host where Metal is not found (conftest.py)
CASE_BACKENDS = [*ALL_BACKENDS, *(["mlx-metal"] if "mlx-twin" in BACKENDS and "mlx-metal" not in BACKENDS else [])]
SMALL_DIMS = (3, 5, 8, 17, 24)
LARGE_DIMS = (64, 72, 80, 96, 128, 192)


def library(backend: str) -> str:
    return KNOWN[backend][0]


def call(backend: str, op: str, *arguments: Any, **options: Any) -> Any:
    """A public op on NumPy arguments by a backend; the result in NumPy."""
    arguments = testing.to_library(arguments, library(backend))
    options = {
        name: testing.to_library(x, library(backend)) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    return testing.to_numpy(getattr(dkv, op)(*arguments, backend=backend, **options))


@dataclasses.dataclass
class Case:
    """One call: what :func:`dkv.testing.make_inputs` takes, and what is ragged about it."""

    seed: int
    shape: dict[str, int]
    dtype: str
    fmt: BlockFormat
    counts: list[int] | None
    lengths: list[int] | None
    width: int

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed + 1)

    def inputs(self, kind: str = "numpy") -> testing.Inputs:
        """Inputs in which all that is not to be read holds garbage."""
        made = testing.make_inputs(self.seed, **self.shape, dtype=self.dtype, config=self.fmt)
        if self.counts is not None:
            blocks = dataclasses.replace(made.blocks, block_counts=np.array(self.counts, np.int32))
            beyond = np.arange(self.shape["num_blocks"]) >= blocks.block_counts[:, None]
            made = made._replace(blocks=poisoned(blocks, beyond))
        if self.lengths is not None:
            beyond = np.arange(self.shape["window"]) >= np.array(self.lengths)[:, None]
            for name in ("k_window", "v_window"):
                rows = np.array(getattr(made, name))
                rows.swapaxes(1, 2)[beyond] = np.nan
                made = made._replace(**{name: rows})
        return testing.to_library(made, kind)

    def seq_lens(self) -> np.ndarray | None:
        return None if self.lengths is None else np.array(self.lengths, np.int32)

    def sink(self) -> np.ndarray:
        return self.rng.standard_normal(self.shape["num_q_heads"]).astype(np.float32)

    def indices(self) -> np.ndarray:
        """Some blocks per kv head in any order, with repeats, -1 and, where counts are ragged, blocks beyond them."""
        size = (self.shape["batch"], self.shape["num_kv_heads"], self.width)
        return self.rng.integers(-1, max(self.shape["num_blocks"], 0), size, np.int32)


def positions(blocks: CompressedBlocks) -> np.ndarray:
    """Positions of the residual rows ``[B, N, R]``, int64; they are stored where some rows are no residuals."""
    if blocks.residual_indices is not None:
        return np.asarray(blocks.residual_indices).astype(np.int64)
    assert blocks.num_residuals == blocks.block_size - 1
    return np.tile(np.arange(1, blocks.block_size), (blocks.batch_size, blocks.num_blocks, 1))


def poisoned(blocks: CompressedBlocks, where: np.ndarray, positions: bool = True) -> CompressedBlocks:
    """The blocks ``where [B, N]`` filled with NaN and the largest codes and, for blocks that are none, positions."""
    filled = {}
    for name, part in blocks.parts():
        if part.ndim > 1 and (positions or name != "residual_indices"):
            part = np.array(part)
            part[where] = np.iinfo(part.dtype).max if part.dtype.kind in "iu" else np.nan
        filled[name] = part
    return dataclasses.replace(blocks, **filled)


@st.composite
def widths(draw: st.DrawFn) -> dict[str, Any]:
    """Bits of residual rows, as fields of a format: one for all, or some for each eighth of a key and for values."""
    bits = draw(st.sampled_from([4, 8, 16, 3, 1, 2, 5, 6, 7]))
    if bits == 16 or draw(st.booleans()):
        return {"residual_bits": bits}
    key_bits = draw(st.none() | st.lists(st.integers(0, 8), min_size=8, max_size=8))
    return {
        "residual_bits": bits,
        "key_bits": None if key_bits is None else tuple(sorted(key_bits, reverse=True)),
        "value_bits": draw(st.sampled_from([None, 2, 0, 1, 3, 5, 8])),
    }


@st.composite
def formats(draw: st.DrawFn, sizes: tuple[int, ...] = (16, 8, 11, 4, 16, 256), minmax: bool = False) -> BlockFormat:
    size = draw(st.sampled_from(sizes))
    return BlockFormat(
        block_size=size,
        rank=draw(st.sampled_from([3, 5, 1, 0, 128] if size < 256 else [6, 32])),
        num_residuals=draw(st.sampled_from([size // 2, 3, 0, size - 1, 300, 1])),
        factor_bits=draw(st.sampled_from([8, 16, 32])),
        minmax=minmax or draw(st.booleans()),
        **draw(widths()),
    )


@st.composite
def cases(draw: st.DrawFn, minmax: bool = False, full: bool = True, min_batch: int = 0, min_blocks: int = 0) -> Case:
    """No two axes of one size, edges often: empty batches, no blocks, windows of 1, 255, 256 and 257 rows.

    ``full=False`` leaves out ragged counts and lengths.
    """
    fmt = draw(formats(minmax=minmax))
    num_kv_heads, group = draw(st.sampled_from([2, 1, 3])), draw(st.sampled_from([2, 3, 1, 6, 7]))
    wide = draw(st.integers(0, 4)) == 0
    head_dim = draw(st.sampled_from(LARGE_DIMS if wide else SMALL_DIMS))
    head_dim_v = draw(st.sampled_from([dim for dim in (LARGE_DIMS if wide else SMALL_DIMS) if dim != head_dim]))
    batch = draw(st.sampled_from([b for b in (2, 3, 1, 2, 3, 0) if b >= min_batch]))
    most = 2 if fmt.block_size == 256 else 5
    num_blocks = draw(st.sampled_from([n for n in (2, most, 1, 4, 0) if min_blocks <= n <= most]))
    window = draw(st.sampled_from([9, 13, 1, 0, 255, 256, 257]))
    shape = {
        "batch": batch,
        "num_q_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "num_blocks": num_blocks,
        "window": window,
        "q_len": draw(st.sampled_from([1, 2, 3, 1])),
    }
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    ragged = full and draw(st.booleans())
    counts = rng.integers(0, num_blocks + 1, batch).tolist() if ragged else None
    lengths = rng.integers(0, window + 1, batch).tolist() if full and draw(st.booleans()) else None
    return Case(
        seed=seed,
        shape=shape,
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        fmt=fmt,
        counts=counts,
        lengths=lengths,
        width=draw(st.sampled_from([3, 1, 2, 0, 7])),
    )


more = settings(max_examples=4 * settings().max_examples)  # for the parity of an op
softcaps = st.sampled_from([None, 2.0, 30.0])
scales = st.sampled_from([None, 0.3])


def special_scores(rng: np.random.Generator, size: int) -> np.ndarray:
    """Scores ``[2, 2, size]`` with zeros of both signs, infinities and NaN, plain ones, and ties everywhere."""
    special = [0.0, -0.0, 0.25, 1.0, np.nan, np.inf, -np.inf, 1e-30, -3e38, -1.0, -2.0]
    score = rng.choice(special, (2, 2, size)).astype(np.float32)
    score[1] = rng.standard_normal((2, size))
    score[1, 1, 5:] = 0.5
    return score


def stable_selection(score: np.ndarray, counts: np.ndarray, top_k: int, first: int, last: int) -> np.ndarray:
    """A stable sort of ``score [B, H, N]``: pinned blocks, then the highest, NaN as -inf."""
    out = np.full((*score.shape[:2], min(top_k, score.shape[2])), -1)
    for b, h in np.ndindex(*score.shape[:2]):
        slots = np.arange(counts[b])
        key = np.where(np.isnan(score[b, h, slots]), -np.inf, score[b, h, slots]).astype(np.float64)
        pinned = (slots < first) | (slots >= counts[b] - last)
        chosen = np.sort(np.lexsort((slots, -key, ~pinned))[:top_k])
        out[b, h, : len(chosen)] = chosen
    return out
