"""Shares of blocks from their scores, and the best of them: pinned ones first, ties to the lowest index."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._dots import device, max_of, sum_of
from ._launch import launch, power_of_two
from ._rows import NONE

REGISTERS = 16384  # scores that one program holds
RANKED = tl.constexpr(128)  # blocks that are ranked pair by pair
LONGEST = 8  # steps that one program takes before its work is spread over more


class SelectConfig(NamedTuple):
    """Tiles of a selection among ``[maxed, meaned]`` rows of scores."""

    block: int
    queries: int
    radix_bits: int
    fused: bool
    num_warps: int


def config(total: int, maxed: int, meaned: int) -> SelectConfig:
    """One program softmaxes and selects where all blocks of a query's heads fit in its registers."""
    block, heads = power_of_two(total, 16), power_of_two(maxed)
    queries = max(1, min(power_of_two(max(meaned, 1)), REGISTERS // (block * heads)))
    fused = block * heads <= REGISTERS and -(-meaned // queries) <= LONGEST
    block = block if fused else min(block, 2048)
    warps = min(8, max(1, block * heads * (queries if fused else 1) // 1024))
    return SelectConfig(block, queries, 4 if block <= 1024 else 2, fused, warps)


@device
def _bounds(problem, counts, tails, total, per, top_k, sink, recent, GROW: tl.constexpr):
    """Valid blocks, the pinned first and last ones, and how many are chosen."""
    count = total if counts is None else tl.load(counts + problem // per).to(tl.int32)
    count = tl.minimum(tl.maximum(count, 0), total)
    head = tl.minimum(sink, count)
    tail = tl.maximum(count - recent, head) if tails is None else tl.maximum(tl.load(tails + problem), head)
    wanted = tl.maximum(top_k, head + count - tail) if GROW else top_k
    return count, head, tail, tl.minimum(wanted, count)


@device
def _shares(scores, peak):
    """Weights of scores before they are divided by their sum; each +inf weighs 1."""
    safe = tl.where(peak == NONE, 0.0, peak)
    return tl.where(scores == safe, 1.0, tl.exp(scores - safe))


@device
def _keys(score, slots, count, head, tail):
    """What orders blocks, uint32: 0 where none is, above it NaN and -inf, on top the pinned ones."""
    score = tl.where(score != score, NONE, tl.where(score == 0.0, 0.0, score))
    bits = score.to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) > 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    order = tl.where((slots < head) | (slots >= tail), 0xFFFFFFFF, order)
    return tl.where(slots < count, order, 0).to(tl.uint32)


@triton.jit
def _softmax_select_kernel(
    scores,  # [P, maxed, meaned, N]
    counts,
    tails,
    rows,
    out,  # [P, repeat, width]
    total,
    maxed,
    meaned,
    per,
    repeat,
    top_k,
    sink,
    recent,
    width,
    GROW: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    RADIX_BITS: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK)
    count, head, tail, wanted = _bounds(problem, counts, tails, total, per, top_k, sink, recent, GROW)
    number = meaned if rows is None else tl.load(rows + problem)
    lane = tl.arange(0, HEADS * QUERIES)
    share = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, number, QUERIES):
        query = start + lane % QUERIES
        here = (query < number) & (lane // QUERIES < maxed)
        row = (problem * maxed + lane // QUERIES) * meaned + query
        score = tl.load(
            scores + row[:, None] * total + slots[None, :],
            mask=here[:, None] & (slots < count)[None, :],
            other=NONE,
        )
        score = tl.where(score != score, NONE, score)
        weight = _shares(score, max_of(score, axis=1)[:, None])
        mass = sum_of(weight, axis=1)
        weight = weight / tl.where(mass > 0, mass, 1.0)[:, None]
        share += sum_of(max_of(tl.reshape(weight, [HEADS, QUERIES, BLOCK]), axis=0), axis=0)
    share = share / tl.maximum(number, 1).to(tl.float32)
    keys = _keys(share, slots, count, head, tail)
    if BLOCK <= RANKED:
        better = keys[:, None] > keys[None, :]
        better |= (keys[:, None] == keys[None, :]) & (slots[:, None] < slots[None, :])
        chosen = ((sum_of(better.to(tl.int32), axis=0) < wanted) & (slots < count)).to(tl.int32)
    else:
        threshold = tl.full([1], 0, tl.uint32)
        digits = tl.arange(0, 1 << RADIX_BITS).to(tl.uint32)
        for step in range(32 // RADIX_BITS):
            least = threshold | (digits << (32 - RADIX_BITS * (step + 1)))
            reached = sum_of((keys[None, :] >= least[:, None]).to(tl.int32), axis=1)
            # the largest number that as many keys reach as are wanted
            threshold = max_of(tl.where(reached >= wanted, least, 0), axis=0, keep_dims=True)
        above, equal = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
        tie = tl.cumsum(equal, axis=0) - equal
        chosen = above | (equal & (tie < wanted - sum_of(above, axis=0)).to(tl.int32))
    rank = tl.cumsum(chosen, axis=0) - chosen
    for copy in range(repeat):
        row = out + (problem * repeat + copy) * width
        tl.store(row + rank, slots, mask=chosen > 0)
        for start in range(0, width, BLOCK):
            place = start + slots
            tl.store(row + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= wanted) & (place < width))


@triton.jit
def _row_sums_kernel(scores, counts, peaks, masses, total, rows, per, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Peak and sum of weights of each row of ``scores [P, rows, N]``."""
    tiles = (rows + ROWS - 1) // ROWS
    problem = (tl.program_id(0) // tiles).to(tl.int64)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    count = total if counts is None else tl.minimum(tl.load(counts + problem // per).to(tl.int32), total)
    base = scores + (problem * rows + row)[:, None] * total
    peak = tl.full([ROWS], NONE, tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    for start in range(0, count, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        here = (row < rows)[:, None] & (slots < count)[None, :]
        score = tl.load(base + slots[None, :], mask=here, other=NONE)
        score = tl.where(score != score, NONE, score)
        higher = tl.maximum(peak, max_of(score, axis=1))
        # nothing so far: a peak of -inf weighs nothing
        kept = tl.where(mass > 0, mass * _shares(peak, higher), 0.0)
        mass = kept + sum_of(_shares(score, higher[:, None]), axis=1)
        peak = higher
    tl.store(peaks + problem * rows + row, peak, mask=row < rows)
    tl.store(masses + problem * rows + row, mass, mask=row < rows)


@triton.jit
def _mean_share_kernel(
    scores,
    peaks,
    masses,
    rows,
    shares,
    total,
    maxed,
    meaned,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest share of the ``maxed`` heads, the mean over queries: ``shares [P, N]``."""
    tiles = (total + BLOCK - 1) // BLOCK
    problem = (tl.program_id(0) // tiles).to(tl.int64)
    slots = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = meaned if rows is None else tl.load(rows + problem)
    lane = tl.arange(0, HEADS * QUERIES)
    share = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, number, QUERIES):
        query = start + lane % QUERIES
        here = (query < number) & (lane // QUERIES < maxed)
        row = (problem * maxed + lane // QUERIES) * meaned + query
        score = tl.load(
            scores + row[:, None] * total + slots[None, :], mask=here[:, None] & (slots < total)[None, :], other=NONE
        )
        score = tl.where(score != score, NONE, score)
        weight = _shares(score, tl.load(peaks + row, mask=here, other=NONE)[:, None])
        mass = tl.load(masses + row, mask=here, other=0.0)
        weight = weight / tl.where(mass > 0, mass, 1.0)[:, None]
        share += sum_of(max_of(tl.reshape(weight, [HEADS, QUERIES, BLOCK]), 0), 0)
    share = share / tl.maximum(number, 1).to(tl.float32)
    tl.store(shares + problem * total + slots, share, mask=slots < total)


@triton.jit
def _select_kernel(
    shares,  # [P, N]
    counts,
    tails,
    out,  # [P, repeat, width]
    total,
    per,
    repeat,
    top_k,
    sink,
    recent,
    width,
    GROW: tl.constexpr,
    BLOCK: tl.constexpr,
    RADIX_BITS: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK)
    count, head, tail, wanted = _bounds(problem, counts, tails, total, per, top_k, sink, recent, GROW)
    base = shares + problem * total
    threshold = tl.full([1], 0, tl.uint32)
    digits = tl.arange(0, 1 << RADIX_BITS).to(tl.uint32)
    for step in range(32 // RADIX_BITS):
        least = threshold | (digits << (32 - RADIX_BITS * (step + 1)))
        reached = tl.full([1 << RADIX_BITS], 0, tl.int32)
        for start in range(0, count, BLOCK):
            score = tl.load(base + start + slots, mask=start + slots < count, other=0.0)
            keys = _keys(score, start + slots, count, head, tail)
            reached += sum_of((keys[None, :] >= least[:, None]).to(tl.int32), axis=1)
        # the largest number that as many keys reach as are wanted
        threshold = max_of(tl.where(reached >= wanted, least, 0), axis=0, keep_dims=True)
    above = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, count, BLOCK):
        score = tl.load(base + start + slots, mask=start + slots < count, other=0.0)
        above += (_keys(score, start + slots, count, head, tail) > threshold).to(tl.int32)
    spare = wanted - sum_of(above, axis=0)
    for copy in range(repeat):
        row = out + (problem * repeat + copy) * width
        placed, ties = 0, 0
        for start in range(0, count, BLOCK):
            score = tl.load(base + start + slots, mask=start + slots < count, other=0.0)
            keys = _keys(score, start + slots, count, head, tail)
            equal = (keys == threshold).to(tl.int32)
            tie = ties + tl.cumsum(equal, axis=0) - equal
            chosen = (keys > threshold).to(tl.int32) | (equal & (tie < spare).to(tl.int32))
            rank = placed + tl.cumsum(chosen, axis=0) - chosen
            tl.store(row + rank, start + slots, mask=chosen > 0)
            placed += sum_of(chosen, axis=0)
            ties += sum_of(equal, axis=0)
        for start in range(0, width, BLOCK):
            place = start + slots
            tl.store(row + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= wanted) & (place < width))


class Pins(NamedTuple):
    """What is chosen: ``top_k`` blocks, the first ``sink`` and the last ``recent`` valid ones among them.

    ``tails [P]`` gives the first of the last ones instead of ``recent``; ``grow`` lets pinned blocks exceed ``top_k``.
    """

    top_k: int
    sink: int
    recent: int = 0
    tails: Tensor | None = None
    grow: bool = False


def select_shares(shares: Tensor, counts: Tensor | None, per: int, repeat: int, pins: Pins, width: int) -> Tensor:
    """The best of ``shares [P, N]``, ``[P, repeat, width]`` int32; problem ``p`` has ``counts[p // per]`` blocks."""
    problems, total = shares.shape
    out = torch.empty(problems, repeat, width, dtype=torch.int32, device=shares.device)
    tiles = config(total, 1, 1)
    block = min(tiles.block, 2048)
    launch(
        _select_kernel,
        (problems if width else 0,),
        shares,
        counts,
        pins.tails,
        out,
        total,
        per,
        repeat,
        pins.top_k,
        pins.sink,
        pins.recent,
        width,
        GROW=pins.grow,
        BLOCK=block,
        RADIX_BITS=4 if block <= 1024 else 2,
        num_warps=min(8, max(1, block // 256)),
        num_stages=1,
    )
    return out


def select_scores(
    scores: Tensor, counts: Tensor | None, per: int, repeat: int, pins: Pins, width: int, rows: Tensor | None = None
) -> Tensor:
    """The blocks that hold most of the softmax of ``scores [P, maxed, meaned, N]``, ``[P, repeat, width]`` int32.

    The largest share of the ``maxed`` rows counts, its mean over the ``meaned``; ``rows [P]`` says how many of these
    there are.
    """
    problems, maxed, meaned, total = scores.shape
    tiles = config(total, maxed, meaned)
    if not tiles.fused:
        shares = _mean_shares(scores, counts, per, rows, tiles)
        return select_shares(shares, counts, per, repeat, pins, width)
    out = torch.empty(problems, repeat, width, dtype=torch.int32, device=scores.device)
    launch(
        _softmax_select_kernel,
        (problems if width else 0,),
        scores,
        counts,
        pins.tails,
        rows,
        out,
        total,
        maxed,
        meaned,
        per,
        repeat,
        pins.top_k,
        pins.sink,
        pins.recent,
        width,
        GROW=pins.grow,
        HEADS=power_of_two(maxed),
        QUERIES=tiles.queries,
        BLOCK=tiles.block,
        RADIX_BITS=tiles.radix_bits,
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    return out


def _mean_shares(scores: Tensor, counts: Tensor | None, per: int, rows: Tensor | None, tiles: SelectConfig) -> Tensor:
    problems, maxed, meaned, total = scores.shape
    peaks = torch.empty(problems, maxed * meaned, dtype=torch.float32, device=scores.device)
    masses, shares = torch.empty_like(peaks), peaks.new_empty(problems, total)
    launch(
        _row_sums_kernel,
        (problems * triton.cdiv(maxed * meaned, 4),),
        scores,
        counts,
        peaks,
        masses,
        total,
        maxed * meaned,
        per,
        ROWS=4,
        BLOCK=min(tiles.block, 1024),
        num_warps=4,
        num_stages=2,
    )
    block, heads = min(tiles.block, 64), power_of_two(maxed)
    launch(
        _mean_share_kernel,
        (problems * triton.cdiv(total, block),),
        scores,
        peaks,
        masses,
        rows,
        shares,
        total,
        maxed,
        meaned,
        HEADS=heads,
        QUERIES=min(power_of_two(meaned), max(1, REGISTERS // 2 // (block * heads))),
        BLOCK=block,
        num_warps=4,
        num_stages=1,
    )
    return shares


def select_blocks(score: Tensor, counts: Tensor | None, top_k: int, sink_blocks: int, recent_blocks: int) -> Tensor:
    """Sink and recent blocks, then the highest of ``score [B, H, N]``: ``[B, H, min(top_k, N)]`` int32, then -1."""
    batch, heads, total = score.shape
    width = min(top_k, total)
    shares = score.float().reshape(batch * heads, total)
    chosen = select_shares(shares, counts, heads, 1, Pins(top_k, sink_blocks, recent_blocks), width)
    return chosen.view(batch, heads, width)
