"""The contracts of the law, section 11, by every backend: what must hold whatever is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import CASE_BACKENDS, call, library

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import AttentionState, BlockFormat, CompressedBlocks

few = settings(max_examples=max(3, settings().max_examples // 5))
FULL_RANK = BlockFormat(16, 128, 0, 32, 16)
EVERY_ROW = BlockFormat(16, 3, 15, 32, 16)
COMPACT = BlockFormat(16, 5, 6, minmax=True)
FORMATS = [  # one build of the Metal kernels
    COMPACT,
    BlockFormat(11, 3, 10, minmax=True),
    BlockFormat(16, 0, 15, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3, minmax=True),
    BlockFormat(11, 4, 0, minmax=True),
]
CONFIG = dkv.DKVConfig(block_size=16, top_k=2, prefill_key_block=16, prefill_block=8, prefill_top_k=3, prefill_window=8)
seeds = st.integers(0, 2**31)


def compressed(k: np.ndarray, v: np.ndarray, fmt: BlockFormat) -> CompressedBlocks:
    """By the reference, for formats that no config stands for."""
    made = op_module("reference", "compress").compress_blocks(k, v, fmt, "distinct")
    return CompressedBlocks(format=fmt, **made)


def every_block(blocks: CompressedBlocks) -> np.ndarray:
    every = np.arange(blocks.num_blocks, dtype=np.int32)
    return np.broadcast_to(every, (blocks.batch_size, blocks.num_kv_heads, len(every))).copy()


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance)


def same_bits(a: Any, b: Any) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(arrays(a), arrays(b), strict=True))


def arrays(x: Any) -> list[Any]:
    if isinstance(x, CompressedBlocks):
        return [part for _, part in x.parts()]
    return [array for part in x for array in arrays(part)] if isinstance(x, (tuple, list)) else [x]


# split and merged again; shifted; exact where nothing is lost


@pytest.mark.parametrize("backend", CASE_BACKENDS)
@few
@given(
    seed=seeds,
    fmt=st.sampled_from(FORMATS),
    cuts=st.lists(st.integers(0, 41), max_size=2),
    length=st.sampled_from([1, 2]),
)
def test_keys_and_blocks_in_any_parts_are_the_whole(
    backend: str, seed: int, fmt: BlockFormat, cuts: list[int], length: int
) -> None:
    made = testing.make_inputs(seed, config=fmt, num_blocks=4, window=41, q_len=length)
    rng, (q, blocks) = np.random.default_rng(seed), (made.q, made.blocks)
    owner = rng.integers(0, 3, (2, 2, 4))  # which part takes a block, for each kv head
    parts = [
        call(backend, op, q, blocks, np.where(owner == part, np.arange(4), -1).astype(np.int32))
        for part in range(3)
        for op in ("lowrank_attention", "residual_attention")
    ]
    edges = [0, *sorted(cuts), 41 - length]
    for start, stop in zip(edges, edges[1:]):  # rows that all queries see
        rows = (np.ascontiguousarray(x[:, :, start : max(start, stop)]) for x in (made.k_window, made.v_window))
        parts.append(call(backend, "exact_attention", q, *rows, causal=False))
    newest = max(edges[:-1] + [41 - length])
    rows = (np.ascontiguousarray(x[:, :, newest:]) for x in (made.k_window, made.v_window))
    parts.append(call(backend, "exact_attention", q, *rows))
    order = rng.permutation(len(parts))
    merged = call(backend, "merge_states", [parts[i] for i in order])
    window = (made.k_window, made.v_window)
    close(merged, call(backend, "decode_attention", q, blocks, *window, block_indices=every_block(blocks)))


@pytest.mark.parametrize("fmt", [FULL_RANK, EVERY_ROW], ids=["full rank", "every row"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
@few
@given(seed=seeds, length=st.sampled_from([1, 3]), softcap=st.sampled_from([None, 8.0]))
def test_nothing_lost_is_dense(backend: str, fmt: BlockFormat, seed: int, length: int, softcap: float | None) -> None:
    made = testing.make_inputs(seed, config=fmt, q_len=length)
    k, v = testing.to_library((made.k, made.v), library(backend))
    stored = op_module(backend, "compress").compress_blocks(k, v, fmt, "distinct", None, None)
    blocks = testing.to_numpy(CompressedBlocks(format=fmt, **stored) if isinstance(stored, dict) else stored)
    rows = [np.concatenate(pair, axis=2) for pair in ((made.k, made.k_window), (made.v, made.v_window))]
    want = call("reference", "exact_attention", made.q, *rows, softcap=softcap)
    config = dkv.DKVConfig(top_k=9)
    window = (made.k_window, made.v_window)
    close(call(backend, "decode_attention", made.q, blocks, *window, config=config, softcap=softcap), want, 5e-5)
    prefill = dkv.DKVConfig(prefill_key_block=8, prefill_block=8, prefill_ratio=1.0)
    close(call(backend, "prefill_attention", made.q, *rows, config=prefill, softcap=softcap), want)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
@few
@given(seed=seeds, fmt=st.sampled_from(FORMATS), shift=st.sampled_from([-9.0, 30.0]))
def test_a_constant_in_all_logits_is_in_the_lse_alone(backend: str, seed: int, fmt: BlockFormat, shift: float) -> None:
    """A channel that is the same in all keys; what is compressed is the same beside it."""
    made = testing.make_inputs(seed, config=fmt, num_blocks=4, q_len=2)
    q = np.concatenate([made.q, np.full_like(made.q[..., :1], 4 * shift)], axis=-1)
    states, chosen = [], []
    for one in (0.0, 1.0):
        k, window = (np.concatenate([x, np.full_like(x[..., :1], one)], axis=-1) for x in (made.k, made.k_window))
        blocks = compressed(k, made.v, fmt)
        every, options = every_block(blocks), {"sm_scale": 0.25}
        rows = {"lowrank_attention": (blocks, every), "residual_attention": (blocks, every)}
        rows["exact_attention"] = (window, made.v_window)
        states.append([call(backend, op, q, *arguments, **options) for op, arguments in rows.items()])
        states[-1].append(
            call(backend, "decode_attention", q, blocks, window, made.v_window, block_indices=every, **options)
        )
        chosen.append([call(backend, "route_blocks", q, blocks, top_k=2, router=r, sm_scale=0.25) for r in ROUTERS])
    for still, moved in zip(*states, strict=True):
        np.testing.assert_allclose(moved.out, still.out, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(moved.lse, still.lse + shift, rtol=1e-6, atol=2e-5)
    for still, moved in zip(*chosen, strict=True):
        assert np.array_equal(still, moved)


ROUTERS = ("lowrank", "keys", "minmax", "residual")


# the rest of the batch


@pytest.mark.parametrize("backend", CASE_BACKENDS)
@few
@given(seed=seeds, fmt=st.sampled_from(FORMATS))
def test_batch_mates_do_not_show(backend: str, seed: int, fmt: BlockFormat) -> None:
    made = testing.make_inputs(seed, batch=3, config=fmt, num_blocks=4)
    row = seed % 3

    def run(x: testing.Inputs) -> tuple[list[Any], list[Any]]:
        decode = call(backend, "decode_attention", x.q, x.blocks, x.k_window, x.v_window, config=CONFIG)
        exact = call(backend, "exact_attention", x.q, x.k_window, x.v_window)
        prefill = call(backend, "prefill_attention", x.q, x.k, x.v, config=CONFIG)
        routed = [call(backend, "route_blocks", x.q, x.blocks, top_k=2, router=router) for router in ROUTERS]
        return [decode, exact, prefill], routed

    together, routed = run(made)
    own = slice(row, row + 1)
    one = [np.ascontiguousarray(x[own]) for x in made[:5]]
    alone, routed_alone = run(made._replace(**dict(zip(made._fields, one)), blocks=made.blocks.map(lambda x: x[own])))
    for state, single in zip(together, alone, strict=True):
        close([x[own] for x in state], single)
    assert all(np.array_equal(x[own], y) for x, y in zip(routed, routed_alone, strict=True))
    states = [AttentionState(*(np.ascontiguousarray(x) for x in state)) for state in together]
    merged = call(backend, "merge_states", states)
    single = call(backend, "merge_states", [AttentionState(*(np.ascontiguousarray(x[own]) for x in s)) for s in states])
    assert same_bits([x[own] for x in merged], single)


# bits, memory and strides


def calls(backend: str, x: testing.Inputs, states: list[AttentionState], chosen: Any) -> dict[str, Any]:
    """Every op's result on arrays of the backend's library."""
    on: dict[str, Any] = {"backend": backend}
    return {
        "compress_blocks": dkv.compress_blocks(x.k, x.v, config=CONFIG, **on),
        "reconstruct_blocks": dkv.reconstruct_blocks(x.blocks, **on),
        "route_blocks": [dkv.route_blocks(x.q, x.blocks, top_k=2, router=router, **on) for router in ROUTERS],
        "lowrank_attention": dkv.lowrank_attention(x.q, x.blocks, chosen, **on),
        "residual_attention": dkv.residual_attention(x.q, x.blocks, chosen, **on),
        "exact_attention": dkv.exact_attention(x.q, x.k_window, x.v_window, **on),
        "decode_attention": dkv.decode_attention(x.q, x.blocks, x.k_window, x.v_window, config=CONFIG, **on),
        "prefill_attention": dkv.prefill_attention(x.q, x.k, x.v, config=CONFIG, **on),
        "merge_states": dkv.merge_states(states, **on),
        "merge of one": dkv.merge_states(states[:1], **on),
    }


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(COMPACT, "float32"), (dataclasses.replace(EVERY_ROW, minmax=True), "bfloat16")]
)
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_again_is_the_same_and_inputs_stay_as_they_were(backend: str, dtype: str, fmt: BlockFormat) -> None:
    made = testing.make_inputs(3, config=fmt, dtype=dtype, num_blocks=4, q_len=2)
    states = [
        call("reference", "exact_attention", made.q, made.k_window, made.v_window),
        call("reference", "lowrank_attention", made.q, made.blocks, every_block(made.blocks)),
    ]
    given_arrays = testing.to_library((made, states, every_block(made.blocks)), library(backend))
    before = testing.to_numpy(given_arrays)
    first, second = calls(backend, *given_arrays), calls(backend, *given_arrays)
    for op in first:
        assert same_bits(testing.to_numpy(first[op]), testing.to_numpy(second[op])), op
    for op, result in first.items():
        for array in arrays(result):
            array[...] = 1  # also refuses a broadcast view
        assert same_bits(testing.to_numpy(given_arrays[0])[:6], before[0][:6]), op
        assert same_bits(testing.to_numpy(given_arrays[1]), before[1]), op


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_strides_do_not_show(backend: str) -> None:
    made = testing.make_inputs(4, config=COMPACT, num_blocks=4, q_len=2)
    states = [
        call("reference", "exact_attention", made.q, made.k_window, made.v_window),
        call("reference", "lowrank_attention", made.q, made.blocks, every_block(made.blocks)),
    ]
    plain = (made._replace(config=None), states, every_block(made.blocks))

    def strided(x: Any) -> Any:
        """Every second number of a buffer whose first two axes lie swapped, other numbers between."""
        if x is None:
            return None
        if isinstance(x, CompressedBlocks):
            return x.map(strided)
        if isinstance(x, (list, tuple)):
            return type(x)(*map(strided, x)) if hasattr(x, "_fields") else type(x)(map(strided, x))
        buffer = np.repeat(x, 2, axis=-1)
        buffer[..., 1::2] = 9
        return testing.to_library(buffer.swapaxes(0, 1), library(backend)).swapaxes(0, 1)[..., ::2]

    dense = testing.to_numpy(calls_as_list(backend, testing.to_library(plain[:2], library(backend)), plain[2]))
    apart = testing.to_numpy(calls_as_list(backend, strided(list(plain[:2])), plain[2]))
    for one, other in zip(arrays(dense), arrays(apart), strict=True):
        if one.dtype.kind in "iu":
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(other, one, rtol=2e-6, atol=2e-6)


def calls_as_list(backend: str, given_arrays: Any, chosen: np.ndarray) -> list[Any]:
    found = calls(backend, *given_arrays, testing.to_library(chosen, library(backend)))
    compressed_parts = found.pop("compress_blocks")  # factors are compared through their product
    return [*found.values(), dkv.reconstruct_blocks(compressed_parts, backend=backend)]
