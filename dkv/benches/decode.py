"""Time of one decode step of attention over a compressed cache, beside dense attention in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dkv
from dkv.config import DKVConfig
from dkv.types import CompressedBlocks

# Qwen2.5-1.5B
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 128
DISTINCT_BLOCKS = 16


def run(
    contexts: Sequence[int],
    dtype: torch.dtype = torch.float32,
    config: DKVConfig | None = None,
    repeats: int = 15,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """One row per context: DKV, the best dense form (one bmm per kv head) and SDPA, interleaved, medians.

    The compressed blocks are real ones of random K and V, repeated to fill the context: the time of a step depends on
    shapes and on which blocks are selected, not on what they hold. The window holds ``config.window`` tokens.

    Returns
    -------
    list of dict
        Keys ``op``, ``context``, ``dtype``, ``ms``, ``dense_ms``, ``sdpa_ms``, ``ratio`` (``dense_ms / ms``),
        ``top_k``, ``threads``.
    """
    config = config or DKVConfig()
    rows = []
    for context in contexts:
        progress(f"{context:,} tokens")
        num_blocks = max(1, (context - config.window) // config.block_size)
        window = context - num_blocks * config.block_size
        if window < 1:
            raise ValueError(f"context must be more than {config.block_size} tokens, got {context}")
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, tokens: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(1, heads, tokens, HEAD_DIM, generator=generator).to(device=device, dtype=dtype)

        q = draw(NUM_Q_HEADS, 1)
        k, v = draw(NUM_KV_HEADS, context), draw(NUM_KV_HEADS, context)
        blocks = _tiled_blocks(k, v, num_blocks, config)
        k_window, v_window = k[:, :, -window:].contiguous(), v[:, :, -window:].contiguous()

        def dkv_step(args: tuple = (q, blocks, k_window, v_window)) -> Any:
            return dkv.decode_attention(*args, config=config)

        def dense_step(args: tuple = (q, k, v)) -> torch.Tensor:
            return dense_attention(*args)

        def sdpa_step(args: tuple = (q, k, v)) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*args, enable_gqa=True)

        with torch.inference_mode():
            ms, dense_ms, sdpa_ms = _interleaved_medians((dkv_step, dense_step, sdpa_step), repeats, device)
        rows.append(
            {
                "op": "decode_attention",
                "context": context,
                "dtype": str(dtype).removeprefix("torch."),
                "ms": round(ms, 3),
                "dense_ms": round(dense_ms, 3),
                "sdpa_ms": round(sdpa_ms, 3),
                "ratio": round(dense_ms / ms, 2),
                "top_k": config.top_k,
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Decode attention as one bmm per kv head, the fastest dense form on a CPU. All of ``[B, H, S, D]``."""
    batch, num_q_heads, queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(batch * num_kv_heads, -1, head_dim)  # [B*Hkv, G*Sq, D]
    keys, values = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
    weights = torch.softmax(torch.bmm(grouped, keys.transpose(1, 2)) * head_dim**-0.5, dim=-1)
    return torch.bmm(weights, values).reshape(batch, num_q_heads, queries, -1)


def _tiled_blocks(k: torch.Tensor, v: torch.Tensor, num_blocks: int, config: DKVConfig) -> CompressedBlocks:
    made = min(num_blocks, DISTINCT_BLOCKS)
    rows = made * config.block_size
    blocks = dkv.compress_blocks(k[:, :, :rows].contiguous(), v[:, :, :rows].contiguous(), config=config)
    index = torch.arange(num_blocks, device=k.device) % made
    return blocks.map(lambda part: part[:, index].contiguous())


def _interleaved_medians(steps: Sequence[Callable[[], Any]], repeats: int, device: str) -> list[float]:
    """Median milliseconds of each step; taking turns spreads the machine's noise over all of them."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 2):  # the first two warm up
        for index, step in enumerate(steps):
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            if turn >= 2:
                times[index].append((time.perf_counter() - start) * 1e3)
    return [statistics.median(each) for each in times]


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
