"""DKV in any decoder language model of transformers.

``attach(model, config)`` registers the attention function and its mask function, so that causality and padding survive;
``DKVCache`` goes where any ``transformers.Cache`` goes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dkv._checks import check_format
from dkv.cache import LayerCache
from dkv.cache.files import load_cache, save_cache
from dkv.compress import RefusedBlock
from dkv.config import DKVConfig, HeadGroup
from dkv.kernels.torch.decode import capped, softmax_with_sink

NAME = "dkv"
FULL_ATTENTION = "full_attention"


class _SeenLength(int):
    """A key length that a DKV layer reported: the mask function then keeps the padding mask, not a square one."""


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
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` back the attention it had before :func:`attach`."""
    if getattr(model, "_dkv_config", None) is not None:
        model.set_attn_implementation(model._dkv_before)
        del model._dkv_config, model._dkv_before
    return model


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
    kinds, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
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
    ) -> None:
        super().__init__()
        self.state = LayerCache(config, groups, selects)
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
        return _SeenLength(self.state.offset + query_length), 0

    def get_seq_length(self) -> int:
        return self.state.offset

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()
        self._pending = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int):
            raise TypeError(f"tokens_to_remove must be an int, got {tokens_to_remove!r}")
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, as in transformers, got {tokens_to_remove}")
        self.state.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state.batch_size:
            self.state.select(torch.arange(self.state.batch_size)[torch.as_tensor(indices).cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state.select(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("a DKVCache does not offload its layers")

    prefetch = offload


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
        text = model_config.get_text_config(decoder=True)
        super().__init__(
            layers=[
                DKVLayer(config, lambda: text._attn_implementation, own, selecting)
                if kind == FULL_ATTENTION
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
                for kind, kwargs, own, selecting in zip(kinds, settings, groups, selects, strict=True)
            ]
        )
        self.config = config
        # a function: a deep copy keeps the config
        self._heads_of = lambda other: (_head_groups(other, model_config), _selecting_heads(other, model_config))
        self.kv_shape = model_shape(model_config)[1:]  # what a loaded file must hold

    def configure(self, config: DKVConfig) -> None:
        """Go on with other settings; those of the codec may differ only while no block is closed."""
        heads = list(zip(*self._heads_of(config), strict=True))
        pairs = [(layer.state, own) for layer, own in zip(self.layers, heads) if isinstance(layer, DKVLayer)]
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
        """As in transformers; refuses a step whose layers have not all seen the same tokens."""
        layer = self.layers[layer_idx]
        if isinstance(layer, DKVLayer):
            own = [other for other in self.layers if isinstance(other, DKVLayer)]
            if layer is own[0]:
                in_step = len({other.state.offset for other in own}) == 1 and not any(other.pending for other in own)
            else:
                in_step = own[0].state.offset == layer.state.offset + key_states.shape[2]
            if not in_step:
                raise RuntimeError(
                    "the layers of this DKVCache have seen different tokens, as after an interrupted step: "
                    "reset() it, or go on from a copy made before"
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def batch_size(self) -> int:
        return self.dkv_layers[0].batch_size or -1

    def compress(self, window: int | None = None) -> None:
        """Close every full block that leaves at least ``window`` newest tokens exact (default: the config's window)."""
        for layer in self.dkv_layers:
            layer.close(self.config.window if window is None else window)

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers; refuses before any layer changes when a layer cannot give back what it would have to."""
        for layer in self.layers:
            trial = copy.copy(layer)
            if isinstance(trial, DKVLayer):
                trial.state = copy.copy(trial.state)
            trial.crop(tokens_to_remove)  # crop only rebinds, so the layer itself stays as it is
        super().crop(tokens_to_remove)

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
    def _other_nbytes(self) -> int:
        others = [layer for layer in self.layers if not isinstance(layer, DKVLayer)]
        held = [part for layer in others for part in (getattr(layer, "keys", None), getattr(layer, "values", None))]
        return sum(part.nbytes for part in held if part is not None)

    def save(self, path: str) -> None:
        """Write the cache to a versioned safetensors file, through a temporary file and an atomic rename."""
        save_cache(self, path)

    def load(self, path: str, device: str | torch.device = "cpu") -> DKVCache:
        """Fill this cache from a file; layers, shapes and config must be this cache's. Returns itself.

        Raises
        ------
        ValueError
            Names the field that differs; nothing was loaded then.
        """
        load_cache(self, path, device)
        return self


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask ``[B, kv_length]`` for a DKV layer (None without padding), transformers' own for any other."""
    if not isinstance(kv_length, _SeenLength):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    if not allow_is_causal_skip:
        raise NotImplementedError("DKVCache attends causally; this model asked for another mask pattern")
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] < kv_length:
        raise ValueError(f"attention_mask must cover {int(kv_length)} positions, got {attention_mask.shape[-1]}")
    mask = attention_mask[:, :kv_length].bool()
    return None if bool(mask.all()) else mask


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
    k, v = layer.take()
    padding = _padding(attention_mask, layer.state, query.shape[2])
    try:
        out = layer.state.attend(query, k, v, padding=padding, sm_scale=scaling, softcap=softcap, sink=s_aux)
    except RefusedBlock as error:
        raise ValueError(f"layer {module.layer_idx}: {error}") from error
    return out.transpose(1, 2).contiguous(), None


def _padding(mask: Tensor | None, state: LayerCache, length: int) -> Tensor | None:
    """The chunk's columns of the padding mask, ``[B, length]``.

    A prepared 4-D mask must be causal with padding; no mask may hide or show a stored position other than it was.
    """
    if mask is None:
        return None
    offset = state.offset
    if mask.ndim == 4:
        keep = _kept(mask)
        if keep.shape[1:] != (1, length, offset + length):
            raise ValueError(f"attention_mask must be [B, 1, {length}, {offset + length}], got {list(mask.shape)}")
        keep = keep[:, 0]
        new = keep[:, :, offset:].diagonal(dim1=1, dim2=2)  # a real position sees itself
        past = (keep[:, :, :offset] & new[:, :, None]).any(1)
        if not bool(new.any(1).all()):  # a sequence of padding alone tells nothing of its past
            past = torch.where(new.any(1, keepdim=True), past, True if state.real is None else state.real)
        mask = torch.cat([past, new], dim=1)
        causal = torch.ones(length, offset + length, dtype=torch.bool, device=mask.device).tril(offset)
        if bool(((keep != (causal & mask[:, None])) & new[:, :, None]).any()):
            raise NotImplementedError("DKVCache takes causal masks with padding only; this 4-D mask is another pattern")
    stored = mask[:, :offset]
    if not bool((stored if state.real is None else stored == state.real).all()):
        raise NotImplementedError("attention_mask differs from the padding these positions were stored with")
    return mask[:, offset : offset + length]


def _kept(mask: Tensor) -> Tensor:
    """An additive mask (0 keeps, the dtype's minimum or -inf drops) or a boolean one as booleans, True keeps."""
    if mask.dtype == torch.bool:
        return mask
    dropped = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((dropped | (mask == 0)).all()):
        raise NotImplementedError("DKVCache takes masks that keep or drop; this one adds a bias to the logits")
    return ~dropped


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
