"""Schemas, bodies and shapes of ``torch.ops.dkv.*``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import dkv
from dkv import _checks as check
from dkv.config import DKVConfig
from dkv.types import RESIDUAL_GROUP, AttentionState, BlockFormat, CompressedBlocks, code_bytes

PARTS = tuple(field.name for field in dataclasses.fields(CompressedBlocks) if field.name != "format")
_PART = {name: index for index, name in enumerate(PARTS)}
_FACTOR = {8: torch.int8, 32: torch.float32}
_BLOCKS = "Tensor?[] blocks, int[] format"
_STATE = "(Tensor, Tensor)"
_LIBRARY = torch.library.Library("dkv", "DEF")

Parts = Sequence[Tensor | None]
State = tuple[Tensor, Tensor]


def pack_format(fmt: BlockFormat) -> list[int]:
    """A format as integers: six fields, the width of values or -1, then the eight widths of keys where given."""
    plain = [fmt.block_size, fmt.rank, fmt.num_residuals, fmt.factor_bits, fmt.residual_bits, int(fmt.minmax)]
    return [*plain, -1 if fmt.value_bits is None else fmt.value_bits, *(fmt.key_bits or ())]


def unpack_format(format: Sequence[int]) -> BlockFormat:
    """The inverse of :func:`pack_format`."""
    return _format(tuple(format))


@functools.lru_cache(maxsize=256)
def _format(format: tuple[int, ...]) -> BlockFormat:
    if len(format) not in (7, 15):
        raise ValueError(f"format must hold 7 or 15 integers, as pack_format gives them, got {len(format)}")
    size, rank, residuals, factor, bits, minmax, value, *keys = format
    return BlockFormat(
        size, rank, residuals, factor, bits, tuple(keys) or None, None if value < 0 else value, bool(minmax)
    )


def pack_blocks(blocks: CompressedBlocks) -> list[Tensor | None]:
    """The parts in the order of the fields, as ``torch.ops.dkv.*`` take them."""
    return [getattr(blocks, name) for name in PARTS]


def unpack_blocks(parts: Parts, format: Sequence[int]) -> CompressedBlocks:
    """The inverse of :func:`pack_blocks` and :func:`pack_format`."""
    if len(parts) != len(PARTS):
        raise ValueError(f"blocks must hold {len(PARTS)} parts, as pack_blocks gives them, got {len(parts)}")
    _anchors(parts)
    return CompressedBlocks(unpack_format(format), *parts)


def _anchors(parts: Parts) -> tuple[Tensor, Tensor]:
    anchor_k, anchor_v = (parts[_PART[name]] if len(parts) == len(PARTS) else None for name in ("anchor_k", "anchor_v"))
    if anchor_k is None or anchor_v is None:
        raise ValueError("blocks must hold anchor_k and anchor_v")
    return anchor_k, anchor_v


def stored_parts(fmt: BlockFormat, rank: int) -> list[str]:
    """Names of the parts that ``compress_blocks`` makes for ``rank`` stored columns, in the order of the fields."""
    every, coded = fmt.keeps_every_row, not fmt.exact_rows
    absent = {"block_counts"}
    absent |= {"basis_v", "basis_v_scale", "v_gain", "residual_indices"} if every else set()
    absent |= set() if fmt.factor_bits == 8 else {"u_scale", "basis_k_scale", "basis_v_scale"}
    absent |= set() if rank else {"u_scale"}
    scales = {f"residual_{x}_{part}" for x in "kv" for part in ("scale", "min", "unit")}
    absent |= set() if coded else scales
    absent |= set() if coded and fmt.orders_channels else {"residual_k_order"}
    absent |= set() if fmt.minmax else {"k_min", "k_max"}
    return [name for name in PARTS if name not in absent]


def _op(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dkv::{name}", fake, lib=_LIBRARY)


def _new(state: State) -> State:
    return state[0].contiguous(), state[1].contiguous()


def _fake_state(q: Tensor, dim_v: int) -> State:
    shape = q.shape[:3]
    return q.new_empty((*shape, dim_v)), q.new_empty(shape, dtype=torch.float32)


def _fake_query(q: Tensor, blocks: Parts, block_indices: Tensor | None = None) -> State:
    anchor_k, anchor_v = _anchors(blocks)
    check.check_array("q", q, "B Hq Sq D", B=anchor_k.shape[0], D=anchor_k.shape[3])
    check.check_float("q", q)
    check.check_heads(q, anchor_k.shape[2])
    if block_indices is not None:
        sizes = {"B": anchor_k.shape[0], "Hkv": anchor_k.shape[2]}
        check.check_integers("block_indices", block_indices, "B Hkv W", **sizes)
    return _fake_state(q, anchor_v.shape[3])


def _config_of(fmt: BlockFormat, keep: str, dtype: torch.dtype) -> DKVConfig:
    """The config whose blocks have this format in a cache of ``dtype``."""
    half = "bf16" if dtype is torch.bfloat16 else "fp16"
    return DKVConfig(
        block_size=fmt.block_size,
        rank=fmt.rank,
        num_residuals=fmt.num_residuals,
        keep=keep,
        format={8: "compact", 16: half, 32: "fp32"}[fmt.factor_bits],
        residual_bits=fmt.residual_bits,
        key_bits=fmt.key_bits,
        value_bits=fmt.value_bits,
        router="minmax" if fmt.minmax else "lowrank",
    )


def _compress_blocks(
    k: Tensor,
    v: Tensor,
    format: Sequence[int],
    keep: str,
    token_weight: Tensor | None,
    channel_weight: Tensor | None,
    backend: str | None = None,
) -> list[Tensor]:
    config = _config_of(unpack_format(format), keep, k.dtype)
    weights = {"token_weight": token_weight, "channel_weight": channel_weight}
    blocks = dkv.compress_blocks(k, v, config=config, backend=backend, **weights)
    return [part.contiguous() for _, part in blocks.parts()]


def _fake_compress_blocks(
    k: Tensor,
    v: Tensor,
    format: Sequence[int],
    keep: str,
    token_weight: Tensor | None,
    channel_weight: Tensor | None,
    backend: str | None = None,
) -> list[Tensor]:
    fmt = unpack_format(format)
    check.check_array("k", k, "B Hkv N D")
    check.check_array("v", v, "B Hkv N Dv", B=k.shape[0], Hkv=k.shape[1], N=k.shape[2])
    heads, dim, dim_v = int(k.shape[1]), int(k.shape[3]), int(v.shape[3])
    size, kept, rank = fmt.block_size, fmt.num_residuals, fmt.stored_rank(heads, dim, dim_v)
    factor = _FACTOR.get(fmt.factor_bits, torch.bfloat16 if k.dtype is torch.bfloat16 else torch.float16)
    groups, cache, half, single = -(-kept // RESIDUAL_GROUP), k.dtype, torch.float16, torch.float32
    coded = {"k": code_bytes(fmt.key_segments(dim)), "v": code_bytes(fmt.value_segments(dim_v))}
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "anchor_k": ((heads, dim), cache),
        "anchor_v": ((heads, dim_v), cache),
        "u": ((size, rank), factor),
        "u_unit": ((), single),
        "u_scale": ((size,), half),
        "basis_k": ((heads, rank, dim), factor),
        "basis_k_scale": ((rank,), single),
        "basis_v": ((heads, rank, dim_v), factor),
        "basis_v_scale": ((rank,), single),
        "v_gain": ((), single),
        "residual_indices": ((kept,), torch.uint8),
        "residual_k_order": ((heads, dim), torch.uint8),
        "k_min": ((heads, dim), cache),
        "k_max": ((heads, dim), cache),
    }
    for x, width in (("k", dim), ("v", dim_v)):
        rows = (width, cache) if fmt.exact_rows else (coded[x], torch.uint8)
        made[f"residual_{x}"] = ((heads, kept, rows[0]), rows[1])
        made[f"residual_{x}_scale"] = made[f"residual_{x}_min"] = ((heads, groups, width), half)
        made[f"residual_{x}_unit"] = ((heads,), single)
    lead = (k.shape[0], k.shape[2] // size)
    return [k.new_empty((*lead, *made[name][0]), dtype=made[name][1]) for name in stored_parts(fmt, rank)]


_op(
    "compress_blocks(Tensor k, Tensor v, int[] format, str keep, Tensor? token_weight, Tensor? channel_weight, "
    "str? backend=None) -> Tensor[]",
    _compress_blocks,
    _fake_compress_blocks,
)


def _reconstruct_blocks(blocks: Parts, format: Sequence[int], backend: str | None = None) -> State:
    return _new(dkv.reconstruct_blocks(unpack_blocks(blocks, format), backend=backend))


def _fake_reconstruct_blocks(blocks: Parts, format: Sequence[int], backend: str | None = None) -> State:
    anchor_k, anchor_v = _anchors(blocks)
    batch, count, heads, dim = anchor_k.shape
    rows = count * unpack_format(format).block_size
    return anchor_k.new_empty((batch, heads, rows, dim)), anchor_v.new_empty((batch, heads, rows, anchor_v.shape[3]))


_op(f"reconstruct_blocks({_BLOCKS}, str? backend=None) -> {_STATE}", _reconstruct_blocks, _fake_reconstruct_blocks)


def _route_blocks(q: Tensor, blocks: Parts, format: Sequence[int], *settings: Any) -> Tensor:
    top_k, router, share, sm_scale, sink_blocks, recent_blocks, *backend = settings
    return dkv.route_blocks(
        q,
        unpack_blocks(blocks, format),
        top_k=top_k,
        router=router,
        share=share,
        sm_scale=sm_scale,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
        backend=backend[0] if backend else None,
    ).contiguous()


def _fake_route_blocks(q: Tensor, blocks: Parts, format: Sequence[int], top_k: int, *settings: Any) -> Tensor:
    _fake_query(q, blocks)
    batch, count, heads, _ = blocks[_PART["anchor_k"]].shape  # type: ignore[union-attr]
    return q.new_empty((batch, heads, torch.sym_min(top_k, count)), dtype=torch.int32)


_op(
    f"route_blocks(Tensor q, {_BLOCKS}, int top_k, str router, str share, float? sm_scale, int sink_blocks, "
    "int recent_blocks, str? backend=None) -> Tensor",
    _route_blocks,
    _fake_route_blocks,
)


def _of_blocks(name: str) -> None:
    public = getattr(dkv, name)

    def real(q, blocks, format, block_indices, sm_scale, softcap, backend=None):
        settings = {"sm_scale": sm_scale, "softcap": softcap, "backend": backend}
        return _new(public(q, unpack_blocks(blocks, format), block_indices, **settings))

    def fake(q, blocks, format, block_indices, sm_scale, softcap, backend=None):
        return _fake_query(q, blocks, block_indices)

    schema = f"{name}(Tensor q, {_BLOCKS}, Tensor block_indices, float? sm_scale, float? softcap, str? backend=None)"
    _op(f"{schema} -> {_STATE}", real, fake)


_of_blocks("lowrank_attention")
_of_blocks("residual_attention")


def _exact_attention(q, k, v, causal, seq_lens, window, softcap, sink, sm_scale, backend=None):
    settings = {"causal": causal, "seq_lens": seq_lens, "window": window, "softcap": softcap, "sink": sink}
    return _new(dkv.exact_attention(q, k, v, sm_scale=sm_scale, backend=backend, **settings))


def _fake_rows(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> State:
    check.check_rows(q, k, v)
    return _fake_state(q, v.shape[3])


_op(
    "exact_attention(Tensor q, Tensor k, Tensor v, bool causal, Tensor? seq_lens, int? window, float? softcap, "
    f"Tensor? sink, float? sm_scale, str? backend=None) -> {_STATE}",
    _exact_attention,
    _fake_rows,
)


def _prefill_attention(
    q,
    k,
    v,
    block_indices,
    prefill_key_block,
    prefill_block,
    prefill_window,
    prefill_stride,
    prefill_top_k,
    prefill_ratio,
    prefill_mass,
    softcap,
    sink,
    sm_scale,
    backend=None,
):
    config = DKVConfig(
        prefill_key_block=prefill_key_block,
        prefill_block=prefill_block,
        prefill_window=prefill_window,
        prefill_stride=prefill_stride,
        prefill_top_k=prefill_top_k,
        prefill_ratio=prefill_ratio,
        prefill_mass=prefill_mass,
    )
    settings = {"block_indices": block_indices, "softcap": softcap, "sink": sink, "sm_scale": sm_scale}
    return _new(dkv.prefill_attention(q, k, v, config=config, backend=backend, **settings))


_op(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor? block_indices, int prefill_key_block, int prefill_block, "
    "int prefill_window, int prefill_stride, int? prefill_top_k, float? prefill_ratio, float? prefill_mass, "
    f"float? softcap, Tensor? sink, float? sm_scale, str? backend=None) -> {_STATE}",
    _prefill_attention,
    _fake_rows,
)


def _decode_attention(
    q,
    blocks,
    format,
    k_window,
    v_window,
    block_indices,
    seq_lens,
    window,
    softcap,
    sink,
    sm_scale,
    top_k,
    router,
    share,
    sink_blocks,
    recent_blocks,
    backend=None,
):
    config = _routing(top_k, router, share, sink_blocks, recent_blocks)
    settings = {"block_indices": block_indices, "seq_lens": seq_lens, "window": window, "softcap": softcap}
    settings |= {"sink": sink, "sm_scale": sm_scale, "config": config, "backend": backend}
    return _new(dkv.decode_attention(q, unpack_blocks(blocks, format), k_window, v_window, **settings))


@functools.lru_cache(maxsize=64)
def _routing(top_k: int, router: str, share: str, sink_blocks: int, recent_blocks: int) -> DKVConfig:
    return DKVConfig(top_k=top_k, router=router, share=share, sink_blocks=sink_blocks, recent_blocks=recent_blocks)


def _fake_decode_attention(q, blocks, format, k_window, v_window, block_indices, *settings):
    return _fake_query(q, blocks, block_indices)


def _decode_attention_out(*arguments: Any, into_out: Tensor, into_lse: Tensor) -> None:
    made = _decode_attention(*arguments)
    for name, to, result in (("out", into_out, made[0]), ("lse", into_lse, made[1])):
        if to.shape != result.shape or to.dtype != result.dtype:
            raise ValueError(f"{name} must be {result.dtype} {list(result.shape)}, got {to.dtype} {list(to.shape)}")
        to.copy_(result)


def _fake_decode_attention_out(q, blocks, format, k_window, v_window, block_indices, *settings, into_out, into_lse):
    _fake_query(q, blocks, block_indices)


_DECODE = (
    f"Tensor q, {_BLOCKS}, Tensor? k_window, Tensor? v_window, Tensor? block_indices, Tensor? seq_lens, int? window, "
    "float? softcap, Tensor? sink, float? sm_scale, int top_k, str router, str share, int sink_blocks, "
    "int recent_blocks, str? backend=None"
)
_op(f"decode_attention({_DECODE}) -> {_STATE}", _decode_attention, _fake_decode_attention)
_op(
    f"decode_attention_out({_DECODE}, *, Tensor(a!) into_out, Tensor(b!) into_lse) -> ()",
    _decode_attention_out,
    _fake_decode_attention_out,
)


def _merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str | None = None) -> State:
    if len(outs) != len(lses):
        raise ValueError(f"outs and lses must go in pairs, got {len(outs)} and {len(lses)}")
    return _new(dkv.merge_states([AttentionState(*pair) for pair in zip(outs, lses)], backend=backend))


def _fake_merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str | None = None) -> State:
    if not outs:
        raise ValueError("states must hold at least one AttentionState, got none")
    return _fake_state(outs[0], outs[0].shape[3])


_op(f"merge_states(Tensor[] outs, Tensor[] lses, str? backend=None) -> {_STATE}", _merge_states, _fake_merge_states)
