"""Bytes that ranks exchange in a decode step over one context: ``python -m bench.context_parallel --json FILE``.

Qwen2.5-1.5B geometry, gloo processes on this machine, one layer. Bytes are of the arrays that a rank sends to every
other one; transports add their own headers. Times are of processes that share this machine's cores, and say little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dkv import DKVConfig, distributed
from dkv.benches.decode import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, _tiled_blocks
from dkv.benches.results import write_json

STEPS = 5


def rank_rows(rank: int, ranks: int, contexts: list[int], store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    config = DKVConfig()
    sent, gather = [0], distributed._all_gather

    def counted(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        sent[0] += x.nbytes
        return gather(x, group)

    distributed._all_gather = counted
    for context in contexts:
        number = (context - config.window) // config.block_size // ranks
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)
            for heads, tokens in ((NUM_Q_HEADS, 1), (NUM_KV_HEADS, 4096), (NUM_KV_HEADS, 4096))
        )
        blocks = _tiled_blocks(k, v, number, config)
        window = [x[:, :, : config.window] for x in (k, v)]
        for what in ("routing", "not routing"):
            chosen = None if what == "routing" else distributed.route_blocks(q, blocks)
            times = []
            for _ in range(STEPS):
                sent[0] = 0
                start = time.perf_counter()
                distributed.decode_attention(q, blocks, *window, config=config, block_indices=chosen)
                times.append((time.perf_counter() - start) * 1e3)
            if rank == 0:
                results.append(
                    {
                        "op": "distributed_decode_attention",
                        "context": context,
                        "dtype": "float32",
                        "ranks": ranks,
                        "step": what,
                        "blocks_per_rank": number,
                        "bytes_sent_to_each_rank": sent[0],
                        "dense_kv_bytes_of_a_rank": 2 * context // ranks * NUM_KV_HEADS * HEAD_DIM * 4,
                        "ms": round(statistics.median(times), 3),
                    }
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="4096,32768,131072")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contexts = [int(each) for each in options.contexts.split(",")]
    rows: list[dict[str, Any]] = []
    for ranks in (int(each) for each in options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.list()
            mp.spawn(rank_rows, (ranks, contexts, f"{folder}/store", results), nprocs=ranks)
            rows += list(results)
    for row in rows:
        print(row)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
