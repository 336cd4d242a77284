"""DKV in any decoder language model of transformers.

``attach(model, config)`` registers the attention function and its mask function, so that causality and padding survive;
``DKVCache`` goes where any ``transformers.Cache`` goes.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    get_layer_types_and_kwargs,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dkv._checks import check_count, check_format
from dkv.cache import LayerCache
from dkv.cache.chunks import sequence_numbers
from dkv.cache.files import load_cache, save_cache
from dkv.cache.turns import Turn
from dkv.compress import RefusedBlock
from dkv.config import DKVConfig, HeadGroup
from dkv.integrations._guards import fit_prompt, tokens_to_drop
from dkv.integrations._masks import SeenLength, attention_mask, padding_of
from dkv.kernels.torch.decode import capped, softmax_with_sink

NAME = "dkv"
FULL_ATTENTION = "full_attention"


def attach(model: PreTrainedModel, config: DKVConfig | None = None) -> PreTrainedModel:
    """Make ``model`` attend through DKV wherever a :class:`DKVCache` is given, and as before wherever none is.

    Parameters
    ----------
    model : transformers causal language model
    config : DKVConfig, optional
        What ``DKVCache(model)`` uses.

    Returns
    -------
    The same model. ``detach`` undoes it.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__qualname__}")
    config = DKVConfig() if config is None else config
    if not isinstance(config, DKVConfig):
        raise TypeError(f"config must be a DKVConfig, got {type(config).__qualname__}")
    _head_groups(config, model.config)
    _selecting_heads(config, model.config)
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    if getattr(model, "_dkv_before", None) is None:
        before = model.config._attn_implementation
        model._dkv_before = "sdpa" if before == NAME else before  # another model attached a config that both share
    model.set_attn_implementation(NAME)
    model._dkv_config = config
    if hasattr(type(model), "generate"):
        model.generate = types.MethodType(_generate, model)  # a method, so that a deep copy has its own
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` back the attention it had before :func:`attach`."""
    if getattr(model, "_dkv_config", None) is not None:
        model.set_attn_implementation(model._dkv_before)
        del model._dkv_config, model._dkv_before
        vars(model).pop("generate", None)
    return model


def _generate(self: Any, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """As the model's class generates; a prompt that a :class:`DKVCache` has seen whole has its last token computed."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, DKVCache):
        ids = kwargs.get("input_ids") if inputs is None else inputs
        fit_prompt(cache, ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
    return type(self).generate(self, inputs, *args, **kwargs)


@contextlib.contextmanager
def attending(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """``model`` attends through ``function``, with transformers' own mask, inside the block and as before after it."""
    before = model.config._attn_implementation
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def layer_kinds(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The kind of every layer of a model, and what its cache of transformers takes."""
    text = config.get_text_config(decoder=True)
    shared = zip(getattr(text, "layer_types", None) or (), getattr(text, "kv_sharing_modes", None) or ())
    if (FULL_ATTENTION, "reuse") in shared:
        raise NotImplementedError(
            "full-attention layers of this model share keys and values, which dkv does not follow"
        )
    kinds, settings = get_layer_types_and_kwargs(text)
    if FULL_ATTENTION not in kinds:
        raise ValueError(f"the model has no full-attention layer to compress; its layers are {sorted(set(kinds))}")
    return kinds, settings


def model_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Layers, kv heads of a layer, channels of a key."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return len(layer_kinds(config)[0]), heads, dim


def _head_groups(config: DKVConfig, model_config: PreTrainedConfig) -> list[tuple[HeadGroup, ...] | None]:
    """The groups of every full-attention layer; None for other layers, and for all where the config has no tiers."""
    kinds, _ = layer_kinds(model_config)
    shape = model_shape(model_config)
    if config.profile is not None:
        config.profile.check_model(*shape)
    if not config.splits_heads:
        return [None] * len(kinds)
    return [config.head_groups(layer, shape[1]) if kind == FULL_ATTENTION else None for layer, kind in enumerate(kinds)]


def _selecting_heads(config: DKVConfig, model_config: PreTrainedConfig) -> list[tuple[bool, ...]]:
    """Which kv heads of every layer select key blocks in prefill."""
    layers, heads, _ = model_shape(model_config)
    return [config.prefill_heads(layer, heads) for layer in range(layers)]


class DKVLayer(CacheLayerMixin):
    """A full-attention layer's place in a :class:`DKVCache`."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        config: DKVConfig,
        attention_name: Callable[[], str],
        groups: Sequence[HeadGroup] | None = None,
        selects: Sequence[bool] | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__()
        self.state = LayerCache(config, groups, selects)
        self.turn = Turn() if turn is None else turn  # the cache's
        self.ends_step = False
        self._attention_name = attention_name  # a function, so that a deep copy still asks the model's own config
        self._pending: tuple[Tensor, Tensor] | None = None

    @property
    def pending(self) -> bool:
        return self._pending is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new rows to the attention function, which stores them; it finds this layer on the key."""
        if self._attention_name() != NAME:
            raise RuntimeError("the model does not attend through dkv: call attach(model, config) first")
        if self._pending is not None:
            self._pending = None
            raise RuntimeError(
                "a DKVCache layer was updated twice without attention in between: use a cache from one thread only"
            )
        self.is_initialized = True
        self._pending = (key_states, value_states)
        key = key_states.view(key_states.shape)
        key._dkv_layer = self  # type: ignore[attr-defined]
        return key, value_states

    def take(self) -> tuple[Tensor, Tensor]:
        if self._pending is None:
            raise RuntimeError(
                "a DKVCache layer was attended without new keys: use one cache from one thread at a time"
            )
        pending, self._pending = self._pending, None
        return pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = SeenLength(self.state.offset + query_length)
        length.padded = self.state.real is not None
        return length, 0

    def get_seq_length(self) -> int:
        return self.state.offset

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()
        self._pending = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        self.state.crop(tokens_to_drop(tokens_to_remove))

    @property
    def record_past(self) -> bool:
        return self.state.rewinds

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.rewinds = value

    def activate_past_recording(self) -> None:
        """As transformers asks before it drafts tokens: the newest chunk can then be cropped, whatever it makes due."""
        self.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.select(indices, mask=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state.select(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("a DKVCache does not offload its layers")

    prefetch = offload


def _shallow(layer: Any) -> Any:
    """A copy whose parts may be bound anew; recurrent layers hold theirs in dicts."""
    twin = copy.copy(layer)
    vars(twin).update({name: copy.copy(value) for name, value in vars(twin).items() if isinstance(value, dict)})
    if isinstance(twin, DKVLayer):
        twin.state = copy.copy(twin.state)
    return twin


class DKVCache(Cache):
    """A compressed KV cache: sink tokens and a recency window exact, everything between in closed blocks.

    Sliding-window and other bounded layers of a model keep the cache they always have.

    Parameters
    ----------
    model : an attached model, or a model config
        Says how many layers there are and of which kind.
    config : DKVConfig, optional
        What ``attach`` was given when None. Its profile must be of this model; its tiers group the heads of each layer.
    """

    def __init__(self, model: PreTrainedModel | PreTrainedConfig, config: DKVConfig | None = None) -> None:
        if config is None:
            config = getattr(model, "_dkv_config", None)
            if config is None:
                raise ValueError("config is needed: the model was not attached with one")
        if not isinstance(config, DKVConfig):
            raise TypeError(f"config must be a DKVConfig, got {type(config).__qualname__}")
        model_config = model.config if isinstance(model, PreTrainedModel) else model
        if not isinstance(model_config, PreTrainedConfig):
            raise TypeError(f"model must be a transformers model or config, got {type(model).__qualname__}")
        if isinstance(model, PreTrainedModel):
            check_format(config, str(model.dtype).rpartition(".")[2])
        kinds, settings = layer_kinds(model_config)
        groups, selects = _head_groups(config, model_config), _selecting_heads(config, model_config)
        self._turn = Turn()
        text = model_config.get_text_config(decoder=True)
        super().__init__(
            layers=[
                DKVLayer(config, lambda: text._attn_implementation, own, selecting, self._turn)
                if kind == FULL_ATTENTION
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
                for kind, kwargs, own, selecting in zip(kinds, settings, groups, selects, strict=True)
            ]
        )
        self._last_layer = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)][-1]
        if isinstance(self._last_layer, DKVLayer):
            self._last_layer.ends_step = True
        self.config = config
        # a function: a deep copy keeps the config
        self._heads_of = lambda other: (_head_groups(other, model_config), _selecting_heads(other, model_config))
        self.kv_shape = model_shape(model_config)[1:]  # what a loaded file must hold
        self.kv_dtype = model.dtype if isinstance(model, PreTrainedModel) else None

    def configure(self, config: DKVConfig) -> None:
        """Go on with other settings; those of the codec may differ only while no block is closed."""
        heads = list(zip(*self._heads_of(config), strict=True))
        pairs = [(layer.state, own) for layer, own in zip(self.layers, heads) if isinstance(layer, DKVLayer)]
        with self._turn.taken():
            for state, own in pairs:
                copy.copy(state).configure(config, *own)  # configure only rebinds: a refusal comes before any change
            for state, own in pairs:
                state.configure(config, *own)
            self.config = config

    @property
    def dkv_layers(self) -> list[LayerCache]:
        """The compressed layers' caches, in the model's order."""
        return [layer.state for layer in self.layers if isinstance(layer, DKVLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in transformers; refuses a step whose layers have not all seen the same tokens, or of two threads."""
        layer = self.layers[layer_idx]
        own = [other for other in self.layers if isinstance(other, DKVLayer)]
        begins = not self._turn.mine
        self._turn.take()
        with self._turn.goes_on(last=layer is self._last_layer and not isinstance(layer, DKVLayer)):
            if begins:
                self._turn.check_told(own[0].state.offset)
                if layer is not own[0]:  # it changes before a layer that may be full
                    own[0].state.check_room(key_states)
            if isinstance(layer, DKVLayer) and not self._in_step(own, layer_idx, key_states.shape[2]):
                raise RuntimeError(
                    "the layers of this DKVCache have seen different tokens, as after an interrupted step: "
                    "reset() it, or go on from a copy made before"
                )
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _in_step(self, own: Sequence[DKVLayer], layer_idx: int, length: int) -> bool:
        """Whether all layers have seen the same tokens, but for a chunk of ``length`` that has come to this one."""
        layer = self.layers[layer_idx]
        if layer is not own[0]:
            return bool(own[0].state.offset == layer.state.offset + length)
        offset = own[0].state.offset
        return all(one.state.offset == offset and not one.pending for one in own) and all(
            other.get_seq_length() == offset + (length if index < layer_idx else 0)
            for index, other in enumerate(self.layers)
            if isinstance(other, CacheLayerMixin) and not isinstance(other, DKVLayer)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._turn.tell(super().get_seq_length(layer_idx))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if not self._turn.mine:
            self._turn.check_told(self.get_query_offset(layer_idx))
        return super().get_mask_sizes(query_length, layer_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> DKVCache:
        with self._turn.taken():
            twin = copy.copy(self)
            memo[id(self)] = twin
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
            return twin

    @property
    def batch_size(self) -> int:
        return self.dkv_layers[0].batch_size or -1

    def compress(self, window: int | None = None) -> None:
        """Close every full block that leaves at least ``window`` newest tokens exact (default: the config's window)."""
        with self._turn.taken():
            for layer in self.dkv_layers:
                layer.close(self.config.window if window is None else window)

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers; refuses before any layer changes when a layer cannot give back what it would have to."""
        tokens_to_remove = -tokens_to_drop(tokens_to_remove)
        with self._turn.taken():
            if not self.is_filled:
                return
            if -tokens_to_remove >= self.get_seq_length():  # all of it: the next tokens may be of another batch
                self.reset()
                return
            for layer in self.layers:
                _shallow(layer).crop(tokens_to_remove)  # crop only rebinds, so the layer itself stays as it is
            super().crop(tokens_to_remove)

    def reset(self) -> None:
        with self._turn.taken():
            super().reset()

    @property
    def is_filled(self) -> bool:
        """Whether any token was seen."""
        return any(state.offset for state in self.dkv_layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch the sequences of ``beam_idx``, repeats allowed; nothing on an empty cache."""
        self._select(beam_idx, mask=False)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As :meth:`reorder_cache`; ``indices`` may also be a bool for every sequence."""
        self._select(indices, mask=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence in place."""
        check_count("repeats", repeats)
        self._select(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats), mask=False)

    def _select(self, index: Any, mask: bool) -> None:
        if not self.is_filled:
            return
        picked = sequence_numbers(index, self.batch_size, mask)
        with self._turn.taken():
            if len(picked):
                super().reorder_cache(picked)
            else:
                self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, spare room included."""
        return sum(layer.nbytes for layer in self.dkv_layers) + self._other_nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes of a dense cache of the same positions in the same dtype."""
        return sum(layer.dense_nbytes for layer in self.dkv_layers) + self._other_nbytes

    @property
    def compressed_nbytes(self) -> int:
        """Bytes of the closed blocks."""
        return sum(layer.compressed_nbytes for layer in self.dkv_layers)

    @property
    def compressed_dense_nbytes(self) -> int:
        """Bytes of the dense rows that the closed blocks stand for, of heads that forget them too."""
        return sum(layer.compressed_dense_nbytes for layer in self.dkv_layers)

    @property
    def dropped_tokens(self) -> list[int]:
        """Tokens of each sequence whose blocks have left for good, by the config's ``when_full``."""
        return self.dkv_layers[0].dropped_tokens

    @property
    def _other_nbytes(self) -> int:
        others = [layer for layer in self.layers if not isinstance(layer, DKVLayer)]
        held = [part for layer in others for name, part in vars(layer).items() if not name.startswith("_")]
        parts = [part for each in held for part in (each.values() if isinstance(each, dict) else [each])]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    def save(self, path: str) -> None:
        """Write the cache to a versioned safetensors file with a checksum, through an atomic rename.

        Raises
        ------
        NotImplementedError
            When a layer of the model keeps no keys and values, as recurrent ones.
        """
        other = next((layer for layer in self.layers if not isinstance(layer, (DKVLayer, DynamicLayer))), None)
        if other is not None:
            raise NotImplementedError(
                f"a cache with a {type(other).__name__} is not saved: it holds no keys and values"
            )
        with self._turn.taken():
            save_cache(self, path)

    def load(self, path: str, device: str | torch.device = "cpu") -> DKVCache:
        """Fill this cache from a file; layers, shapes, config and dtype must fit. Returns itself.

        Raises
        ------
        ValueError
            Names the file, and the field that differs or what is wrong with it; nothing was loaded then.
        """
        with self._turn.taken():
            load_cache(self, path, device)
            self.compress()  # what was due where the file was written in the midst of drafts
        return self


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that ``attach`` registers. Without a DKV layer behind ``key`` it is dense attention."""
    layer = getattr(key, "_dkv_layer", None)
    if layer is None:
        if softcap is None and s_aux is None:
            kwargs["sliding_window"] = sliding_window
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return _dense(query, key, value, attention_mask, scaling, softcap, s_aux), None
    if dropout:
        raise NotImplementedError("a DKVCache is for inference: dropout must be 0")
    if sliding_window is not None:
        raise NotImplementedError("a full-attention layer asked for a sliding window; DKVCache cannot tell which it is")
    with layer.turn.goes_on(layer.ends_step):
        k, v = layer.take()
        padding = padding_of(attention_mask, layer.state, query.shape[2])
        try:
            out = layer.state.attend(query, k, v, padding=padding, sm_scale=scaling, softcap=softcap, sink=s_aux)
        except RefusedBlock as error:
            raise ValueError(f"layer {module.layer_idx}: {error}") from error
    return out.transpose(1, 2).contiguous(), None


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Dense attention with what SDPA lacks, a soft-cap and a sink logit; ``[B, Sq, Hq, Dv]``."""
    heads_kv = key.shape[1]
    grouped = query.float().unflatten(1, (heads_kv, -1))  # [B, Hkv, G, Sq, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = capped(grouped @ key.float().unsqueeze(2).mT * scale, softcap)
    if mask is None:
        length, keys = logits.shape[-2:]
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    elif mask.dtype != torch.bool:
        logits = logits + mask[:, :, None]
        mask = mask > torch.finfo(mask.dtype).min / 2
    logits = torch.where(mask if mask.ndim == 2 else mask[:, :, None], logits, -torch.inf)
    weight, _ = softmax_with_sink(logits, None if sink is None else sink.view(heads_kv, -1, 1, 1))
    out = (weight @ value.float().unsqueeze(2)).flatten(1, 2)
    return out.to(query.dtype).transpose(1, 2).contiguous()


__all__: Sequence[str] = ["DKVCache", "DKVLayer", "attach", "detach"]
