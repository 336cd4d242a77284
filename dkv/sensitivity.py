"""What coarser storage of a kv head costs a model: second-order estimates for every head and every width.

A change ``d`` of cached keys or values changes the next-token distribution by ``KL ~ d F d / 2`` with ``F`` the Fisher
information, the mean of ``g g`` over labels drawn from the model, ``g`` the gradient of their log-probability. So a few
backward passes price every change of every head at once: ``KL ~ mean (g . d)^2 / 2``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dkv.compress import compress_blocks, reconstruct_blocks
from dkv.config import DKVConfig
from dkv.integrations.transformers import FULL_ATTENTION, attending, attention_forward, layer_kinds, model_shape
from dkv.kernels.torch.decode import capped

NAME = "dkv_sensitivity"
SINK = 256  # first tokens, exact as in a cache
WINDOW = 256  # newest tokens, exact as in a cache
BLOCK = 256
LENGTH = 128  # tokens of a continuation
COPY_START = 16  # outputs before the model can know that it copies
COPIED_FROM = (0.27, 0.66)  # of the passage
COPY_WEIGHT = 0.3  # of the repeats beside the text's own continuation
KEY_OPTIONS = (
    (8, 8, 7, 6, 5, 5, 5, 4),
    (8, 7, 6, 5, 4, 4, 3, 3),
    (6, 5, 5, 4, 4, 3, 3, 2),
    (6, 5, 4, 4, 3, 2, 2, 2),
    (5, 4, 4, 3, 2, 2, 2, 2),
    (5, 4, 3, 3, 2, 1, 1, 1),
    (4, 3, 2, 2, 2, 1, 1, 1),
    (4, 2, 2, 1, 1, 1, 1, 0),
    (3, 2, 1, 1, 1, 0, 0, 0),
)
VALUE_OPTIONS = (6, 4, 3, 2, 1)


@dataclasses.dataclass
class Sensitivity:
    """Sums over passages, float64: nats per token, and the mean square of the queries.

    Attributes
    ----------
    key_loss : Tensor [layers, Hkv, len(KEY_OPTIONS)]
    value_loss : Tensor [layers, Hkv, len(VALUE_OPTIONS)]
    drop_loss : Tensor [layers, Hkv]
        Where the head saw sink and window alone.
    channel_weight : Tensor [layers, Hkv, D]
    """

    key_loss: Tensor
    value_loss: Tensor
    drop_loss: Tensor
    channel_weight: Tensor

    @classmethod
    def zeros(cls, layers: int, heads: int, dim: int) -> Sensitivity:
        sizes = ((len(KEY_OPTIONS),), (len(VALUE_OPTIONS),), (), (dim,))
        return cls(*(torch.zeros(layers, heads, *size, dtype=torch.float64) for size in sizes))

    def add(self, other: Sensitivity, share: float) -> None:
        for field in dataclasses.fields(self):
            getattr(self, field.name).add_(getattr(other, field.name), alpha=share)


class _Tape:
    """What the attention function leaves of one continuation: perturbations, gates and queries of every layer."""

    def __init__(self, layers: set[int], middle: slice) -> None:
        self.layers, self.middle = layers, middle
        self.key: dict[int, Tensor] = {}
        self.value: dict[int, Tensor] = {}
        self.gate: dict[int, Tensor] = {}
        self.weight: dict[int, Tensor] = {}  # [Hkv, D]


_TAPE: ContextVar[_Tape | None] = ContextVar("dkv_tape", default=None)


def passage_tokens(blocks: int) -> int:
    """Tokens of a passage whose middle holds ``blocks`` blocks; the continuation comes on top."""
    return SINK + blocks * BLOCK + WINDOW


@torch.inference_mode(False)
def measure(
    model: PreTrainedModel,
    ids: Sequence[int],
    samples: int,
    seed: int,
    progress: Callable[[str], None] = lambda label: None,
) -> Sensitivity:
    """Price every option on one passage, ``ids`` followed by its continuation of ``LENGTH`` tokens.

    Three continuations are fed after the passage: the text's own, and two repeats of it. Labels are drawn ``samples``
    times for each.
    """
    kinds, _ = layer_kinds(model.config)
    full = {layer for layer, kind in enumerate(kinds) if kind == FULL_ATTENTION}
    tokens = len(ids) - LENGTH
    middle = slice(SINK, tokens - WINDOW)
    found = Sensitivity.zeros(*model_shape(model.config))
    starts = [tokens, *(int(share * tokens) for share in COPIED_FROM)]
    shares = [1.0, *[COPY_WEIGHT / len(COPIED_FROM)] * len(COPIED_FROM)]
    with _attending(model):
        progress("reading")
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            _forward(model, torch.tensor([list(ids[:tokens])], device=model.device), cache, logits_to_keep=1)
        gradients = []
        for index, start in enumerate(starts):
            progress(f"continuation {index + 1} of {len(starts)}")
            tape = _Tape(full, middle)
            chunk = torch.tensor([list(ids[start : start + LENGTH])], device=model.device)
            first = COPY_START if index else 0
            gradients.append(_gradients(model, chunk, copy.deepcopy(cache), tape, first, samples, seed + index))
            for layer, weight in tape.weight.items():
                found.channel_weight[layer] += weight.double().cpu() / len(starts)
    for layer in sorted(full):
        progress(f"layer {layer + 1} of {len(kinds)}")
        stored = cache.layers[layer]
        k, v = (part[:, :, middle].float() for part in (stored.keys, stored.values))
        weight = found.channel_weight[layer].to(k.device)
        for number in range(max(len(KEY_OPTIONS), len(VALUE_OPTIONS))):
            key_bits = KEY_OPTIONS[number] if number < len(KEY_OPTIONS) else (0,) * 8
            value_bits = VALUE_OPTIONS[number] if number < len(VALUE_OPTIONS) else 0
            config = DKVConfig(block_size=BLOCK, rank=0, key_bits=key_bits, value_bits=value_bits)
            k2, v2 = reconstruct_blocks(compress_blocks(k, v, config=config, channel_weight=weight))
            for share, (keys, values, gates, count) in zip(shares, gradients):
                if number < len(KEY_OPTIONS):
                    found.key_loss[layer, :, number] += share * _price(keys[layer], (k2 - k)[0], count)
                if number < len(VALUE_OPTIONS):
                    found.value_loss[layer, :, number] += share * _price(values[layer], (v2 - v)[0], count)
                if number == 0:
                    found.drop_loss[layer] += share * gates[layer].double().square().mean(0).cpu() / (2 * count)
    return found


def _forward(model: PreTrainedModel, ids: Tensor, cache: Any, **options: Any) -> Any:
    """A pass that goes on from ``cache``; transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, use_cache=True, **{name: cache}, **options)


