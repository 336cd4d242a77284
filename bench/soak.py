"""A million tokens through one cache of bounded size: ``python -m bench.soak --json FILE``.

Synthetic queries, keys and values of a model of two small layers, in chunks with decode steps between; the cache keeps
the first tokens, the newest ones, and at most so many closed blocks, the oldest of which leave. At intervals a decode
step is compared with float64 attention over the rows that are to be there: its output, and its lse, which comes out of
the cache itself: the first channel of every value is 1 and a sink logit stands where the lse should be, so that this
channel is ``sigmoid(lse - sink)``. Bytes, resident memory and Python objects are counted at the same intervals. Exit
status 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dkv import DKVConfig
from dkv.benches.peak import resident
from dkv.cli._common import write_json
from dkv.integrations.transformers import DKVCache, attention_forward

LAYERS, QUERY_HEADS, HEADS, DIM = 2, 4, 2, 16
CONFIG = DKVConfig(
    block_size=128,
    window=256,
    sink_tokens=64,
    format="fp32",
    rank=4,
    router="keys",
    top_k=1000,
    max_blocks=16,
    when_full="drop_oldest",
    prefill_dense_below=0,
)
CHUNK, STEPS, INTERVALS = 1024, 8, 20  # tokens of a chunk, decode steps after it, comparisons in all
LSE_BOUND = 1e-5
OUT_BOUND = 1e-5
OBJECTS = 200  # that Python may hold more of than after the first interval
RESIDENT = 64 << 20  # bytes that the process may take more of than after the first interval


def model_config(layers: int = LAYERS, query_heads: int = QUERY_HEADS, heads: int = HEADS, dim: int = DIM) -> Any:
    """The config of a model that attends through dkv; there is no model."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=query_heads * dim,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        head_dim=dim,
    )
    config._attn_implementation = "dkv"
    return config


def attended(
    cache: DKVCache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sinks: Sequence[Tensor | None] = ()
) -> Tensor:
    """A step of a model, its attention alone: ``q, k, v [layers, B, heads, n, D]``, gives ``[layers, B, Hq, n, D]``."""
    outs = []
    for layer, query in enumerate(q):
        rows = cache.update(k[layer], v[layer], layer)
        sink = sinks[layer] if sinks else None
        out, _ = attention_forward(torch.nn.Identity(), query, *rows, mask, s_aux=sink)
        outs.append(out.transpose(1, 2))
    return torch.stack(outs)


