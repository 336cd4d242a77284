"""Bytes and operations of a launch, from its grid and arguments: what its programs read, write and multiply.

A program that reads an address more than once reads it once (the rest are hits of its own L1); two programs that read
the same address read it twice. ``unique`` counts an address once for the whole launch, which is what a perfect L2 would
leave. Every slot of ``block_indices`` is taken to name a block of its own, every block to be valid and the window to be
full. Multiplications count as issued: on padded tiles, and twice where a float32 operand goes in as two 16-bit numbers.
Only matrix products count; decoding, softmax and address arithmetic do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.launches import Launch
from dkv.types import RESIDUAL_GROUP

INDEX = 4  # bytes of an index, a count and a unit


@dataclasses.dataclass
class Traffic:
    """Bytes of one launch by what they are of, and matrix operations by the dtype that is multiplied.

    Attributes
    ----------
    reads, unique : dict of str to int
        Bytes by name: all programs', and of distinct addresses.
    writes : int
    flops : dict of str to int
    """

    reads: dict[str, int] = dataclasses.field(default_factory=dict)
    unique: dict[str, int] = dataclasses.field(default_factory=dict)
    writes: int = 0
    flops: dict[str, int] = dataclasses.field(default_factory=dict)

    def read(self, name: str, each: int, times: int, distinct: int | None = None) -> None:
        """``each`` bytes read ``times`` times, of which ``distinct`` (all where None) are of other addresses."""
        if each * times:
            self.reads[name] = self.reads.get(name, 0) + each * times
            self.unique[name] = self.unique.get(name, 0) + each * (times if distinct is None else distinct)

    def dot(self, kind: Any, m: int, n: int, k: int, times: int) -> None:
        """``times`` products ``[m, k] @ [k, n]``; ``kind`` is what the matrix unit multiplies."""
        name = str(kind)
        split = 1 if name == "fp32" else 2
        self.flops[name] = self.flops.get(name, 0) + 2 * m * n * k * times * split

    @property
    def all_reads(self) -> int:
        return sum(self.reads.values())

    @property
    def unique_reads(self) -> int:
        return sum(self.unique.values())


def ceil(x: int, y: int) -> int:
    return -(-x // y)


def size(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.element_size()


def attend(launch: Launch) -> Traffic:
    """``attend`` of decode: slots of blocks, or a stretch of the window, for a tile of queries."""
    a, made = launch.bound(), Traffic()
    dim, dim_v, rows = a["DIM"], a["DIM_V"], a["GROUP_SIZE"] * a["length"]
    heads, tiles, splits = launch.grid  # heads of all sequences, tiles of queries, splits
    q = size(a["q"]) * dim * rows
    made.read("q", q, heads * splits, heads)
    made.writes = heads * rows * splits * (dim_v * size(a["out"]) + size(a["lse"]))
    if a["slot_splits"]:
        _attend_blocks(a, made, heads, tiles)
    keys = a["keys"]
    if keys:
        window_splits = splits - a["slot_splits"]
        row = dim * size(a["k_window"]) + dim_v * size(a["v_window"])
        made.read("window", row * keys, heads * tiles, heads)
        made.read("window", size(a["seq_lens"]), heads * tiles * window_splits, heads // a["HEADS"])
        whole, rest = divmod(keys, a["window_rows"])
        steps = whole * ceil(a["window_rows"], a["TILE"]) + ceil(rest, a["TILE"])
        for n in (a["WIDTH"], a["WIDTH_V"]):
            made.dot(a["WINDOW_DOT"], a["BLOCK_M"], n, a["TILE"], steps * heads * tiles)
    if a["sink"] is not None:
        made.read("sink", size(a["sink"]) * a["GROUP_SIZE"], heads * tiles * (splits - a["slot_splits"]), a["HEADS"])
    return made


def _attend_blocks(a: dict[str, Any], made: Traffic, heads: int, tiles: int) -> None:
    dim, dim_v, rank, kept, rows = a["DIM"], a["DIM_V"], a["RANK"], a["KEPT"], a["BLOCK_SIZE"]
    m, tile, width = a["BLOCK_M"], a["TILE"], a["width"]
    times, distinct = heads * tiles * width, heads * width
    whole = min(distinct, heads // a["HEADS"] * a["num_blocks"])  # parts that the kv heads of a block share
    made.read("indices", width * size(a["block_indices"]), heads * tiles * a["slot_splits"], heads)
    made.read("indices", size(a["block_counts"]), heads * tiles * a["slot_splits"], heads // a["HEADS"])
    if a["LOWRANK"] or a["CODED"]:
        made.read("anchors", dim * size(a["anchor_k"]), times, distinct)
    if a["LOWRANK"]:
        made.read("anchors", dim_v * size(a["anchor_v"]), times, distinct)
    if a["LOWRANK"] and not a["EVERY"]:
        _factor_reads(a, made, times, distinct, whole, rows - kept)
        made.read("factors", rank * dim_v * size(a["basis_v"]), times, distinct)
        made.read("factors", rank * size(a["basis_v_scale"]) + (size(a["v_gain"]) if rank else 0), times, whole)
        made.read("factors", 0 if rank else size(a["u_unit"]), times, whole)
        if rank:
            steps = times * ceil(rows, tile)
            made.dot(a["FACTORS_DOT"], m, a["RANKS"], a["WIDTH"], times)
            made.dot(a["FACTORS_DOT"], m, tile, a["RANKS"], 2 * steps)
            made.dot(a["FACTORS_DOT"], m, a["WIDTH_V"], a["RANKS"], times)
    if not a["RESIDUAL"]:
        return
    steps = times * ceil(kept, tile)
    if a["CODED"]:
        _code_reads(a, made, "k", dim, a["WIDTH"], times, distinct, heads * tiles)
        _code_reads(a, made, "v", dim_v, a["WIDTH_V"], times, distinct, heads * tiles)
    else:
        made.read("rows", kept * dim * size(a["residual_k"]), times, distinct)
        made.read("rows", kept * dim_v * size(a["residual_v"]), times, distinct)
    for planes, n in ((a["K_PLANES"], a["WIDTH"]), (a["V_PLANES"], a["WIDTH_V"])):
        if planes or not a["CODED"]:
            made.dot(a["ROWS_DOT"], m, n, tile, steps)


def _factor_reads(a: dict[str, Any], made: Traffic, times: int, distinct: int, whole: int, live: int) -> None:
    """What a program needs for the logits of ``live`` low-rank rows: ``u``, the basis and their scales."""
    rank = a["RANK"]
    made.read("positions", a["KEPT"] * size(a["positions"]), times, whole)
    if not rank:
        return
    made.read("factors", rank * a["DIM"] * size(a["basis_k"]), times, distinct)
    made.read("factors", live * rank * size(a["u"]) + live * size(a["u_scale"]), times, whole)
    made.read("factors", size(a["u_unit"]) + rank * size(a["basis_k_scale"]), times, whole)


def _code_reads(
    a: dict[str, Any], made: Traffic, x: str, dim: int, width: int, times: int, distinct: int, programs: int
) -> None:
    """Codes of keys or values, their scales and, where their widths differ, the table that says where they lie."""
    planes, bits, kept = a[f"{x.upper()}_PLANES"], a[f"{x.upper()}_BITS"], a["KEPT"]
    per_group = dim * (size(a[f"{x}_min"]) + (size(a[f"{x}_scale"]) if planes or x == "k" else 0))
    made.read("rows", kept * a[f"{x.upper()}_BYTES"], times, distinct)
    made.read("scales", ceil(kept, RESIDUAL_GROUP) * per_group + size(a[f"{x}_unit"]), times, distinct)
    if x == "k":
        made.read("scales", dim * size(a["k_order"]), times, distinct)
    if bits < 0 and planes:
        made.read("tables", planes * width * size(a.get(f"{x}_table")), programs, 1)


def merge(launch: Launch) -> Traffic:
    """``_merge``: as many states as there are, none of them empty."""
    a, made = launch.bound(), Traffic()
    numbers = a["count"] * a["rows"]
    made.read("states", size(a["lses"]) + a["DIM"] * size(a["outs"]), numbers)
    made.writes = a["rows"] * (a["DIM"] * size(a["out"]) + size(a["lse"]))
    return made


def score(launch: Launch) -> Traffic:
    """``_score_kernel`` of the router: a block, or some kv heads of one, for a tile of queries."""
    a, made = launch.bound(), Traffic()
    dim, kept, rows, tile = a["DIM"], a["KEPT"], a["GROUP_SIZE"] * a["length"], a["TILE"]
    programs, tiles = launch.grid
    splits = ceil(a["HEADS"], a["HEADS_TILE"])
    places = programs // splits  # blocks of all sequences
    batch, times = places // a["blocks"], places * a["HEADS"] * tiles
    made.read("q", rows * dim * size(a["q"]), places * a["HEADS"], batch * a["HEADS"])
    made.read("indices", size(a["counts"]), programs * tiles, batch)
    made.read("anchors", dim * size(a["anchor_k"]), times, places * a["HEADS"])
    made.writes = places * a["HEADS"] * rows * size(a["scores"])
    if a["LOWRANK"]:
        rank, live = a["RANK"], a["BLOCK_SIZE"] - (kept if a["STORED"] else 0)
        made.read("positions", kept * size(a["positions"]) if a["STORED"] else 0, programs * tiles, places)
        if rank:
            made.read("factors", rank * dim * size(a["basis_k"]), times, places * a["HEADS"])
            shared = live * (rank * size(a["u"]) + size(a["u_scale"])) + size(a["u_unit"])
            made.read("factors", shared + rank * size(a["basis_k_scale"]), programs * tiles, places)
            made.dot(a["FACTORS_DOT"], a["ROWS"], a["RANKS"], a["WIDTH"], times)
            made.dot(a["FACTORS_DOT"], a["ROWS"], tile, a["RANKS"], times * ceil(a["BLOCK_SIZE"], tile))
    if a["STORED"]:
        if a["CODED"]:
            _code_reads(a, made, "k", dim, a["WIDTH"], times, places * a["HEADS"], programs * tiles)
        else:
            made.read("rows", kept * dim * size(a["residual_k"]), times, places * a["HEADS"])
        if a["K_PLANES"] or not a["CODED"]:
            made.dot(a["ROWS_DOT"], a["ROWS"], tile, a["WIDTH"], times * ceil(kept, tile))
    return made


def minmax(launch: Launch) -> Traffic:
    """``_minmax_kernel`` of the router."""
    a, made = launch.bound(), Traffic()
    heads, tiles_n, tiles_m = launch.grid
    rows, dim = a["GROUP_SIZE"] * a["length"], a["DIM"]
    made.read("q", rows * dim * size(a["q"]), heads * tiles_n, heads)
    made.read("indices", size(a["counts"]), heads * tiles_n * tiles_m, heads // a["HEADS"])
    made.read("extremes", 2 * a["blocks"] * dim * size(a["k_min"]), heads * tiles_m, heads)
    made.writes = heads * rows * a["blocks"] * size(a["scores"])
    made.dot(a["DOT"], a["ROWS"], a["BLOCKS"], a["WIDTH"], 2 * heads * tiles_n * tiles_m)
    return made


def softmax_select(launch: Launch) -> Traffic:
    a, made = launch.bound(), Traffic()
    problems = launch.grid[0]
    made.read("scores", a["maxed"] * a["meaned"] * a["total"] * size(a["scores"]), problems)
    made.read("indices", size(a["counts"]), problems, problems // a["per"])
    made.read("indices", size(a["tails"]) + size(a["rows"]), problems)
    made.writes = problems * a["repeat"] * a["width"] * INDEX
    return made


def row_sums(launch: Launch) -> Traffic:
    a, made = launch.bound(), Traffic()
    tiles = ceil(a["rows"], a["ROWS"])
    problems = launch.grid[0] // tiles
    made.read("scores", a["rows"] * a["total"] * size(a["scores"]), problems)
    made.read("indices", size(a["counts"]), problems * tiles, problems // a["per"])
    made.writes = problems * a["rows"] * 2 * size(a["peaks"])
    return made


def mean_share(launch: Launch) -> Traffic:
    a, made = launch.bound(), Traffic()
    tiles = ceil(a["total"], a["BLOCK"])
    problems, rows = launch.grid[0] // tiles, a["maxed"] * a["meaned"]
    made.read("scores", rows * a["total"] * size(a["scores"]), problems)
    made.read("scores", 2 * rows * size(a["peaks"]), problems * tiles, problems)
    made.read("indices", size(a["rows"]), problems * tiles, problems)
    made.writes = problems * a["total"] * size(a["shares"])
    return made


def select(launch: Launch) -> Traffic:
    """``_select_kernel`` goes over its scores many times; they stay near the program that reads them."""
    a, made = launch.bound(), Traffic()
    problems = launch.grid[0]
    made.read("scores", a["total"] * size(a["shares"]), problems)
    made.read("indices", size(a["counts"]), problems, problems // a["per"])
    made.read("indices", size(a["tails"]), problems)
    made.writes = problems * a["repeat"] * a["width"] * INDEX
    return made


KERNELS: dict[str, Callable[[Launch], Traffic]] = {
    "attend": attend,
    "_merge": merge,
    "_score_kernel": score,
    "_minmax_kernel": minmax,
    "_softmax_select_kernel": softmax_select,
    "_row_sums_kernel": row_sums,
    "_mean_share_kernel": mean_share,
    "_select_kernel": select,
}


def traffic(launch: Launch) -> Traffic:
    """Bytes and operations of a launch."""
    if launch.name not in KERNELS:
        raise NotImplementedError(f"kernel {launch.name!r} has no count of its bytes in bench/traffic.py")
    return KERNELS[launch.name](launch)
