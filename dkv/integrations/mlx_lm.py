"""DKV in the models of mlx-lm: caches that go wherever a list of its prompt caches goes.

``make_prompt_cache(model, config)`` hooks the model's attention and gives one cache per layer, for ``generate``,
``stream_generate``, ``batch_generate`` and a model's own call. Importing this module also lets mlx-lm's
``load_prompt_cache`` find the classes, which it looks up by name in ``mlx_lm.models.cache``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache

from dkv._checks import check_count, check_format, dtype_name, whole_number
from dkv.cache.mlx_layer import LayerCache, Spans, joined
from dkv.config import DKVConfig, HeadGroup
from dkv.integrations import _mlx_hook as hook
from dkv.integrations._mlx_files import load_prompt_cache, save_prompt_cache
from dkv.integrations._mlx_masks import causal_mask, says_causal
from dkv.integrations._mlx_state import layer_of, state_of

PROBE_TOKENS = 2


class DKVCache(mlx_cache._BaseCache):
    """One full-attention layer's cache: sink tokens and a recency window exact, all between in compressed blocks.

    It follows mlx-lm's contract of caches, for one sequence or a batch of equally long ones; :class:`BatchDKVCache`
    holds sequences of any lengths.

    Parameters
    ----------
    config : DKVConfig
    groups : sequence of HeadGroup, optional
        What ``config.head_groups`` gives for this layer; needed where the config splits the heads.
    selects : sequence of bool, optional
        What ``config.prefill_heads`` gives for this layer; needed where the config has a ``prefill_share``.
    """

    def __init__(
        self, config: DKVConfig, groups: Sequence[HeadGroup] | None = None, selects: Sequence[bool] | None = None
    ) -> None:
        self._take(LayerCache(config, groups, selects))

    def _take(self, layer: LayerCache) -> None:
        self.layer = layer
        self._may_rewind = False  # whether the newest chunk can be taken back although blocks are closed
        self._awaited: tuple[int, Spans | None] | None = None  # a chunk's tokens, stored and not attended yet

    # appending and attending

    @property
    def offset(self) -> Any:
        """Tokens seen: the position of the next one."""
        return self.layer.tokens[0] if self.layer.tokens else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store a chunk's rows; what is returned is for the hooked attention function alone."""
        if not hook.hooked:
            raise RuntimeError("no model attends through dkv: call dkv.integrations.mlx_lm.attach(model) first")
        self._check_settled()
        length = keys.shape[2]
        spans = self._spans(length)
        self.layer.append(keys, values, spans)
        self._pass(length, spans)
        self._awaited = (length, spans)
        rows = max(self.layer.tokens)
        return tuple(hook.DKVRows(self, (*part.shape[:2], rows, part.shape[3]), part.dtype) for part in (keys, values))  # type: ignore[return-value]

    def _check_settled(self) -> None:
        if self._awaited is not None:
            raise RuntimeError(
                "a DKV cache was given keys that were never attended, as after an interrupted step: "
                "go on from a copy made before, or from a new cache"
            )

    def _spans(self, length: int) -> Spans | None:
        return None

    def _pass(self, length: int, spans: Spans | None) -> None:
        """The padding of a stored chunk lies behind."""

    def attend(self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None) -> mx.array:
        """What the attention function gives for the chunk that was stored last."""
        if self._awaited is None or queries.shape[2] != self._awaited[0]:
            raise RuntimeError("a DKV cache attends each chunk of keys once, with as many queries")
        self._check_mask(mask, queries.shape[2])
        spans = self._awaited[1]
        out = self.layer.attend(queries, spans, scale, sinks)
        self._awaited, self._may_rewind = None, self.layer.rewinds
        return out

    def _check_mask(self, mask: mx.array | str | None, length: int) -> None:
        """Attention is causal, whatever the mask says; so it must say that."""
        if (mask is None and length == 1) or (isinstance(mask, str) and mask == "causal"):
            return
        assert self._awaited is not None
        spans = self._awaited[1] or [(0, length)] * self.layer.batch_size
        before = [tokens - count for tokens, (_, count) in zip(self.layer.tokens, spans, strict=True)]
        if not isinstance(mask, mx.array) or not says_causal(mask, before, spans, length):
            raise NotImplementedError("a DKV cache attends causally; this model gave its attention another mask")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """mlx-lm's causal mask; ``window_size`` is refused, as a sliding window needs no compressed cache."""
        if window_size is not None:
            raise NotImplementedError(f"a full-attention layer asked for a sliding window of {window_size} tokens")
        return mlx_cache.create_attention_mask(N, self.offset, return_array, None)

    # what it holds

    def size(self) -> int:
        return max(self.layer.tokens, default=0)

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True  # hosts ask whether there is a cache, not whether it holds anything

    def empty(self) -> bool:
        return self.layer.k_rows is None

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, spare room included."""
        return self.layer.nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes of dense K and V of the same tokens in the same dtype."""
        return self.layer.dense_nbytes

    @property
    def compressed_nbytes(self) -> int:
        """Bytes of the closed blocks."""
        return self.layer.compressed_nbytes

    @property
    def compressed_dense_nbytes(self) -> int:
        """Bytes of the dense rows that the closed blocks stand for."""
        return self.layer.compressed_dense_nbytes

    @property
    def dropped_tokens(self) -> list[int]:
        """Tokens of each sequence whose blocks have left for good, by the config's ``when_full``."""
        return self.layer.dropped_tokens

    @property
    def state(self) -> dict[str, mx.array]:
        """Every array held, and a header: all that a file needs to go on from."""
        self._check_settled()
        return state_of(self.layer)

    @state.setter
    def state(self, state: Any) -> None:
        self._take(closed(layer_of(state)))

    @property
    def meta_state(self) -> str:
        """Nothing: the state says all. mlx-lm before 0.32 saves this beside it."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        if value:
            raise ValueError(f"meta_state of a DKV cache must be empty, got {value!r:.60}")

    # surgery

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be trimmed: while no block is closed.

        A host that drafts tokens asks this first, and then once after every chunk, to take rejected ones back; a no
        would make it go on with them. So from the first yes on the newest chunk can be taken back, as what it makes due
        closes only when the next one comes, and the first answer after a chunk stays yes. A copy was never asked.
        """
        if not any(self.layer.block_counts):
            self.layer.rewinds = True
            return True
        answer, self._may_rewind = self._may_rewind, False
        return answer

    def __deepcopy__(self, memo: dict[int, Any]) -> DKVCache:
        twin: DKVCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        twin.layer.rewinds = twin._may_rewind = False
        return twin

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens; how many were forgotten.

        Raises
        ------
        ValueError
            When one of them lies in a closed block. Nothing was changed then.
        """
        n = whole_number("n", n)
        check_count("n", n)
        return self.layer.crop(n)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise NotImplementedError("a DKV cache is compressed already: leave kv_bits unset")

    @classmethod
    def merge(cls, caches: Sequence[DKVCache]) -> BatchDKVCache:
        """One batch of several single sequences."""
        if not caches:
            raise ValueError("caches to merge must be one or more, got none")
        layers = []
        for cache in caches:
            if not isinstance(cache, DKVCache) or cache.layer.batch_size > 1:
                raise ValueError(f"caches to merge must be DKV caches of one sequence, got {cache!r:.80}")
            cache._check_settled()
            layers.append(_copied(cache.layer, [0]))
        batch = BatchDKVCache.__new__(BatchDKVCache)
        batch._take(joined(layers))
        return batch


class BatchDKVCache(DKVCache):
    """A layer's cache of sequences of different lengths. Padding is never stored: no neighbour changes a sequence.

    Parameters
    ----------
    config, groups, selects
        As :class:`DKVCache`.
    batch_size : int
    """

    def __init__(
        self,
        config: DKVConfig,
        groups: Sequence[HeadGroup] | None = None,
        batch_size: int = 1,
        selects: Sequence[bool] | None = None,
    ) -> None:
        check_count("batch_size", batch_size, 1)
        layer = LayerCache(config, groups, selects)
        layer.reset(batch_size)
        self._take(layer)

    def _take(self, layer: LayerCache) -> None:
        super()._take(layer)
        self._left = [0] * layer.batch_size  # padding that comes first
        self._real: list[int] | None = None  # real tokens that come before padding

    @property
    def state(self) -> dict[str, mx.array]:
        """As of :class:`DKVCache`, and the padding that is still to come, where there is any."""
        self._check_settled()
        coming = {"left_padding": self._left if any(self._left) else None, "lengths": self._real}
        return state_of(self.layer) | {name: mx.array(each) for name, each in coming.items() if each is not None}

    @state.setter
    def state(self, state: Any) -> None:
        parts = dict(state) if isinstance(state, dict) else state
        coming = [parts.pop(name, None) if isinstance(parts, dict) else None for name in ("left_padding", "lengths")]
        layer = closed(layer_of(parts))
        for each in coming:
            if each is not None and (each.dtype != mx.int32 or each.shape != (layer.batch_size,)):
                raise ValueError(
                    f"padding in the state must be int32 [{layer.batch_size}], got {each.dtype} {each.shape}"
                )
        self._take(layer)
        self._left = self._left if coming[0] is None else coming[0].tolist()
        self._real = None if coming[1] is None else coming[1].tolist()

    @property
    def offset(self) -> mx.array:
        """Tokens seen by each sequence, less the padding that is still to come before its first; ``[B]``."""
        return mx.array([token - left for token, left in zip(self.layer.tokens, self._left, strict=True)])

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say where the padding of the chunks to come lies; ``lengths`` are the real tokens before right padding."""
        batch = self.layer.batch_size
        for name, values in (("left_padding", left_padding), ("lengths", lengths), ("right_padding", right_padding)):
            if values is not None and (len(values) != batch or min(values) < 0):
                raise ValueError(f"{name} must be {batch} numbers of 0 or more, got {list(values)}")
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left_padding can only come before the first token of a batch")
            self._left = [a + int(b) for a, b in zip(self._left, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right_padding needs lengths, the real tokens of each sequence")
            self._real = [int(length) for length in lengths]

    def finalize(self) -> None:
        """The right padding has passed."""
        self._real = None

    def _spans(self, length: int) -> Spans | None:
        firsts = [min(left, length) for left in self._left]
        reals = [length] * len(firsts) if self._real is None else self._real
        spans = [(first, min(length - first, real)) for first, real in zip(firsts, reals, strict=True)]
        return None if all(span == (0, length) for span in spans) else spans

    def _pass(self, length: int, spans: Spans | None) -> None:
        spans = [(0, length)] * len(self._left) if spans is None else spans
        self._left = [left - first for left, (first, _) in zip(self._left, spans, strict=True)]
        if self._real is not None:
            self._real = [real - count for real, (_, count) in zip(self._real, spans, strict=True)]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """An array, where asked for, has every sequence's tokens, right-justified, and the chunk after them."""
        if window_size is not None:
            raise NotImplementedError(f"a full-attention layer asked for a sliding window of {window_size} tokens")
        if not return_array:
            return "causal" if N > 1 else None
        spans = [(min(left, N), N - min(left, N)) for left in self._left]
        return causal_mask(self.layer.tokens, spans, N, self.size() + N)

    def filter(self, batch_indices: Any) -> None:
        """Keep the sequences of these indices, in place."""
        indices = batch_indices.tolist() if hasattr(batch_indices, "tolist") else batch_indices
        keep = [whole_number("batch_indices", index) for index in indices]
        self.layer.select(keep)
        self._left = [self._left[index] for index in keep]
        if self._real is not None:
            self._real = [self._real[index] for index in keep]

    def extend(self, other: BatchDKVCache) -> None:
        """Add the sequences of another batch behind these, in place."""
        if not isinstance(other, BatchDKVCache):
            raise TypeError(f"other must be a BatchDKVCache, got {type(other).__qualname__}")
        if self._real is not None or other._real is not None:
            raise RuntimeError("finalize() a batch with right padding before it is extended")
        self.layer = joined([self.layer, other.layer])
        self._left = self._left + other._left

    def extract(self, idx: int) -> DKVCache:
        """One sequence on its own."""
        self._check_settled()
        single = DKVCache.__new__(DKVCache)
        single._take(_copied(self.layer, [idx]))
        return single

    @classmethod
    def merge(cls, caches: Sequence[DKVCache]) -> BatchDKVCache:
        return DKVCache.merge(caches)


def closed(layer: LayerCache) -> LayerCache:
    """The layer, with what was due closed, as where its state was taken in the midst of drafts."""
    layer.close(layer.config.window)
    return layer


def _copied(layer: LayerCache, index: Sequence[int]) -> LayerCache:
    """A cache of the sequences of ``index``, sharing nothing that changes; of a cache without any, empty ones."""
    twin = copy.copy(layer)  # every change of a layer rebinds or writes arrays of its own
    if twin.batch_size:
        twin.select(index)
    else:
        twin.reset(len(index))
    return twin


for _kind in (DKVCache, BatchDKVCache):
    setattr(mlx_cache, _kind.__name__, _kind)  # where load_prompt_cache looks classes up


def attach(model: nn.Module) -> nn.Module:
    """Make ``model`` attend through DKV wherever a DKV cache is given, and as before wherever none is.

    mlx-lm's attention function is replaced in the modules that compute the model's layers, for every model of theirs;
    with any other cache it is mlx-lm's own. :func:`make_prompt_cache` calls this; a process that only loads a saved
    cache calls it itself.

    Raises
    ------
    NotImplementedError
        When the model's attention cannot be hooked: its layers attend in another way than by mlx-lm's function.
    """
    _probed(model)
    return model


def make_prompt_cache(model: nn.Module, config: DKVConfig | None = None) -> list[Any]:
    """One cache per layer, as ``mlx_lm.models.cache.make_prompt_cache`` gives; the model is attached.

    Layers of full attention get a :class:`DKVCache`; those that mlx-lm gives a bounded cache (sliding windows, states
    of recurrent layers) keep it.

    Parameters
    ----------
    model : a model of mlx-lm
    config : DKVConfig, optional
        The default settings when None. Its profile must be of this model; its tiers group the heads of each layer.

    Raises
    ------
    ValueError
        When the model has no full-attention layer, or the config or its profile does not fit it.
    NotImplementedError
        As :func:`attach`.
    """
    config = DKVConfig() if config is None else config
    if not isinstance(config, DKVConfig):
        raise TypeError(f"config must be a DKVConfig, got {type(config).__qualname__}")
    probes = _probed(model)
    plain = dataclasses.replace(config, profile=None, tiers=(), ratio=None)
    caches: list[Any] = []
    for index, (own, probe) in enumerate(zip(mlx_cache.make_prompt_cache(model), probes, strict=True)):
        if probe is None:
            caches.append(own)
            continue
        _, heads, _, dim = probe.shape
        check_format(config, dtype_name(probe))
        if config.profile is not None:
            config.profile.check_model(len(probes), heads, dim)
        groups = config.head_groups(index, heads) if config.splits_heads else None
        selects = None if config.prefill_share in (0, 1) else config.prefill_heads(index, heads)
        caches.append(DKVCache(plain, groups, selects))
    return caches


def _probed(model: nn.Module) -> list[mx.array | None]:
    """Hook the model and try it: the key rows of each full-attention layer, never evaluated; None for other layers.

    mlx is lazy, so the trial builds a graph of two tokens and computes nothing of it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a model of mlx-lm, got {type(model).__qualname__}")
    config = DKVConfig()
    caches = [DKVCache(config) if type(own) is mlx_cache.KVCache else own for own in mlx_cache.make_prompt_cache(model)]
    if not any(isinstance(cache, DKVCache) for cache in caches):
        kinds = sorted({type(cache).__name__ for cache in caches})
        raise ValueError(f"the model has no full-attention layer to compress; its caches are {kinds}")
    refusal = f"the attention of {type(model).__module__} cannot be hooked"
    if not hook.hook(model):
        raise NotImplementedError(f"{refusal}: no layer calls mlx-lm's scaled_dot_product_attention")
    try:
        model(mx.zeros((1, PROBE_TOKENS), dtype=mx.int32), cache=caches)
    except Exception as error:
        raise NotImplementedError(f"{refusal}: {' '.join(str(error).split())[:200]}") from error
    for index, cache in enumerate(caches):
        if isinstance(cache, DKVCache) and (cache._awaited is not None or cache.offset != PROBE_TOKENS):
            raise NotImplementedError(f"{refusal}: layer {index} does not attend by mlx-lm's function")
    return [cache.layer.k_rows if isinstance(cache, DKVCache) else None for cache in caches]


__all__ = ["BatchDKVCache", "DKVCache", "attach", "load_prompt_cache", "make_prompt_cache", "save_prompt_cache"]
