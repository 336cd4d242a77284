"""One sequence's blocks dealt out to several processes, each attending its own: the state is that of one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Every rank compresses the blocks that it holds and gives the same query; what is exchanged does not grow with the
context. Here over gloo on one machine's CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import dkv
from dkv import distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="of 256 tokens, in all")
    parser.add_argument("--top-k", type=int, default=4, help="blocks that the query attends, in all")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = dkv.DKVConfig(top_k=options.top_k)
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same numbers; a real one has its own rows alone
    k, v = torch.randn(2, 1, 2, options.blocks * config.block_size, 64, generator=generator)  # [B, Hkv, N, D] each
    k_window, v_window = torch.randn(2, 1, 2, 300, 64, generator=generator)
    q = torch.randn(1, 6, 1, 64, generator=generator)  # [B, Hq, Sq, D]

    positions = torch.arange(rank, options.blocks, ranks)  # block n lies on rank n % ranks
    own = [x.unflatten(2, (options.blocks, -1))[:, :, positions].flatten(2, 3) for x in (k, v)]
    blocks = dkv.compress_blocks(*own, config=config)
    window = (k_window, v_window) if rank == 0 else (None, None)
    state = distributed.decode_attention(q, blocks, *window, config=config, positions=positions, window_rank=0)

    everything = dkv.compress_blocks(k, v, config=config)
    alone = dkv.decode_attention(q, everything, k_window, v_window, config=config)
    apart = max(float((a - b).abs().max()) for a, b in zip(state, alone))
    held = f"{blocks.num_blocks} of {options.blocks} blocks, {blocks.nbytes:,} of {everything.nbytes:,} bytes"
    print(f"rank {rank}: {held}; largest difference from one process {apart:.1e}", flush=True)
    dist.destroy_process_group()
    if apart > 1e-5:
        raise SystemExit(f"rank {rank}: the states differ")


if __name__ == "__main__":
    main()
