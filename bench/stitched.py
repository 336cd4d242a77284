"""One layer's attention over long contexts of real keys: ``python -m bench.stitched --json FILE``.

The small model knows 8,192 positions. Segments of real text go through it one by one; their keys are turned on to the
positions that they take in a context as long as asked, and the queries are those of a passage that repeats what stands
30 % into it. The layer is the one whose heads look back most. Compared with exact attention over every row: the output
of the compressed cache with all of its blocks, and with those that are routed for every query or for several in a row.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dkv
from dkv import DKVConfig, HeadProfile
from dkv.benches import needle
from dkv.benches.results import write_json
from dkv.integrations.transformers import attending
from dkv.models import load

SEGMENT = 1024
REPEATED = 256  # tokens of the passage; the queries are those of its second half
QUERIES = 96
INTERVALS = (1, 4, 8, 16)


def segment(model: Any, ids: list[int], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[1, heads, tokens, D]`` of a layer, of a text by itself."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def capture(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
        if module.layer_idx == layer:
            seen.append((q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    layers, model.model.layers = model.model.layers, model.model.layers[: layer + 1]
    try:
        with attending(model, "capture", capture):
            model.model(torch.tensor([ids]), use_cache=False)
    finally:
        model.model.layers = layers
    return seen[0]


def stitched(model: Any, parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Queries, keys and values of the segments one after another, at the positions of one long text."""
    placed = [
        (turned(model, q, index * SEGMENT), turned(model, k, index * SEGMENT), v)
        for index, (q, k, v) in enumerate(parts)
    ]
    return [torch.cat(each, dim=2) for each in zip(*placed, strict=True)]


def turned(model: Any, x: Tensor, distance: int) -> Tensor:
    """Keys or queries ``[1, H, n, D]`` moved on by ``distance`` positions."""
    cos, sin = model.model.rotary_emb(x, torch.tensor([[distance]]))  # [1, 1, D]
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def row(q: Tensor, k: Tensor, v: Tensor, config: DKVConfig) -> dict[str, Any]:
    """Errors of one context; a query is answered from its own position, as in decoding."""
    context, sinks, size = k.shape[2], config.sink_tokens, config.block_size
    first = context - QUERIES
    number = (first - sinks - config.window) // size
    middle = slice(sinks, sinks + number * size)
    blocks = dkv.compress_blocks(k[:, :, middle].contiguous(), v[:, :, middle].contiguous(), config=config)
    every = torch.arange(number, dtype=torch.int32).expand(1, k.shape[1], -1)
    errors: dict[str, list[Tensor]] = {}
    held: dict[str, Tensor] = {}
    for index in range(QUERIES):
        now = first + index + 1
        query = q[:, :, now - 1 : now]
        dense = dkv.exact_attention(query, k[:, :, :now], v[:, :, :now]).out
        window = [torch.cat([x[:, :, :sinks], x[:, :, middle.stop : now]], dim=2) for x in (k, v)]
        chosen = {"all": every}
        for router in ("lowrank", "keys"):
            for interval in INTERVALS:
                name = f"{router}, every {interval}"
                if index % interval == 0:
                    held[name] = dkv.route_blocks(query, blocks, top_k=config.top_k, router=router, sink_blocks=0)
                chosen[name] = held[name]
        for name, indices in chosen.items():
            out = dkv.decode_attention(query, blocks, *window, block_indices=indices).out
            error = (out - dense).norm(dim=-1) / dense.norm(dim=-1)  # [1, Hq, 1]
            errors.setdefault(name, []).append(error.flatten())
    measured = {name: torch.stack(each).mean(0) for name, each in errors.items()}  # [Hq]
    return {
        "context": context,
        "blocks": number,
        "top_k": config.top_k,
        "error": {name: round(float(each.mean()), 4) for name, each in measured.items()},
        "worst_head": {name: round(float(each.max()), 4) for name, each in measured.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contexts = sorted(int(each) for each in options.contexts.split(","))
    if any(context % SEGMENT or context < 4 * SEGMENT for context in contexts):
        parser.error(f"--contexts must be multiples of {SEGMENT:,} from {4 * SEGMENT:,}")
    model, tokenizer = load("smollm2-135m", dtype="float32")
    scores = torch.tensor(HeadProfile.shipped("smollm2-135m").scores)
    layer = int(scores.amax(1).argmax())
    text = needle.encode(tokenizer, needle.prose())
    text = (text * (contexts[-1] // len(text) + 1))[: contexts[-1]]
    rows: list[dict[str, Any]] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode():
        for context in contexts:
            while len(parts) < context // SEGMENT - 1:
                start = len(parts) * SEGMENT
                parts.append(segment(model, text[start : start + SEGMENT], layer))
            place = context * 3 // 10
            ids = text[context - SEGMENT : context - REPEATED] + text[place : place + REPEATED]
            qkv = stitched(model, [*parts, segment(model, ids, layer)])
            rows.append({"layer": layer, **row(*qkv, DKVConfig(top_k=options.top_k))})
            print(rows[-1], flush=True)
            write_json(options.json, rows)


if __name__ == "__main__":
    main()
