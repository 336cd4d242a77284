"""One passcode, one long text: dense attention beside the compressed cache."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from dkv.benches import needle, peak
from dkv.config import DKVConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """One column of the demo's table. Ratios are dense bytes over stored bytes."""

    variant: str
    answer: str
    right: bool
    kv_bytes: int
    ratio: float
    compressed_ratio: float | None
    peak_bytes: int
    peak_meaning: str
    prefill_seconds: float
    decode_tokens_per_second: float


def run(
    model: Any,
    tokenizer: Any,
    hay: needle.Haystack,
    config: DKVConfig,
    top_k: int | None,
    chunk: int = 512,
    advance: Callable[[str, int], None] = lambda label, tokens: None,
) -> list[Row]:
    """Prefill, compress, ask: dense attention, DKV over every block, DKV over ``top_k`` blocks a step.

    Routing concerns decode steps alone, so both DKV rows ask copies of one prefilled cache.

    Parameters
    ----------
    model, tokenizer
    hay : Haystack
    config : DKVConfig
    top_k : int or None
        Blocks per decode step of the routed row; None leaves that row out.
    chunk : int
        Tokens per prefill step.
    advance : callable
        Told the row and how many tokens went in.
    """
    from dkv.integrations.transformers import DKVCache, attach, detach

    rows = []
    with peak.watch(model.device) as memory:
        cache = needle.dense_cache(model)
        prefill = needle.feed(model, hay.ids, cache, chunk, lambda count: advance("dense", count))
        kv_bytes = needle.dense_cache_nbytes(cache)
        answer = needle.ask(model, tokenizer, cache, hay.code)
    rows.append(_row("dense", answer, kv_bytes, 1.0, None, memory, prefill))
    del cache
    gc.collect()

    num_blocks = -(-len(hay.ids) // config.block_size)
    every = dataclasses.replace(config, top_k=max(num_blocks, config.top_k))
    settings = {"DKV, all blocks": every}
    if top_k is not None:
        settings[f"DKV, top {top_k} blocks"] = dataclasses.replace(config, top_k=top_k)
    attach(model, every)
    with peak.watch(model.device) as memory:
        cache = DKVCache(model, every)
        prefill = needle.feed(model, hay.ids, cache, chunk, lambda count: advance("DKV", count))
        cache.compress()
    closed, closed_dense = cache.compressed_nbytes, cache.compressed_dense_nbytes
    part = closed_dense / closed if closed else None
    for variant, each in settings.items():
        twin = needle.reconfigured(cache, each)
        kv_bytes, ratio = twin.nbytes, twin.dense_nbytes / twin.nbytes
        with peak.watch(model.device) as asked:
            answer = needle.ask(model, tokenizer, twin, hay.code)
        asked.nbytes = max(asked.nbytes, memory.nbytes)
        rows.append(_row(variant, answer, kv_bytes, ratio, part, asked, prefill))
        del twin
        gc.collect()
    detach(model)
    return rows


def forgot(rows: list[Row]) -> bool:
    """Whether the dense cache knew the passcode and a compressed one did not."""
    return rows[0].right and not all(row.right for row in rows)


def sentence(rows: list[Row], code: str) -> str:
    """What the table means, in plain words."""
    dense, compressed = rows[0], rows[1:]
    smallest = compressed[0]
    sizes = f"{smallest.kv_bytes / 1e6:.1f} MB instead of {dense.kv_bytes / 1e6:.1f} MB"
    if smallest.ratio >= 1.05:
        sizes += f", {smallest.ratio:.1f} times smaller"
    else:
        sizes += ", no smaller: this text is too short for compression to pay"
    if not dense.right:
        return (
            f"The model itself does not find the passcode {code} with its full cache, so this run says nothing about "
            "compression; try another --seed or a larger model."
        )
    if smallest.compressed_ratio is None:
        return "Nothing was compressed: the text is no longer than what DKV keeps exact. Try more --tokens."
    wrong = [row.variant for row in compressed if not row.right]
    if not wrong:
        return f"The cache was compressed before the question came, and still knew the passcode {code}: {sizes}."
    return (
        f"WRONG: the dense cache knew the passcode {code}, {' and '.join(wrong)} lost it. The KV cache took {sizes}, "
        "but these settings forget."
    )


def _row(
    variant: str,
    answer: needle.Answer,
    kv_bytes: int,
    ratio: float,
    compressed_ratio: float | None,
    memory: peak.Peak,
    prefill_seconds: float,
) -> Row:
    return Row(
        variant=variant,
        answer=answer.text,
        right=answer.right,
        kv_bytes=int(kv_bytes),
        ratio=round(ratio, 3),
        compressed_ratio=None if compressed_ratio is None else round(compressed_ratio, 3),
        peak_bytes=memory.nbytes,
        peak_meaning=memory.meaning,
        prefill_seconds=round(prefill_seconds, 2),
        decode_tokens_per_second=round(answer.decode_tokens / answer.decode_seconds, 2),
    )
