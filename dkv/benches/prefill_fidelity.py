"""How far block-sparse prefill is from dense prefill: KL divergence, top-1 agreement and recall, by blocks visited.

A text is read with block-sparse attention, nothing of it compressed. Then come the continuations and questions of
:mod:`dkv.benches.fidelity`, over a cache that attends densely: what differs is what the prompt left behind. The same
continuations are also read as one more chunk with block-sparse attention, so that the logits of a prompt's own end are
seen too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dkv.benches import fidelity, needle
from dkv.config import EVERY_POSITION, DKVConfig
from dkv.profile import HeadProfile

FINE: dict[str, Any] = {"prefill_block": 64, "prefill_stride": 16}
NARROW: dict[str, Any] = {"prefill_window": 256}


def default_variants(profile: HeadProfile | None = None) -> dict[str, DKVConfig]:
    """The limits that are compared, those that go by heads only where a profile is given."""
    variants = {
        "default": DKVConfig(),
        "ratio 0.25": DKVConfig(prefill_ratio=0.25, **NARROW),
        "mass 0.89": DKVConfig(prefill_mass=0.89, **NARROW),
        "mass 0.9, fine": DKVConfig(prefill_mass=0.9, **NARROW, **FINE),
    }
    if profile is not None:
        half = DKVConfig(prefill_mass=0.95, prefill_share=0.5, profile=profile, **NARROW)
        variants["mass 0.95, half of the heads"] = half
    return variants


@dataclasses.dataclass
class _Subject:
    """A variant and what was seen of it."""

    name: str
    config: DKVConfig
    then_dense: fidelity.Tally = dataclasses.field(default_factory=fidelity.Tally)
    then_sparse: fidelity.Tally = dataclasses.field(default_factory=fidelity.Tally)
    visited: int = 0
    visible: int = 0

    def row(self, counted: int) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "visited": round(self.visited / max(1, self.visible), 4)}
        for prefix, tally in (("", self.then_dense), ("end_", self.then_sparse)):
            for metric, values in tally.seen.items():
                row[prefix + metric] = statistics.fmean(values) if values else None
                row[f"{prefix}{metric}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        right = self.then_dense.right
        return row | {"recall": round(right / counted, 3) if counted else None, "n": counted}


def run(
    model: Any,
    tokenizer: Any,
    tokens: int = fidelity.TOKENS,
    offsets: Sequence[int] = fidelity.OFFSETS,
    trials: int = 5,
    seed: int = 0,
    text: str | None = None,
    variants: Mapping[str, DKVConfig] | None = None,
    advance: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure block-sparse prefill beside dense prefill on the same texts.

    Parameters
    ----------
    model, tokenizer, tokens, offsets, trials, seed, text, advance
        As in :func:`dkv.benches.fidelity.run`.
    variants : mapping of str to DKVConfig, optional
        :func:`default_variants` when None. Only what they say of prefill counts; all positions are prefilled by it.

    Returns
    -------
    list of dict
        One for each variant: ``name``; ``visited``, key blocks attended over those that a dense prefill attends;
        ``std_kl``, ``std_top1``, ``copy_kl``, ``copy_top1`` of continuations over the cache that the prefill left,
        which attend densely; the same with ``end_``, of continuations that are read block-sparsely too; each with
        ``_spread``; ``recall``, right answers over ``n``, the passcodes that a densely prefilled cache knows (None
        where there is none); ``trials``, ``tokens``, ``offsets``, ``dtype``.
    """
    from dkv.integrations.transformers import attach, detach

    variants = default_variants() if variants is None else variants
    room = tokens + fidelity.LENGTH + needle.longest(tokenizer)
    subjects = [
        _Subject(name, dataclasses.replace(config, window=room, prefill_dense_below=0))
        for name, config in variants.items()
    ]
    dense = DKVConfig(window=room, prefill_dense_below=EVERY_POSITION)
    counted = 0
    attach(model, dense)
    try:
        cut = fidelity.passages(tokenizer, needle.prose() if text is None else text, tokens, offsets)
        for index, passage in enumerate(cut):
            label = f"offset {passage.offset:,} ({index + 1} of {len(cut)}): "
            advance(label + "dense")
            want = fidelity.outputs(model, _read(model, passage.ids, dense), passage.continuations)
            for subject in subjects:
                advance(label + subject.name)
                cache = _read(model, passage.ids, subject.config)
                subject.visited += sum(layer.visited for layer in cache.dkv_layers)
                subject.visible += sum(layer.visible for layer in cache.dkv_layers)
                end = fidelity.outputs(model, cache, passage.continuations)
                cache.configure(dense)
                got = fidelity.outputs(model, cache, passage.continuations)
                for tally, found in ((subject.then_dense, got), (subject.then_sparse, end)):
                    tally.add(fidelity.divergences(want, found), 0, 0)
        for trial in range(trials):
            hay = needle.bury(
                tokenizer, tokens, seed=seed * 1_000_003 + trial, first=fidelity.SINK, last=fidelity.WINDOW
            )
            label = f"passcode {trial + 1} of {trials}: "
            advance(label + "dense")
            if not needle.ask(model, tokenizer, _read(model, hay.ids, dense), hay.code).right:
                continue
            counted += 1
            for subject in subjects:
                advance(label + subject.name)
                answer = needle.ask(model, tokenizer, _read(model, hay.ids, subject.config), hay.code)
                subject.then_dense.right += answer.right
    finally:
        detach(model)
    common = {"trials": trials, "tokens": tokens, "offsets": list(offsets), "dtype": str(model.dtype).split(".")[-1]}
    return [subject.row(counted) | common for subject in subjects]


def _read(model: Any, ids: Sequence[int], config: DKVConfig) -> Any:
    """A cache that has read a text in one chunk."""
    from dkv.integrations.transformers import DKVCache

    cache = DKVCache(model, config)
    needle.feed(model, ids, cache, chunk=len(ids))
    return cache
