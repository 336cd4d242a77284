"""Measure a :class:`dkv.HeadProfile`: which kv heads go back to earlier copies, and what each needs stored."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dkv import sensitivity
from dkv._checks import check_count
from dkv.integrations.transformers import FULL_ATTENTION, attending, attention_forward, layer_kinds, model_shape
from dkv.kernels.torch.decode import capped, softmax_with_sink
from dkv.models import max_context
from dkv.profile import HeadProfile, shipped_text

NAME = "dkv_profile"
Probe = Callable[[int, Tensor, Tensor, Any, Any, Any], None]  # layer, q, k, sm_scale, softcap, sink
_PROBE: ContextVar[Probe] = ContextVar("dkv_probe")
SHIPPED_TEXT = "Alice's Adventures in Wonderland, Lewis Carroll, 1865, chapters I to V (ships with dkv)"


def measure_profile(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | None = None,
    *,
    name: str | None = None,
    text_name: str | None = None,
    passages: int = 2,
    passage_tokens: int = 1400,
    repeat_tokens: int = 200,
    distances: Sequence[int] = (300, 700, 1300),
    blocks: int = 8,
    samples: int = 6,
    seed: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> HeadProfile:
    """Read passages of a text whose part comes again, and score every kv head by :func:`copy_mass`.

    A forward pass reads ``passage_tokens`` tokens and then ``repeat_tokens`` of them again, those that begin
    ``distance`` tokens before the end of the passage; there is one pass per passage and distance, and a head's score is
    the mean over them. Then every passage, longer now, prices what coarser storage of each head costs
    (:mod:`dkv.sensitivity`). The passages are stretches of the text spread over its length. Layers that keep no full
    cache (sliding windows, for one) are not measured: their numbers are 0. Model, text and
    settings alone decide the result.

    Parameters
    ----------
    model : causal language model of transformers
        It attends as before when this returns, also after an error.
    tokenizer
    text : str, optional
        The excerpt that ships with dkv when None.
    name, text_name : str, optional
        What the profile says of the model and the text.
    passages, passage_tokens, repeat_tokens : int
    distances : sequence of int
        Each between ``repeat_tokens`` and ``passage_tokens``.
    blocks : int
        Blocks of 256 tokens that are stored coarsely to price it.
    samples : int
        Labels drawn per token to price with: more are less noisy and take longer.
    seed : int
        Of those labels.
    progress : callable
        Told what is being done.

    Returns
    -------
    HeadProfile
        Numbers are rounded: scores to six decimals, the others to four digits.

    Raises
    ------
    ValueError
        When the text is too short, which says how many tokens are needed; when settings or the model do not fit.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__qualname__}")
    for label, value in (
        ("passages", passages),
        ("passage_tokens", passage_tokens),
        ("repeat_tokens", repeat_tokens),
        ("blocks", blocks),
        ("samples", samples),
    ):
        check_count(label, value, 1)
    distances = tuple(distances)
    if not distances or not all(type(far) is int and repeat_tokens <= far <= passage_tokens for far in distances):
        raise ValueError(f"distances must be {repeat_tokens}..{passage_tokens} tokens, got {list(distances)}")
    limit = max_context(model)
    if limit is not None and 1 + passage_tokens + repeat_tokens > limit:
        raise ValueError(f"passage_tokens + repeat_tokens must be below {limit}, the model's context")
    priced = sensitivity.passage_tokens(blocks) + sensitivity.LENGTH
    if limit is not None and 1 + priced > limit:
        raise ValueError(f"blocks={blocks} take {priced} tokens, they must be below {limit}, the model's context")
    if text is None:
        text, text_name = shipped_text(), SHIPPED_TEXT
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    opening = _opening(tokenizer)
    longest = max(passage_tokens, priced)
    needed = passages * longest
    if len(ids) < needed:
        raise ValueError(f"text has {len(ids)} tokens, {needed} are needed: {passages} passages of {longest}")
    layers, heads, dim = model_shape(model.config)
    total = torch.zeros(layers, heads, dtype=torch.float64)
    prices = sensitivity.Sensitivity.zeros(layers, heads, dim)
    for index in range(passages):
        first = index * (len(ids) - longest) // max(1, passages - 1)
        passage = ids[first : first + passage_tokens]
        for distance in distances:
            progress(f"passage {index + 1} of {passages}, repeat after {distance} tokens")
            total += repeat_scores(model, opening + passage, len(opening) + passage_tokens - distance, repeat_tokens)
        found = sensitivity.measure(
            model,
            opening + ids[first : first + priced - len(opening)],
            samples,
            seed + 3 * index,
            progress=lambda what: progress(f"passage {index + 1} of {passages}, prices: {what}"),  # noqa: B023
        )
        prices.add(found, 1 / passages)
    scores = (total / (passages * len(distances))).clamp(0, 1)
    return HeadProfile(
        model=name or os.path.basename(model.config.name_or_path.rstrip("/")) or type(model).__name__,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        scores=tuple(tuple(round(score, 6) for score in layer) for layer in scores.tolist()),
        key_options=sensitivity.KEY_OPTIONS,
        value_options=sensitivity.VALUE_OPTIONS,
        key_loss=_rounded(prices.key_loss),
        value_loss=_rounded(prices.value_loss),
        drop_loss=_rounded(prices.drop_loss),
        channel_weight=_rounded(prices.channel_weight),
        text=text_name or "a text of the caller's",
        settings={
            "passages": passages,
            "passage_tokens": passage_tokens,
            "repeat_tokens": repeat_tokens,
            "distances": distances,
            "blocks": blocks,
            "samples": samples,
            "seed": seed,
            "text_tokens": len(ids),
        },
    )


