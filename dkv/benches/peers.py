"""What DKV is compared with: floors that drop rows, plain quantisers, and the quantised caches of other packages.

Each sees the keys and values ``[1, Hkv, N, D]`` of the part that DKV compresses, one layer at a time, and gives the
rows that attention would see together with the bytes it stored. Its rows then stand in an ordinary dense cache, so one
attention serves every peer.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROUP = 64  # numbers that share a scale
PLAIN_BITS = (8, 4, 3, 2)
NEWEST = (2, 4, 6)  # floors keep one row in so many
KVPRESS_HINT = "kvpress: runs in an environment of its own; python -m dkv.benches.kvpress_peer --help says how"


class Stored(NamedTuple):
    """Rows ``[1, Hkv, n, D or Dv]`` of one layer as attention sees them, and the bytes that hold them."""

    k: Tensor
    v: Tensor
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Peer:
    """``store`` takes the keys and values of one layer. ``kind`` is "peer" or "floor"."""

    name: str
    kind: str
    store: Callable[[Tensor, Tensor], Stored]


class StandInLayer(DynamicLayer):
    """Dense rows of a layer. ``gap`` older positions are missing; new tokens go on where the text ended."""

    def __init__(self, k: Tensor, v: Tensor, gap: int = 0) -> None:
        super().__init__()
        self.keys, self.values, self.gap = k, v, gap
        self.dtype, self.device, self.is_initialized = k.dtype, k.device, True

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] + self.gap

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2] + query_length, self.gap  # kept rows count as the newest positions: all are visible


def stand_in(whole: Any, first: int, last: int, peer: Peer | None = None) -> tuple[Cache, int]:
    """An ordinary cache with the rows of ``whole``, all but the ``first`` and the ``last`` of them stored by ``peer``.

    Parameters
    ----------
    whole : DKVCache
        Nothing of it compressed, one sequence without padding. It is not changed.
    first, last : int
        Rows at either end that stay as they are.
    peer : Peer, optional
        Keeps every row as it is when None.

    Returns
    -------
    (Cache, int)
        The cache, and the bytes of what the peer stored.
    """
    from dkv.integrations.transformers import DKVLayer

    layers: list[Any] = []
    nbytes = 0
    for layer in whole.layers:
        if not isinstance(layer, DKVLayer):
            layers.append(copy.deepcopy(layer))
            continue
        state = layer.state
        assert state.k_rows is not None and state.v_rows is not None
        count = state.rows[0]
        k, v = state.k_rows[:, :, :count], state.v_rows[:, :, :count]
        if peer is None:
            layers.append(StandInLayer(k, v))
            continue
        stored = peer.store(k[:, :, first : count - last], v[:, :, first : count - last])
        nbytes += stored.nbytes
        new_k, new_v = (
            torch.cat([old[:, :, :first], part.to(old.dtype), old[:, :, count - last :]], dim=2)
            for old, part in ((k, stored.k), (v, stored.v))
        )
        layers.append(StandInLayer(new_k, new_v, gap=count - new_k.shape[2]))
    return Cache(layers=layers), nbytes


def branch(cache: Any) -> Any:
    """A copy that can be fed without changing ``cache``; rows of a stand-in are shared, for feeding replaces them."""
    if not any(isinstance(layer, StandInLayer) for layer in cache.layers):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    twin.layers = [
        copy.copy(layer) if isinstance(layer, StandInLayer) else copy.deepcopy(layer) for layer in cache.layers
    ]
    return twin


# floors


def floors() -> list[Peer]:
    """Nothing of the part, and its newest 1/2, 1/4 and 1/6."""
    newest = [Peer(f"keep newest 1/{share}", "floor", functools.partial(_newest, share=share)) for share in NEWEST]
    return [Peer("drop the middle", "floor", functools.partial(_newest, share=None)), *newest]


def _newest(k: Tensor, v: Tensor, share: int | None) -> Stored:
    start = k.shape[2] if share is None else k.shape[2] - k.shape[2] // share
    k, v = k[:, :, start:], v[:, :, start:]
    return Stored(k, v, 2 * (k.numel() + v.numel()))


# plain quantisers


def plain(bits: int) -> Peer:
    """Asymmetric integers between minimum and maximum: K per channel over 64 tokens, V per token and head.

    Scales and minima are float16, the codes really packed; the rows are decoded from those arrays alone.
    """
    return Peer(f"int{bits}", "peer", functools.partial(_plain, bits=bits))


def _plain(k: Tensor, v: Tensor, bits: int) -> Stored:
    if k.shape[2] % GROUP:
        raise ValueError(f"k must hold a multiple of {GROUP} rows, got {k.shape[2]}")
    grouped = k.unflatten(2, (-1, GROUP))  # [1, H, N / 64, 64, D]
    k_parts, v_parts = encode(grouped, bits, dim=3), encode(v, bits, dim=3)
    nbytes = sum(part.nbytes for part in (*k_parts, *v_parts))
    new_k = decode(*k_parts, bits=bits, shape=grouped.shape).flatten(2, 3)
    return Stored(new_k.to(k.dtype), decode(*v_parts, bits=bits, shape=v.shape).to(v.dtype), nbytes)


def encode(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes (uint8), scale and minimum (float16) of ``x``, the last two shared along ``dim``."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    top = 2**bits - 1
    scale, low = ((high - low) / top).half(), low.half()
    step = torch.where(scale > 0, scale, 1).float()
    codes = ((x - low.float()) / step).round().clamp(0, top).to(torch.uint8)
    return pack(codes, bits), scale, low


def decode(packed: Tensor, scale: Tensor, low: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """Numbers in float32 from what :func:`encode` made of an array of this shape."""
    codes = unpack(packed, bits, shape.numel()).view(shape)
    return codes.float() * scale.float() + low.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """``bits``-bit codes (uint8, any shape) one after another in a flat uint8 array, 8 codes in ``bits`` bytes."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % 8)).view(-1, 8)
    word = torch.zeros(flat.shape[0], dtype=torch.int64, device=codes.device)
    for index in range(8):
        word |= flat[:, index].long() << (bits * index)
    return torch.stack([(word >> (8 * byte)) & 255 for byte in range(bits)], dim=1).to(torch.uint8).flatten()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of :func:`pack`: ``count`` codes, flat."""
    rows = packed.view(-1, bits)
    word = torch.zeros(rows.shape[0], dtype=torch.int64, device=packed.device)
    for byte in range(bits):
        word |= rows[:, byte].long() << (8 * byte)
    codes = torch.stack([(word >> (bits * index)) & (2**bits - 1) for index in range(8)], dim=1)
    return codes.to(torch.uint8).flatten()[:count]


# other packages


def available(model: Any) -> tuple[list[Peer], list[str]]:
    """The peers that run here on ``model``, and for each package that does not a line that says why."""
    packages: dict[str, tuple[tuple[int, ...], Callable[[int], Peer]]] = {
        "HF quanto": ((4, 2), functools.partial(_transformers_peer, "quanto", model.config)),
        "HF hqq": ((4, 2), functools.partial(_transformers_peer, "hqq", model.config)),
        "mlx-lm": ((8, 4), _mlx_peer),
    }
    found, skipped = [plain(bits) for bits in PLAIN_BITS], []
    sample = torch.randn(1, 2, GROUP, _head_dim(model.config), dtype=model.dtype, device=model.device)
    for name, (widths, maker) in packages.items():
        try:
            made = [maker(bits) for bits in widths]
            for peer in made:
                peer.store(sample, sample)
        except Exception as error:  # whatever another package raises, the table goes on without it
            skipped.append(f"{name}: {' '.join(str(error).split())[:200] or type(error).__name__}")
        else:
            found += made
    return found, [*skipped, KVPRESS_HINT]


def _head_dim(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def counted(part: Tensor) -> int:
    """Bytes of an array; scales that follow the cache's dtype count 2 bytes each."""
    return part.numel() * (2 if part.is_floating_point() else part.element_size())


