"""One rank of test_distributed.py: ``distributed_worker.py FOLDER RANK RANKS JOBS`` leaves ``RANK.pt`` in FOLDER."""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import dkv
from dkv import CompressedBlocks, DKVConfig, distributed

TIMEOUT = datetime.timedelta(seconds=6)


def cases(ranks: int) -> list[dict[str, Any]]:
    """Shards (blocks of each rank) and settings; every axis has a size of its own."""
    drawn = random.Random(ranks)
    some = [0] + [drawn.randrange(1, 4) for _ in range(ranks - 1)]
    plain = {"config": {}, "seed": 1, "batch": 2, "group": 2, "heads": 3, "queries": 1, "dims": (24, 20), "window": 37}
    made = [
        {"shards": some},
        {"shards": [3] + [0] * (ranks - 1), "group": 1, "queries": 4},
        {"shards": [0] * ranks, "sink": True},
        {"shards": [0] * ranks, "window": 0},
        {"shards": [2] * ranks, "window": 0, "sink": True, "softcap": 7.0, "window_rank": ranks - 1},
        {"shards": some[::-1], "config": {"share": "all", "router": "minmax"}, "counts": [1, 2], "queries": 3},
        {"shards": [3] * ranks, "counts": [sum([3] * ranks), 4], "config": {"router": "residual", "num_residuals": 7}},
        {"shards": [2, 3] + [1] * (ranks - 2), "taken": ranks, "config": {"sink_blocks": 2, "recent_blocks": 1}},
        {"shards": [2] * ranks, "neglected": ranks - 1, "config": {"top_k": 2}},
        {"shards": [3] * ranks, "taken": ranks, "window_rank": 1, "config": {"top_k": 50, "format": "fp32", "rank": 0}},
        {"shards": [2] * ranks, "dtype": "bfloat16", "config": {"router": "keys"}, "ragged": True},
    ]
    for seed in range(4):
        made.append(
            {
                "seed": 10 + seed,
                "shards": [drawn.randrange(4) for _ in range(ranks)],
                "dims": drawn.choice([(64, 64), (72, 40), (16, 33)]),
                "group": drawn.choice([1, 2, 3, 7]),
                "heads": drawn.choice([1, 2]),
                "window_rank": drawn.randrange(ranks),
                "config": {"router": drawn.choice(["lowrank", "keys", "residual"]), "top_k": drawn.randrange(3, 6)},
            }
        )
    return [plain | {"ranks": ranks} | each for each in made]


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """What a single process would be given."""
    generator = torch.Generator().manual_seed(case["seed"])
    config = DKVConfig(**{"block_size": 16, "rank": 3, "num_residuals": 15, "top_k": 4, **case["config"]})
    batch, heads, (dim, dim_v) = case["batch"], case["heads"], case["dims"]
    dtype = getattr(torch, case.get("dtype", "float32"))

    def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, dim, generator=generator).to(dtype)

    shards, size = case["shards"], config.block_size
    number = sum(shards)
    q = draw(heads * case["group"], case["queries"], dim)
    k, v = draw(heads, number * size, dim), draw(heads, number * size, dim_v)
    if "neglected" in case:  # its keys point away from every query
        place = sum(shards[: case["neglected"]]) * size
        k[:, :, place : place + shards[case["neglected"]] * size] = 0
        k[:, :, :place] += 4 * q[:, :: case["group"], :1]
        q = q[:, :: case["group"]].repeat_interleave(case["group"], 1) + 0.01 * q
    blocks = dkv.compress_blocks(k, v, config=config)
    if "counts" in case:
        blocks = with_counts(blocks, torch.tensor(case["counts"], dtype=torch.int32))
    window = case["window"]
    given = {"k_window": draw(heads, window, dim), "v_window": draw(heads, window, dim_v)} if window else {}
    if case.get("ragged"):
        given["seq_lens"] = torch.tensor([window, window - 9])
    if case.get("sink"):
        given["sink"] = torch.randn(q.shape[1], generator=generator)
    if "softcap" in case:
        given["softcap"] = case["softcap"]
    return {"q": q, "blocks": blocks, "config": config, **given}


def with_counts(blocks: CompressedBlocks, counts: torch.Tensor) -> CompressedBlocks:
    parts = dict(blocks.parts()) | {"block_counts": counts}
    return CompressedBlocks(format=blocks.format, **parts)


def owned(case: dict[str, Any], rank: int) -> list[int]:
    """The blocks of the sequence that a rank holds: consecutive ones, or every n-th where they are dealt out."""
    if "taken" in case:
        dealt = [index for turn in range(max(case["shards"])) for index, own in enumerate(case["shards"]) if own > turn]
        return [place for place, owner in enumerate(dealt) if owner == rank]
    start = sum(case["shards"][:rank])
    return list(range(start, start + case["shards"][rank]))