def _rounded(x: Tensor) -> Any:
    """Nested tuples of four digits each."""

    def each(value: Any) -> Any:
        return tuple(each(item) for item in value) if isinstance(value, list) else float(f"{value:.4g}")

    return each(x.tolist())


def _opening(tokenizer: Any) -> list[int]:
    """The token that the tokenizer puts before a text, if it puts one."""
    with_special = list(tokenizer("x", verbose=False).input_ids)
    return with_special[:1] if with_special[:1] == [tokenizer.bos_token_id] else []


def copy_mass(
    q: Tensor, k: Tensor, copy: slice, sm_scale: float, softcap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """The score of a layer's kv heads ``[Hkv]``: attention that goes to the rows ``copy``.

    The mean over the queries ``q [Hq, n, D]``, which stand at the newest ``n`` of the rows ``k [Hkv, N, D]``, and the
    largest of the query heads that read a kv head. ``sink [Hq]`` takes its share of the attention, as in the model.
    """
    heads_kv, rows, _ = k.shape
    length = q.shape[1]
    seen = torch.ones(length, rows, dtype=torch.bool, device=q.device).tril(rows - length)
    masses = []
    for head, queries in enumerate(q.unflatten(0, (heads_kv, -1)).float()):  # [G, n, D], one kv head at a time
        logits = capped(queries @ k[head].float().T * sm_scale, softcap)
        extra = None if sink is None else sink.view(heads_kv, -1, 1, 1)[head]
        weight, _ = softmax_with_sink(torch.where(seen, logits, -torch.inf), extra)
        masses.append(weight[:, :, copy].sum(-1).mean(-1).max())
    return torch.stack(masses)


def repeat_scores(model: PreTrainedModel, passage: Sequence[int], start: int, length: int) -> Tensor:
    """:func:`copy_mass` ``[layers, Hkv]`` of a pass over ``passage`` and ``length`` of its tokens from ``start``."""
    kinds, _ = layer_kinds(model.config)
    copy = slice(start, start + length)
    found: dict[int, Tensor] = {}

    def probe(layer: int, q: Tensor, k: Tensor, scaling: float | None, softcap: float | None, sink: Any) -> None:
        if kinds[layer] == FULL_ATTENTION:
            scale = q.shape[-1] ** -0.5 if scaling is None else scaling
            found[layer] = copy_mass(q[0, :, -length:], k[0], copy, scale, softcap, sink).cpu()

    ids = torch.tensor([[*passage, *passage[copy]]], device=model.device)
    with torch.inference_mode(), probed(model, probe):
        model(ids, use_cache=False, logits_to_keep=1)
    scores = torch.zeros(model_shape(model.config)[:2], dtype=torch.float64)
    wanted = {layer for layer, kind in enumerate(kinds) if kind == FULL_ATTENTION}
    if set(found) != wanted or any(score.shape != scores[0].shape for score in found.values()):
        raise ValueError(
            f"{len(wanted)} layers of {scores.shape[1]} kv heads were expected to attend through transformers' "
            f"interface, got {[score.shape[0] for score in found.values()]}"
        )
    for layer, score in found.items():
        scores[layer] = score.double()
    if not bool(scores.isfinite().all()):
        raise ValueError("the model's attention is not finite on this text; try another dtype")
    return scores


@contextlib.contextmanager
def probed(model: PreTrainedModel, probe: Probe) -> Iterator[None]:
    """``model`` attends densely and tells ``probe`` inside the block, and attends as before after it."""
    token = _PROBE.set(probe)
    try:
        with attending(model, NAME, _attention):
            yield
    finally:
        _PROBE.reset(token)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **options: Any
) -> Any:
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int):
        _PROBE.get()(layer, query, key, options.get("scaling"), options.get("softcap"), options.get("s_aux"))
    return attention_forward(module, query, key, value, mask, *args, **options)
