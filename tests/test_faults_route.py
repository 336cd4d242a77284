"""Faults that users of other kernels met in block selection. Each names its source."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from strategies import CASE_BACKENDS, call, library, poisoned

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks


def select(backend: str, scores: list[float], top_k: int, size: int | None = None) -> list[int]:
    """The backend's selection among ``scores`` of one head, of which ``size`` belong to blocks."""
    p, count = np.array(scores, np.float32)[None, None], len(scores) if size is None else size
    fn = op_module(backend, "route").select_blocks
    if backend == "reference":
        return fn(p, np.arange(len(scores))[None] < count, top_k, 0, 0)[0, 0].tolist()
    arrays = testing.to_library([p, np.array([count], np.int32)], library(backend))
    return testing.to_numpy(fn(*arrays, top_k, 0, 0))[0, 0].tolist()


def blocks_of(k: np.ndarray, v: np.ndarray, fmt: BlockFormat) -> CompressedBlocks:
    return CompressedBlocks(format=fmt, **op_module("reference", "compress").compress_blocks(k, v, fmt))


@pytest.mark.parametrize("router", ["lowrank", "minmax", "residual"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r01_more_slots_than_blocks(backend: str, router: str) -> None:
    """native-sparse-attention-pytorch#18, loki#1: top-k raised in a small context."""
    fmt = BlockFormat(16, 4, 5, minmax=True)
    made = testing.make_inputs(0, num_blocks=3, config=fmt)
    chosen = call(backend, "route_blocks", made.q, made.blocks, top_k=8, router=router)
    assert chosen.shape == (2, 2, 3) and (chosen == [0, 1, 2]).all()
    arguments = (made.q, made.blocks, made.k_window, made.v_window)
    routed = call(backend, "decode_attention", *arguments, config=dkv.DKVConfig(top_k=8, router=router))
    every = call(backend, "decode_attention", *arguments, block_indices=chosen)
    assert routed.out.tobytes() == every.out.tobytes() and routed.lse.tobytes() == every.lse.tobytes()
    none = testing.make_inputs(0, num_blocks=0, config=fmt)
    chosen = call(backend, "route_blocks", none.q, none.blocks, top_k=8, router=router)
    assert chosen.shape == (2, 2, 0)
    state = call(backend, "decode_attention", none.q, none.blocks, none.k_window, none.v_window)
    dense = call(backend, "exact_attention", none.q, none.k_window, none.v_window)
    assert state.out.tobytes() == dense.out.tobytes() and state.lse.tobytes() == dense.lse.tobytes()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r03_nan_scores_are_last_whatever_their_sign(backend: str) -> None:
    """vllm#50201, tt-metal#56626, triton#10697, triton#10291: NaN gave repeated, uninitialised or signed choices."""
    nan = float("nan")
    assert select(backend, [1, nan, 3, -nan], 2) == [0, 2]
    assert select(backend, [1, nan, 3, -nan], 3) == [0, 1, 2]
    assert select(backend, [nan, -nan, nan], 2) == [0, 1]
    assert select(backend, [nan, 0, nan, 0], 2) == [1, 3]


@pytest.mark.parametrize("router", ["lowrank", "minmax", "residual"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r03_a_block_of_nan_is_not_chosen_before_another(backend: str, router: str) -> None:
    """The same sources, through the scores."""
    made = testing.make_inputs(1, num_blocks=4, config=BlockFormat(16, 4, 5, 32, 16, minmax=True))
    for part in ("anchor_k", "residual_k", "basis_k", "k_min", "k_max"):
        getattr(made.blocks, part)[:, 2] = np.nan
    chosen = call(backend, "route_blocks", made.q, made.blocks, top_k=3, router=router, sink_blocks=0)
    assert (chosen == [0, 1, 3]).all()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r04_every_infinite_score_wins(backend: str) -> None:
    """triton#6635: with several infinite scores a repeated arg-max dropped a winner."""
    rng = np.random.default_rng(2)
    scores = rng.permutation(32).astype(np.float32)
    scores[[3, 11, 12, 30]] = np.inf
    want = sorted(np.argsort(-scores, kind="stable")[:16].tolist())
    assert select(backend, scores.tolist(), 16) == want


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r05_padding_never_escapes(backend: str) -> None:
    """tt-metal#53326: real scores equalled the pad value, and padding lanes were chosen."""
    inf = float("inf")
    padded = [-inf, -inf, 2, -inf, 1, -inf, 5, 7]
    assert select(backend, padded, 4, size=5) == [0, 1, 2, 4]
    assert select(backend, padded, 8, size=5) == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("router", ["lowrank", "minmax", "residual"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r06_the_first_and_the_last_block_stay(backend: str, router: str) -> None:
    """mlx-lm#1443, mlx-lm#1552: the first tokens fell out as soon as selection began."""
    rng = np.random.default_rng(3)
    q = np.ones((1, 2, 1, 8), np.float32)
    k = rng.standard_normal((1, 1, 40 * 4, 8)).astype(np.float32)
    k[:, :, :4] -= 50  # lowest of all
    k[:, :, -4:] -= 40
    blocks = blocks_of(k, np.ones((1, 1, 160, 3), np.float32), BlockFormat(4, 2, 1, minmax=True))
    chosen = call(backend, "route_blocks", q, blocks, top_k=8, router=router, sink_blocks=1, recent_blocks=1)[0, 0]
    assert len(set(chosen.tolist())) == 8 and chosen[0] == 0 and chosen[-1] == 39
    loose = call(backend, "route_blocks", q, blocks, top_k=8, router=router, sink_blocks=0)[0, 0]
    assert not {0, 39} & set(loose.tolist())


@pytest.mark.parametrize(("size", "count"), [(256, 16), (128, 32)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r07_a_budget_of_tokens_goes_by_the_size_of_a_block(backend: str, size: int, count: int) -> None:
    """imp#1819: a budget of tokens was divided by a fixed size of blocks, and the real budget was double."""
    rng, full = np.random.default_rng(4), 10000 // size
    k = rng.standard_normal((1, 1, full * size, 2)).astype(np.float32)
    blocks = blocks_of(k, k, BlockFormat(size, 1, 0))
    q = np.ones((1, 1, 1, 2), np.float32)
    chosen = call(backend, "route_blocks", q, blocks, top_k=4096 // size)[0, 0]
    assert len(set(chosen.tolist())) == count and chosen.min() >= 0
    state = call(backend, "decode_attention", q, blocks, block_indices=np.array(chosen[None, None]), sm_scale=1e-6)
    np.testing.assert_allclose(state.lse, np.log(4096), rtol=1e-5)  # as many tokens as the budget says
    config = dkv.DKVConfig(prefill_key_block=size, prefill_window=0, prefill_mass=None)
    k = np.zeros((1, 1, 10000, 2), np.float32)
    state = call(backend, "prefill_attention", q, k, k, config=config, sm_scale=1e-6)
    tail = 10000 % size or size  # the last block is not whole
    np.testing.assert_allclose(state.lse, np.log(dkv.config.DEFAULT_PREFILL_KEYS - size + tail), rtol=1e-5)


@pytest.mark.parametrize("runtime", ["torch", "mlx"])
def test_r09_left_padding_is_neither_stored_nor_pinned(runtime: str) -> None:
    """mlx-lm#1552: with left padding, the pads counted as the first tokens of a sequence."""
    config = dkv.DKVConfig(
        block_size=16, window=24, sink_tokens=10, rank=4, num_residuals=5, format="fp32", top_k=2, chunk_top_k=2
    )
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, heads, 501, 8)).astype(np.float32) for heads in (4, 2, 2))
    k[0, :, :300] *= 1e4
    v[0, :, :300] = 1e4
    caches, outs = [], []
    for rows, start in ((slice(0, 2), 0), (slice(0, 1), 300)):
        chunks = [(start, 500), (500, 501)]
        parts = testing.to_library([np.array(x[rows]) for x in (q, k, v)], runtime)
        if runtime == "torch":
            torch = pytest.importorskip("torch")
            from dkv.cache.layer import LayerCache

            cache, real = LayerCache(config), torch.ones(rows.stop, 501, dtype=torch.bool)
            real[0, : 300 - start] = False
            for a, b in chunks:
                padding = None if start else real[:, a:b]
                out = cache.attend(*(x[:, :, a:b] for x in parts), padding=padding)
        else:
            pytest.importorskip("mlx.core")
            from dkv.cache.mlx_layer import LayerCache

            cache = LayerCache(config)
            for a, b in chunks:
                first = min(b, 300) if b <= 500 and not start else 0
                spans = None if start else [(first, b - a - first), (0, b - a)]
                now = [x[:, :, a:b] for x in parts]
                cache.append(*now[1:], spans)
                out = cache.attend(now[0], spans)
                cache.close(config.window)
        caches.append(cache)
        outs.append(testing.to_numpy(out)[0])
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)
    assert caches[0].tokens[0] == caches[1].tokens[0] == 201 and caches[0].block_counts[0] == 10
    sinks = [testing.to_numpy(cache.k_rows)[0, :, :10] for cache in caches]
    assert sinks[0].tobytes() == sinks[1].tobytes() == k[0, :, 300:310].tobytes()
    assert all(np.abs(testing.to_numpy(blocks.anchor_k)[0, :10]).max() < 100 for blocks in caches[0].blocks)


@pytest.mark.parametrize("router", ["lowrank", "minmax", "residual"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r08_a_kv_head_selects_for_its_own_queries(backend: str, router: str) -> None:
    """LMCache#3092, SnapKV#16, HeadKV#3: key heads were indexed with the numbers of query heads, or stored for each."""
    k = np.zeros((1, 2, 4 * 16, 8), np.float32)
    k[0, 0, 16:32, 0] = k[0, 1, 48:, 0] = 30
    v = np.zeros((1, 2, 4 * 16, 5), np.float32)
    v[0, 0, 16:32] = 1
    v[0, 1, 48:] = 2
    blocks = blocks_of(k, v, BlockFormat(16, 4, 5, minmax=True))
    assert blocks.anchor_k.shape[2] == blocks.residual_k.shape[2] == 2
    q = np.zeros((1, 12, 1, 8), np.float32)
    q[..., 0] = 1
    chosen = call(backend, "route_blocks", q, blocks, top_k=1, router=router, sink_blocks=0)
    assert chosen.shape == (1, 2, 1) and chosen[0, :, 0].tolist() == [1, 3]
    state = call(backend, "decode_attention", q, blocks, block_indices=chosen)
    np.testing.assert_allclose(state.out[0, :, 0, 0], [1] * 6 + [2] * 6, atol=1e-2)


@pytest.mark.parametrize("fmt", [BlockFormat(16, 4, 5), BlockFormat(16, 4, 15), BlockFormat(16, 4, 0)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r11_a_block_listed_twice_counts_once(backend: str, fmt: BlockFormat) -> None:
    """vllm#56254: the contract said unique, the code kept duplicates."""
    k = np.zeros((1, 1, 64, 8), np.float32)
    v = np.zeros((1, 1, 64, 3), np.float32)
    v[:, :, 48:] = 1
    blocks = blocks_of(k, v, fmt)
    q = np.ones((1, 2, 1, 8), np.float32)
    for indices in ([3, 3, 1], [1, 3, 3], [3, 1, 3], [3, 1, -1]):
        state = call(backend, "decode_attention", q, blocks, block_indices=np.array([[indices]], np.int32))
        np.testing.assert_allclose(state.out, 0.5, atol=1e-6)


@pytest.mark.parametrize("fmt", [BlockFormat(16, 4, 5), BlockFormat(16, 4, 15)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r12_what_lies_beyond_a_list_is_not_read(backend: str, fmt: BlockFormat) -> None:
    """flashinfer#5075: a list was shorter than its buffer, and what an earlier step had left there was read."""
    made = testing.make_inputs(6, batch=1, num_blocks=6, config=fmt)
    used = np.array([[[0, 3], [2, 1]]], np.int32)
    want = call(backend, "decode_attention", made.q, made.blocks, block_indices=used)
    blocks = dataclasses.replace(poisoned(made.blocks, np.arange(6)[None] == 5), block_counts=np.array([5], np.int32))
    for beyond in (-1, 5, -7, 6, 2**31 - 1):  # unused, a block that is none any more, and no number of a block
        buffer = np.full((1, 2, 8), beyond, np.int32)
        buffer[..., :2] = used
        state = call(backend, "decode_attention", made.q, blocks, block_indices=buffer)
        np.testing.assert_allclose(state.out, want.out, atol=1e-6)
        np.testing.assert_allclose(state.lse, want.lse, atol=1e-6)