def shard(case: dict[str, Any], blocks: CompressedBlocks, rank: int) -> tuple[CompressedBlocks, torch.Tensor | None]:
    places = owned(case, rank)
    own = blocks.map(lambda part: part if part.ndim == 1 else part[:, places])
    if blocks.block_counts is not None:
        start = places[0] if places else 0
        own = with_counts(own, (blocks.block_counts - start).clamp(0, len(places)))
    return own, torch.tensor(places, dtype=torch.int64) if "taken" in case else None


def answers(rank: int, ranks: int) -> list[dict[str, Any]]:
    pair = dist.new_group([0, 1], timeout=TIMEOUT)
    found = []
    for case in cases(2) + cases(4):
        if rank >= case["ranks"]:
            continue
        group = pair if case["ranks"] == 2 else None
        given = inputs(case)
        blocks, positions = shard(case, given.pop("blocks"), rank)
        config, window_rank = given.pop("config"), case.get("window_rank", 0)
        if rank != window_rank and case["seed"] % 2:  # others may give nothing, or a copy
            given = {name: value for name, value in given.items() if name in ("q", "softcap")}
        routing = {name: getattr(config, name) for name in ("top_k", "router", "share", "sink_blocks", "recent_blocks")}
        chosen = distributed.route_blocks(given["q"], blocks, **routing, positions=positions, group=group)
        settings = {"config": config, "window_rank": window_rank, "group": group}
        state = distributed.decode_attention(**given, blocks=blocks, positions=positions, **settings)
        again = distributed.decode_attention(**given, blocks=blocks, block_indices=chosen, **settings)
        assert torch.equal(state.out, again.out) and torch.equal(state.lse, again.lse)
        found.append({"ranks": case["ranks"], "chosen": chosen, "out": state.out, "lse": state.lse})
    return found


def heads(rank: int, ranks: int) -> dict[str, Any]:
    """Tensor parallel: two kv heads of eight on each rank, nothing exchanged but the outputs."""
    given = inputs(cases(4)[0] | {"heads": 8, "shards": [5]})
    blocks = given["blocks"]
    own = slice(2 * rank, 2 * rank + 2)
    q = given["q"][:, 4 * rank : 4 * rank + 4]
    window = [given[name][:, own] for name in ("k_window", "v_window")]
    part = dkv.decode_attention(q, distributed.head_shard(blocks, own.start, own.stop), *window, config=given["config"])
    return {"out": torch.cat(distributed._all_gather(part.out, None), dim=1)}


def refusals(rank: int, ranks: int) -> list[str]:
    """The errors of calls whose ranks do not agree."""
    case = cases(4)[4]
    given = inputs(case)
    blocks, _ = shard(case, given["blocks"], rank)
    q, config = given["q"], given["config"]
    mine = rank == 2
    calls = [
        {"q": q[:1] if mine else q, "blocks": blocks.map(lambda part: part[:1]) if mine else blocks},
        {"config": DKVConfig(**{**config.to_dict(), "tiers": (), "top_k": 3}) if mine else config},
        {"softcap": 3.0 if mine else None},
        {"window_rank": 1 if mine else 0},
        {"positions": torch.arange(2)},
        {"positions": torch.arange(2) if mine else None},
        {"block_indices": torch.zeros(2, 3, 1, dtype=torch.int32) if mine else None},
    ]
    errors = []
    for call in calls:
        try:
            distributed.decode_attention(**{"q": q, "blocks": blocks, "config": config, **call})
        except ValueError as error:
            errors.append(str(error))
    return errors


def death(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 leaves in the middle of a step; the others must hear of it."""
    case = cases(ranks)[4]
    given = inputs(case)
    blocks, _ = shard(case, given["blocks"], rank)
    distributed.decode_attention(given["q"], blocks, config=given["config"])
    gathers, gather = [], distributed._all_gather

    def dying(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        gathers.append(x)
        if rank == 1 and len(gathers) == 4:
            os._exit(3)
        return gather(x, group)

    distributed._all_gather = dying
    start = time.monotonic()
    try:
        state = distributed.decode_attention(given["q"], blocks, config=given["config"])
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"out": state.out}


def main() -> None:
    folder, rank, ranks, job = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    with torch.inference_mode():
        found = {name: globals()[name](rank, ranks) for name in job.split(",")}
    torch.save(found, f"{folder}/{rank}.pt")
    if "death" not in found:
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
