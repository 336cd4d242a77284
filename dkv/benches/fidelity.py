"""How far a compressed cache is from the dense one: KL divergence, top-1 agreement and recall, beside peers and floors.

A text is prefilled densely. Its first 256 and its last 256 tokens stay exact, everything between is replaced by a
variant's version, and only then is a continuation fed, at the positions where the text ended:

- standard: the next 128 tokens of the text. They hardly see the middle, which is why every table has floors.
- copy: 128 tokens of the text repeated, from 27 % and from 66 % of it, scored from the 17th token on.
- recall: a passcode buried in the middle, asked for afterwards; counted where the dense cache answers right.

Bytes are those of a 16-bit cache whatever dtype the model runs in: a dense number takes 2 bytes, and so does every
number that a variant holds in the cache's dtype (anchors, exact rows, scales that follow it). All else counts as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dkv.benches import needle, peers, recall
from dkv.config import EVERY_POSITION, DKVConfig
from dkv.profile import HeadProfile

SINK = 256  # first tokens that stay exact
WINDOW = 256  # newest tokens that stay exact
LENGTH = 128  # tokens of a continuation
COPIED_FROM = (2000, 4900)  # of 7,424
COPY_START = 16  # outputs before the model can know that it copies
UNIT = 256  # the middle is a whole number of blocks
SHORTEST = 1280  # both copied passages then lie in the middle
TOKENS = 7424
OFFSETS = (0, 20_000, 40_000, 60_000)
ALL_BLOCKS = 2**31 - 1
FITTED = ("quality", "balanced", "small")  # presets that a profile fits
METRICS = ("std_kl", "std_top1", "copy_kl", "copy_top1")


def default_variants(profile: HeadProfile | None = None) -> dict[str, DKVConfig]:
    """The DKV settings that are compared, those of the presets that need a profile only where one is given.

    One with ``chunk_top_k`` routes; any other attends all of its blocks.
    """
    variants = recall.default_variants()
    if profile is not None:
        variants |= {name: DKVConfig.preset(name, profile) for name in FITTED}
    return variants


def routed_variants(profile: HeadProfile, top_k: int = 8) -> dict[str, DKVConfig]:
    """The preset "balanced" with all blocks, and with ``top_k`` blocks of its routed heads by every router.

    Every token scans all blocks, or several tokens share a selection, or those after a scan select among twice
    ``top_k`` candidates and the blocks that follow. Rank 32 takes its bytes from the widths: the ratio stays. Beside
    them the default settings, which route every head in a rank-32 space of their own.
    """
    whole = DKVConfig.preset("balanced", profile)
    picks: dict[str, dict[str, Any]] = {
        "keys": {},
        "keys every 4 steps": {"route_every": 4, "route_candidates": 0},
        "keys every 8 steps": {"route_every": 8, "route_candidates": 0},
        "keys every 4 steps and twice the blocks": {
            "route_every": 4,
            "route_candidates": 0,
            "chunk_top_k": 2 * top_k,
        },
        "keys, every head": {"routed_share": 1.0},
        "keys of every head every 8 steps": {"routed_share": 1.0, "route_every": 8, "route_candidates": 0},
        "lowrank, rank 32": {"router": "lowrank", "rank": 32},
        "lowrank of rank 32 every 8 steps": {
            "router": "lowrank",
            "rank": 32,
            "route_every": 8,
            "route_candidates": 0,
        },
        "residual": {"router": "residual"},
        "minmax": {"router": "minmax"},
    }
    routed = {
        f"top {top_k} by {name}": dataclasses.replace(whole, **{"chunk_top_k": top_k, **changes})
        for name, changes in picks.items()
    }
    plain = DKVConfig(chunk_top_k=top_k, route_candidates=2 * top_k)
    scans = {
        f"default top {top_k}" + (f" scanned every {every} steps" if every > 1 else ""): dataclasses.replace(
            plain, route_every=every
        )
        for every in (1, 2, 4, 8)
    }
    return {"balanced": whole, "all blocks, rank 32": dataclasses.replace(whole, rank=32), **routed, **scans}


@dataclasses.dataclass(frozen=True)
class Passage:
    """Token ids of a text and of the three continuations: the next tokens, then both repeated stretches."""

    offset: int
    ids: list[int]
    continuations: list[list[int]]


def passages(tokenizer: Any, text: str, tokens: int, offsets: Sequence[int]) -> list[Passage]:
    """Cut ``text`` at ``offsets``, counted in tokens; a BOS token goes first where the tokenizer has one.

    Raises
    ------
    ValueError
        When the text is too short, or ``tokens`` is no length that the protocol can take.
    """
    if tokens < SHORTEST or tokens % UNIT:
        raise ValueError(f"tokens must be a multiple of {UNIT} and {SHORTEST:,} or more, got {tokens:,}")
    first, ids = needle.first_tokens(tokenizer), needle.encode(tokenizer, text)
    needed = max(offsets) + tokens - len(first) + LENGTH
    if needed > len(ids):
        raise ValueError(f"offset {max(offsets):,} needs {needed:,} tokens of text, it has {len(ids):,}")
    made = []
    for offset in offsets:
        end = offset + tokens - len(first)
        context = first + ids[offset:end]
        repeated = [tokens * place // TOKENS for place in COPIED_FROM]
        made.append(
            Passage(
                offset,
                context,
                [ids[end : end + LENGTH], *(context[place : place + LENGTH] for place in repeated)],
            )
        )
    return made


@dataclasses.dataclass
class Tally:
    """What was seen of one subject: a number per text of each metric, right answers, bytes of the compressed part."""

    seen: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {metric: [] for metric in METRICS})
    nbytes: int = 0
    per_token: int = 0
    right: int = 0

    def add(self, metrics: Mapping[str, float], nbytes: int, per_token: int) -> None:
        """Add a text. ``per_token`` is the bytes of one dense token."""
        for name, value in metrics.items():
            self.seen[name].append(value)
        self.nbytes, self.per_token = nbytes, per_token

    def row(self, name: str, kind: str, tokens: int, counted: int) -> dict[str, Any]:
        """A row of the table, see :func:`run`; ``counted`` passcodes were asked for."""
        exact, dense = (SINK + WINDOW) * self.per_token, tokens * self.per_token
        row: dict[str, Any] = {
            "name": name,
            "kind": kind,
            "ratio": round((dense - exact) / self.nbytes, 3) if self.nbytes else None,
            "whole_cache_ratio": round(dense / (self.nbytes + exact), 3),
        }
        for metric, values in self.seen.items():
            row[metric] = statistics.fmean(values)
            row[f"{metric}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        row["recall"] = round(self.right / counted, 3) if counted else None
        row["n"] = counted
        return row


def divergences(dense: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, float]:
    """The metrics of one text, from the logits ``[tokens, vocab]`` of each continuation."""
    (kl, top1), *copies = (
        divergence(a[start:], b[start:])
        for a, b, start in zip(dense, other, (0, *(COPY_START for _ in COPIED_FROM)), strict=True)
    )
    copy_kl, copy_top1 = (statistics.fmean(values) for values in zip(*copies))
    return {"std_kl": kl, "std_top1": top1, "copy_kl": copy_kl, "copy_top1": copy_top1}


def divergence(dense: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL(dense || other) in nats and share of equal largest logits, for logits ``[tokens, vocab]``; in float32."""
    p, q = dense.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean())