def _transformers_peer(backend: str, config: Any, bits: int) -> Peer:
    """The codec of transformers' ``QuantizedCache``: its own defaults, axis 1 for hqq as its documentation advises."""
    from transformers.cache_utils import QuantizedCache

    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    layer = QuantizedCache(backend, config, nbits=bits, q_group_size=GROUP, **axes).layers[0]

    def store(k: Tensor, v: Tensor) -> Stored:
        layer.lazy_initialization(k, v)
        codes = [layer._quantize(k.contiguous(), layer.axis_key), layer._quantize(v.contiguous(), layer.axis_value)]
        new_k, new_v = (layer._dequantize(each) for each in codes)
        return Stored(new_k, new_v, sum(counted(part) for each in codes for part in _arrays(backend, each)))

    return Peer(f"HF {backend} int{bits}", "peer", store)


def _arrays(backend: str, codes: Any) -> list[Tensor]:
    """Every array of one quantised tensor, the codes as they are packed."""
    if backend == "hqq":
        packed, meta = codes
        return [packed, meta["scale"], meta["zero"]]
    return [codes._data._data, codes._scale, codes._shift]


def _mlx_peer(bits: int) -> Peer:
    """The codec of mlx-lm's ``QuantizedKVCache``: ``mx.quantize`` of each row in groups of 64 channels."""
    import mlx.core as mx

    def store(k: Tensor, v: Tensor) -> Stored:
        rows, nbytes = [], 0
        for x in (k, v):
            if x.shape[-1] % GROUP:
                raise ValueError(f"takes head sizes that are multiples of {GROUP}, got {x.shape[-1]}")
            array = mx.array(x.float().cpu().numpy()).astype(getattr(mx, str(x.dtype).rpartition(".")[2]))
            packed, scale, bias = mx.quantize(array, group_size=GROUP, bits=bits)
            back = mx.dequantize(packed, scale, bias, group_size=GROUP, bits=bits).astype(mx.float32)
            rows.append(torch.from_numpy(np.array(back)).to(x.device, x.dtype))
            nbytes += int(packed.nbytes) + 2 * int(scale.size + bias.size)
        return Stored(rows[0], rows[1], nbytes)

    return Peer(f"mlx-lm int{bits}", "peer", store)
