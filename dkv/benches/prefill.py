"""Time of block-sparse attention over a prompt of one layer, beside dense causal attention in the same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dkv
from dkv.benches.decode import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS
from dkv.benches.timing import milliseconds
from dkv.config import DKVConfig

CONTEXTS = (4096, 8192, 16384, 32768, 65536)
LONG = 16384  # beyond it dense attention takes too long to repeat


def run(
    contexts: Sequence[int] = CONTEXTS,
    dtype: torch.dtype = torch.float32,
    config: DKVConfig | None = None,
    repeats: int = 3,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """One row per context: the whole prompt by :func:`dkv.prefill_attention`, selection included, and by SDPA.

    The rows are random: where ``config`` limits the number of key blocks, time depends on shapes alone. Both take
    turns, DKV before and after each SDPA; beyond 16,384 tokens SDPA runs once. SDPA is the best dense form of a prompt
    on a CPU, a bmm and a softmax per kv head are slower.

    Returns
    -------
    list of dict
        Keys ``op``, ``context``, ``dtype``, ``ms``, ``dense_ms``, ``sdpa_ms`` (the same), ``ratio``
        (``dense_ms / ms``), ``exponent`` (of the growth since a context measured before that is a fourth as long, None
        without one), ``threads``.
    """
    config = config or DKVConfig()
    rows: list[dict[str, Any]] = []
    for context in contexts:
        progress(f"{context:,} tokens")
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(1, heads, context, HEAD_DIM, generator=generator).to(device=device, dtype=dtype)
            for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )

        def sparse(rows: tuple = (q, k, v)) -> Any:
            return dkv.prefill_attention(*rows, config=config)

        def dense(rows: tuple = (q, k, v)) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)

        ours, theirs = [], []
        with torch.inference_mode():
            if context <= LONG:
                sparse()
                dense()
            for _ in range(repeats if context <= LONG else 1):
                ours.append(milliseconds(sparse, device))
                theirs.append(milliseconds(dense, device))
                ours.append(milliseconds(sparse, device))
        ms, dense_ms = statistics.median(ours), statistics.median(theirs)
        shorter = next((row["ms"] for row in rows if row["context"] * 4 == context), None)
        rows.append(
            {
                "op": "prefill_attention",
                "context": context,
                "dtype": str(dtype).removeprefix("torch."),
                "ms": round(ms, 3),
                "dense_ms": round(dense_ms, 3),
                "sdpa_ms": round(dense_ms, 3),
                "ratio": round(dense_ms / ms, 2),
                "exponent": None if shorter is None else round(math.log(ms / shorter) / math.log(4), 3),
                "threads": torch.get_num_threads(),
            }
        )
    return rows