class _Dkv:
    """A DKV configuration."""

    kind = "dkv"

    def __init__(self, name: str, config: DKVConfig, model: Any) -> None:
        self.name, self.tally = name, Tally()
        self.routed = config.chunk_top_k is not None
        top_k = config.chunk_top_k or ALL_BLOCKS
        self.config = dataclasses.replace(
            recall.following_dtype(config, model),
            window=WINDOW,
            sink_tokens=SINK,
            top_k=top_k,
            prefill_dense_below=EVERY_POSITION,
        )
        self._nbytes: int | None = None  # the same in every text

    def build(self, whole: Any) -> tuple[Any, int]:
        cache = _compressed(self.name, whole, self.config)
        if self._nbytes is None:
            wide = any(layer.k_rows.dtype == torch.float32 for layer in cache.dkv_layers)
            self._nbytes = self._nbytes_of_16_bits(whole) if wide else int(cache.compressed_nbytes)
        return cache, self._nbytes

    def _nbytes_of_16_bits(self, whole: Any) -> int:
        """Bytes of the arrays that the same rows make in a 16-bit cache."""
        config = dataclasses.replace(self.config, format="bf16") if self.config.format == "fp16" else self.config
        half = copy.deepcopy(whole)
        for layer in half.dkv_layers:
            layer.k_rows, layer.v_rows = layer.k_rows.bfloat16(), layer.v_rows.bfloat16()
        return int(_compressed(self.name, half, config).compressed_nbytes)