class Kept:
    """The rows that are to be there, ``[2, layers, HEADS, n, DIM]`` of keys and values: the first, and the newest."""

    def __init__(self, config: DKVConfig) -> None:
        self.config, self.tokens = config, 0
        self.first = self.newest = torch.zeros(2, LAYERS, HEADS, 0, DIM)

    def add(self, rows: Tensor) -> None:
        more = max(0, self.config.sink_tokens - self.tokens)
        self.first = torch.cat([self.first, rows[:, :, :, :more]], dim=3)
        self.newest = torch.cat([self.newest, rows[:, :, :, more:]], dim=3)
        self.tokens += rows.shape[3]

    def cut(self) -> None:
        """What has left: all but ``max_blocks`` blocks and the rows that no block has closed over."""
        config, behind = self.config, max(0, self.tokens - self.config.sink_tokens)
        assert config.max_blocks is not None
        closed = max(0, behind - config.window) // config.block_size
        left = behind - max(0, closed - config.max_blocks) * config.block_size
        self.newest = self.newest[:, :, :, self.newest.shape[3] - left :].clone()

    def attend(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """``q [layers, Hq, DIM]`` over all of them in float64: outputs and lse."""
        k, v = torch.cat([self.first, self.newest], dim=3).double().repeat_interleave(QUERY_HEADS // HEADS, dim=2)
        logits = (k @ q.double()[..., None]).squeeze(-1) * DIM**-0.5
        lse = logits.logsumexp(-1)
        return ((logits - lse[..., None]).exp()[:, :, None] @ v).squeeze(2), lse


def drawn(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(LAYERS, 1, n, length, DIM, generator=generator) for n in (QUERY_HEADS, HEADS, HEADS))
    v[..., 0] = 1
    return 2 * q, k, v


def compared(cache: DKVCache, kept: Kept, generator: torch.Generator) -> tuple[float, float]:
    """Largest error of the lse and of the outputs of one more decode step."""
    q, k, v = drawn(generator, 1)
    kept.add(torch.stack([k, v])[:, :, 0])
    wanted, lse = kept.attend(q[:, 0, :, 0])
    sinks = lse.float()
    out = attended(cache, q, k, v, sinks=list(sinks))[:, 0, :, 0].double()
    kept.cut()
    got = sinks.double() + torch.logit(out[..., 0])
    share = torch.sigmoid(lse - sinks.double())  # of the rows, beside the sink
    return float((got - lse).abs().max()), float((out - share[..., None] * wanted).abs().max())


def run(tokens: int, intervals: int = INTERVALS, seed: int = 0) -> list[dict[str, Any]]:
    """One row per interval."""
    generator = torch.Generator().manual_seed(seed)
    cache, kept, rows = DKVCache(model_config(), CONFIG), Kept(CONFIG), []
    start = time.perf_counter()
    for interval in range(1, intervals + 1):
        largest = 0
        while kept.tokens < tokens * interval // intervals:
            for length in (CHUNK, *[1] * STEPS):
                q, k, v = drawn(generator, length)
                attended(cache, q, k, v)
                kept.add(torch.stack([k, v])[:, :, 0])
                kept.cut()
                largest = max(largest, cache.nbytes)
        lse, out = compared(cache, kept, generator)
        gc.collect()
        rows.append(
            {
                "tokens": cache.get_seq_length(),
                "dropped": cache.dropped_tokens[0],
                "lse_error": lse,
                "out_error": out,
                "largest_bytes": largest,
                "resident_bytes": resident(),
                "objects": len(gc.get_objects()),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    return rows


def most_bytes() -> int:
    """What the cache may hold: its closed blocks, and exact rows in whole blocks."""
    cache = DKVCache(model_config(), CONFIG)
    size, limit = CONFIG.block_size, CONFIG.max_blocks
    assert limit is not None
    attended(cache, *drawn(torch.Generator().manual_seed(0), CONFIG.sink_tokens + CONFIG.window + size))
    exact = CONFIG.sink_tokens + CONFIG.window + size
    row = 2 * LAYERS * HEADS * DIM * 4
    return limit * cache.compressed_nbytes + -(-exact // size) * size * row


def broken(rows: Sequence[dict[str, Any]], most: int) -> list[str]:
    """Which bounds do not hold."""
    first, last = rows[0], rows[-1]
    checks = {
        f"lse within {LSE_BOUND}": max(row["lse_error"] for row in rows) <= LSE_BOUND,
        f"outputs within {OUT_BOUND}": max(row["out_error"] for row in rows) <= OUT_BOUND,
        f"{most:,} bytes of cache": max(row["largest_bytes"] for row in rows) <= most,
        f"{RESIDENT:,} more bytes resident": last["resident_bytes"] - first["resident_bytes"] <= RESIDENT,
        f"{OBJECTS} more Python objects": last["objects"] - first["objects"] <= OBJECTS,
    }
    return [name for name, holds in checks.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens must be 1 or more, got {options.tokens}")
    with torch.inference_mode():
        rows, most = run(options.tokens), most_bytes()
    for row in rows:
        print("  ".join(f"{name} {value:,}" for name, value in row.items()))
    write_json(options.json, {"bounds": {"lse": LSE_BOUND, "out": OUT_BOUND, "bytes": most}, "rows": rows})
    failed = broken(rows, most)
    print("all bounds hold" if not failed else f"broken: {', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
