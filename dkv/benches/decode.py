"""Time of one decode step of attention over a compressed cache, beside dense attention in the same run."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dkv
from dkv.benches.timing import milliseconds
from dkv.cache.layer import LayerCache
from dkv.cache.routing import FIRST_STEPS
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
    """One row per context: DKV, the best dense form (one bmm per kv head) and SDPA, taking turns, medians.

    A DKV step is a whole step of the runtime's layer: the new row stored, blocks selected, from all of them every
    ``config.route_every`` steps, selected blocks, sink rows and window attended, and a share of what closing a block
    takes. Nothing that a step decodes serves the next one, so it makes no difference how often a selection changes.
    Dense attention finds its rows stored. Every DKV step follows a dense one, so that nothing of it is left in the
    processor's caches. Timing begins when the first steps, which each scan, are over.

    The compressed blocks are real ones of random K and V, repeated to fill the context: the time of a step depends on
    shapes and on which blocks are selected, not on what they hold.

    Returns
    -------
    list of dict
        Keys ``op``, ``context``, ``dtype``, ``ms`` (mean of a routing period, median of the periods), ``dense_ms``,
        ``sdpa_ms``, ``ratio`` (``dense_ms / ms``), ``route_ms`` (the step that scans), ``other_ms`` (one that does
        not), ``close_ms`` (closing one block, 1 in ``block_size`` of which is in ``ms``), ``top_k``, ``route_every``,
        ``threads``.
    """
    config = config or DKVConfig()
    least = config.sink_tokens + config.window + config.block_size
    if config.window < config.block_size or min(contexts) < least:
        raise ValueError(
            f"contexts must be {least:,} or more (sink, window and a block), the window a block or more, "
            f"got {list(contexts)} and {config.window}"
        )
    rows = []
    for context in contexts:
        progress(f"{context:,} tokens")
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, tokens: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(1, heads, tokens, HEAD_DIM, generator=generator).to(device=device, dtype=dtype)

        q, k_new, v_new = draw(NUM_Q_HEADS, 1), draw(NUM_KV_HEADS, 1), draw(NUM_KV_HEADS, 1)
        k, v = draw(NUM_KV_HEADS, context), draw(NUM_KV_HEADS, context)
        with torch.inference_mode():
            layer = filled_layer(k, v, config)
            steps: dict[str, Callable[[], Any]] = {
                "dkv": functools.partial(layer.attend, q, k_new, v_new),
                "dense": functools.partial(dense_attention, q, k, v),
                "sdpa": functools.partial(sdpa, q, k, v),
            }
            period = config.route_every
            turns: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(FIRST_STEPS + period - 1):  # the next one scans
                steps["dkv"]()
            for turn in range((repeats + 1) * period):
                for name, step in steps.items():
                    if name != "sdpa" or turn % period == 0:
                        turns[name].append(milliseconds(step, device))
            close_ms = _close_ms(layer, device)
        dkv_ms = [turns["dkv"][i : i + period] for i in range(period, len(turns["dkv"]), period)]  # the first warms up
        ms = statistics.median(map(statistics.fmean, dkv_ms)) + close_ms / config.block_size
        dense_ms, sdpa_ms = statistics.median(turns["dense"][period:]), statistics.median(turns["sdpa"][1:])
        others = [each for steps_of in dkv_ms for each in steps_of[1:]]
        rows.append(
            {
                "op": "decode_attention",
                "context": context,
                "dtype": str(dtype).removeprefix("torch."),
                "ms": round(ms, 3),
                "dense_ms": round(dense_ms, 3),
                "sdpa_ms": round(sdpa_ms, 3),
                "ratio": round(dense_ms / ms, 2),
                "route_ms": round(statistics.median(each[0] for each in dkv_ms), 3),
                "other_ms": round(statistics.median(others), 3) if others else None,
                "close_ms": round(close_ms, 3),
                "top_k": config.top_k,
                "route_every": period,
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def filled_layer(k: torch.Tensor, v: torch.Tensor, config: DKVConfig) -> LayerCache:
    """A layer's cache as it is after ``k, v [B, Hkv, context, D or Dv]``, its blocks repeated from the first few."""
    context, size = k.shape[2], config.block_size
    sinks = min(config.sink_tokens, context)
    num_blocks = max(0, (context - sinks - config.window) // size)
    exact = context - num_blocks * size
    layer = LayerCache(config)
    rows = [torch.cat([x[:, :, :sinks], x[:, :, context - exact + sinks :]], dim=2) for x in (k, v)]
    layer.attend(torch.zeros_like(rows[0]), *rows)
    if num_blocks:
        layer.blocks, layer.block_counts = (_tiled_blocks(k, v, num_blocks, config),), [num_blocks] * len(k)
    layer.offset, layer.tokens = context, [context] * len(k)
    return layer


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Decode attention as one bmm per kv head, the fastest dense form on a CPU. All of ``[B, H, S, D]``."""
    batch, num_q_heads, queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(batch * num_kv_heads, -1, head_dim)  # [B*Hkv, G*Sq, D]
    keys, values = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
    weights = torch.softmax(torch.bmm(grouped, keys.transpose(1, 2)) * head_dim**-0.5, dim=-1)
    return torch.bmm(weights, values).reshape(batch, num_q_heads, queries, -1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _tiled_blocks(k: torch.Tensor, v: torch.Tensor, num_blocks: int, config: DKVConfig) -> CompressedBlocks:
    made = min(num_blocks, DISTINCT_BLOCKS)
    rows = made * config.block_size
    blocks = dkv.compress_blocks(k[:, :, :rows].contiguous(), v[:, :, :rows].contiguous(), config=config)
    index = torch.arange(num_blocks, device=k.device) % made
    return blocks.map(lambda part: part[:, index].contiguous())


def _close_ms(layer: LayerCache, device: str) -> float:
    """Milliseconds that closing one block takes; ``layer`` stays as it is."""
    rows = layer.rows[0] - layer.config.sink_tokens - layer.config.block_size
    return statistics.median(milliseconds(lambda: copy.copy(layer).close(rows), device) for _ in range(3))