def _compressed(name: str, whole: Any, config: DKVConfig) -> Any:
    cache = needle.reconfigured(whole, config)
    cache.compress()
    if any(layer.rows != [SINK + WINDOW] for layer in cache.dkv_layers):
        raise ValueError(f"variant {name!r} does not compress the same tokens: its block_size must divide {UNIT}")
    return cache


class _Rows:
    """A peer or a floor."""

    routed = False

    def __init__(self, peer: peers.Peer) -> None:
        self.peer, self.name, self.kind, self.tally = peer, peer.name, peer.kind, Tally()

    def build(self, whole: Any) -> tuple[Any, int]:
        return peers.stand_in(whole, SINK, WINDOW, self.peer)


def run(
    model: Any,
    tokenizer: Any,
    tokens: int = TOKENS,
    offsets: Sequence[int] = OFFSETS,
    trials: int = 5,
    seed: int = 0,
    text: str | None = None,
    variants: Mapping[str, DKVConfig] | None = None,
    others: Sequence[peers.Peer] = (),
    advance: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure floors, DKV variants and ``others`` on the same texts.

    Parameters
    ----------
    model, tokenizer
    tokens : int
        Length of the text before a continuation; a multiple of 256.
    offsets : sequence of int
        Tokens of ``text`` at which a measured text begins.
    trials : int
        Passcodes; they are buried in :func:`needle.prose`, whatever ``text`` is. 0 leaves recall out.
    seed : int
        Decides the passcodes.
    text : str, optional
        :func:`needle.prose` when None.
    variants : mapping of str to DKVConfig, optional
        :func:`default_variants` when None. A variant with ``chunk_top_k`` selects that many blocks, and its
        continuation is fed one token at a time, each a decode step with a selection of its own.
    others : sequence of Peer
        As :func:`peers.available` gives them.
    advance : callable
        Told what is being done.

    Returns
    -------
    list of dict
        One for each subject: ``name``; ``kind`` ("floor", "dkv" or "peer"); ``ratio``, dense bytes of the compressed
        part over its stored bytes (None where nothing is stored); ``whole_cache_ratio``, with the exact rows at either
        end on both sides; ``std_kl``, ``std_top1``, ``copy_kl``, ``copy_top1``, means over the offsets, and each with
        ``_spread``, their standard deviation (None for one offset); ``recall``, right answers over ``n``, the trials
        that the dense cache answers right (None where there is none); ``trials``, ``tokens``, ``offsets``, ``dtype``.
    """
    from dkv.integrations.transformers import attach, detach

    variants = default_variants() if variants is None else variants
    cut = passages(tokenizer, needle.prose() if text is None else text, tokens, offsets)
    subjects: list[_Dkv | _Rows] = [
        *(_Rows(floor) for floor in peers.floors()),
        *(_Dkv(name, config, model) for name, config in variants.items()),
        *(_Rows(peer) for peer in others),
    ]
    room = tokens + LENGTH + needle.longest(tokenizer)
    exact = DKVConfig(window=room, prefill_dense_below=EVERY_POSITION)
    bench = _Bench(model, tokenizer, subjects, exact, advance)
    counted = 0
    attach(model, bench.exact)
    try:
        for index, passage in enumerate(cut):
            bench.read(passage, f"offset {passage.offset:,} ({index + 1} of {len(cut)}): ")
        for trial in range(trials):
            hay = needle.bury(tokenizer, tokens, seed=seed * 1_000_003 + trial, first=SINK, last=WINDOW)
            counted += bench.ask(hay, f"passcode {trial + 1} of {trials}: ")
    finally:
        detach(model)
    settings = {"trials": trials, "tokens": tokens, "offsets": list(offsets), "dtype": str(model.dtype).split(".")[-1]}
    return [{**subject.tally.row(subject.name, subject.kind, tokens, counted), **settings} for subject in subjects]


@dataclasses.dataclass
class _Bench:
    """What a run goes through with every text. ``exact`` compresses nothing of it."""

    model: Any
    tokenizer: Any
    subjects: Sequence[_Dkv | _Rows]
    exact: DKVConfig
    advance: Callable[[str], None]

    def read(self, passage: Passage, label: str) -> None:
        """Score every subject on one text."""
        whole, dense_cache = self._prefilled(passage.ids, label)
        dense = outputs(self.model, dense_cache, passage.continuations)
        for subject in self.subjects:
            self.advance(label + subject.name)
            cache, nbytes = subject.build(whole)
            other = outputs(self.model, cache, passage.continuations, one_by_one=subject.routed)
            subject.tally.add(divergences(dense, other), nbytes, _per_token(whole))

    def ask(self, hay: needle.Haystack, label: str) -> bool:
        """Ask every subject for one passcode if the dense cache knows it; gives whether it does."""
        whole, dense_cache = self._prefilled(hay.ids, label)
        if not needle.ask(self.model, self.tokenizer, dense_cache, hay.code).right:
            return False
        for subject in self.subjects:
            self.advance(label + subject.name)
            cache, _ = subject.build(whole)
            subject.tally.right += needle.ask(self.model, self.tokenizer, cache, hay.code).right
        return True

    def _prefilled(self, ids: Sequence[int], label: str) -> tuple[Any, Any]:
        """The DKV cache of a text with nothing compressed, and a dense cache of the same rows."""
        from dkv.integrations.transformers import DKVCache

        self.advance(label + "prefill")
        whole = DKVCache(self.model, self.exact)
        needle.feed(self.model, ids, whole, chunk=len(ids))
        self.advance(label + "dense")
        return whole, peers.stand_in(whole, SINK, WINDOW)[0]


def _per_token(whole: Any) -> int:
    """Bytes of a token's K and V in the layers that DKV compresses, 2 for each number."""
    rows = [part for layer in whole.dkv_layers for part in (layer.k_rows, layer.v_rows)]
    return sum(2 * part.shape[1] * part.shape[3] for part in rows)


def outputs(model: Any, cache: Any, continuations: Sequence[Sequence[int]], one_by_one: bool = False) -> list[Tensor]:
    """Logits ``[tokens, vocab]`` after each token of each continuation, every one fed to a copy of ``cache``.

    One after another: a batch of three would hold the rows of the cache three times and save nothing here.
    """
    found = []
    for ids in continuations:
        fed = peers.branch(cache)
        step = 1 if one_by_one else len(ids)
        rows = [torch.tensor([ids[low : low + step]], device=model.device) for low in range(0, len(ids), step)]
        found.append(torch.cat([needle.logits(model, row, fed)[0].float() for row in rows]))
    return found