def _price(gradients: Tensor, change: Tensor, count: int) -> Tensor:
    """KL per token and head, from gradients ``[samples, Hkv, n, D]`` and a change ``[Hkv, n, D]``."""
    along = torch.einsum("mhnd,hnd->mh", gradients.float(), change)
    return (along.double().square().mean(0) / (2 * count)).cpu()


def _gradients(
    model: PreTrainedModel, chunk: Tensor, cache: Any, tape: _Tape, first: int, samples: int, seed: int
) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor], int]:
    """Gradients of drawn log-probabilities by layer, ``[samples, Hkv, n, D]`` twice and ``[samples, Hkv]``."""
    token = _TAPE.set(tape)
    try:
        with torch.enable_grad():
            logits = _forward(model, chunk, cache).logits[0, first:].float()
    finally:
        _TAPE.reset(token)
    log_p = logits.log_softmax(-1)
    drawn = torch.Generator().manual_seed(seed)
    layers = sorted(tape.layers)
    leaves = [part[layer] for part in (tape.key, tape.value, tape.gate) for layer in layers]
    found: list[list[Tensor]] = []
    for index in range(samples):
        labels = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=drawn).to(log_p.device)
        score = log_p.gather(-1, labels).sum()
        found.append(list(torch.autograd.grad(score, leaves, retain_graph=index < samples - 1)))
    stacked = [torch.stack(each) for each in zip(*found)]
    n = len(layers)
    parts = [dict(zip(layers, stacked[i * n : (i + 1) * n])) for i in range(3)]
    return parts[0], parts[1], parts[2], log_p.shape[0]


@contextlib.contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """``model`` attends through this module inside the block, without gradients of its own weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        with attending(model, NAME, _attention):
            yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **options: Any
) -> Any:
    tape = _TAPE.get()
    layer = getattr(module, "layer_idx", None)
    if tape is None or layer not in tape.layers:
        return attention_forward(module, query, key, value, mask, *args, **options)
    heads, rows, dim = key.shape[1:]
    length, middle = query.shape[2], tape.middle
    q = query[0].unflatten(0, (heads, -1)).float()  # [Hkv, G, n, D]
    tape.weight[layer] = q.detach().square().mean((1, 2))
    size = middle.stop - middle.start
    tape.key[layer] = q.new_zeros(heads, size, dim, requires_grad=True)
    tape.value[layer] = q.new_zeros(heads, size, value.shape[3], requires_grad=True)
    tape.gate[layer] = q.new_zeros(heads, requires_grad=True)
    after = (0, 0, middle.start, rows - middle.stop)
    k = key[0].float() + torch.nn.functional.pad(tape.key[layer], after)
    v = value[0].float() + torch.nn.functional.pad(tape.value[layer], after)
    scale = options.get("scaling") or dim**-0.5
    logits = capped((q * scale) @ k[:, None].mT, options.get("softcap"))
    hidden = torch.ones(length, rows, dtype=torch.bool, device=q.device).triu(rows - length + 1)
    logits = logits + torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(hidden, -torch.inf)
    sink = options.get("s_aux")
    extra = None if sink is None else sink.float().view(heads, -1, 1, 1).expand(*logits.shape[:3], 1)
    whole = _weights(logits, extra) @ v[:, None]
    with torch.no_grad():  # an open gate passes no gradient to what lies behind it
        near = torch.cat([logits[..., : middle.start], logits[..., middle.stop :]], dim=-1)
        local = _weights(near, extra) @ torch.cat([v[:, : middle.start], v[:, middle.stop :]], dim=1)[:, None]
        shut = local - whole
    out = whole + tape.gate[layer][:, None, None, None] * shut  # the gate's gradient prices its being shut
    return out.flatten(0, 1)[None].transpose(1, 2).to(query.dtype).contiguous(), None


def _weights(logits: Tensor, sink: Tensor | None) -> Tensor:
    return logits.softmax(-1) if sink is None else torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
