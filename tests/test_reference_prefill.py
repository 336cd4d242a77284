"""Block-sparse prefill against plain softmax attention over the selected rows, and its selection entry by entry."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import assert_states_close, attention, f64

from dkv.reference import decode, prefill


@dataclasses.dataclass
class Prompt:
    """Shapes and settings of one random prefill."""

    B: int
    Hkv: int
    G: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    block_size: int
    prefill_block: int
    top_k: int | None
    window: int
    ragged: bool
    seed: int
    stride: int = 16
    ratio: float | None = None
    mass: float | None = None

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        rng = np.random.default_rng(self.seed)
        q = rng.standard_normal((self.B, self.Hkv * self.G, self.Sq, self.D))
        k = 2 * rng.standard_normal((self.B, self.Hkv, self.Sk, self.D))
        v = rng.standard_normal((self.B, self.Hkv, self.Sk, self.Dv))
        lengths = rng.integers(0, self.Sk + 1, self.B) if self.ragged else None
        for b in range(self.B if self.ragged else 0):
            k[b, :, lengths[b] :] = v[b, :, lengths[b] :] = np.nan
            q[b, :, : max(0, self.Sq - lengths[b])] = np.nan  # queries before the first key
        return q, k, v, lengths

    def settings(self) -> dict[str, float | None]:
        return {
            "block_size": self.block_size,
            "prefill_block": self.prefill_block,
            "top_k": self.top_k,
            "prefill_window": self.window,
            "stride": self.stride,
            "ratio": self.ratio,
            "mass": self.mass,
        }


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    Sq = draw(st.sampled_from([7, 1, 16, 17, 40, 65]))
    return Prompt(
        B=draw(st.integers(0, 2)),
        Hkv=draw(st.integers(1, 2)),
        G=draw(st.sampled_from([1, 2, 3, 7])),
        Sq=Sq,
        Sk=Sq + draw(st.sampled_from([0, 30, 5, 100, -3])) if Sq > 3 else Sq + draw(st.integers(0, 70)),
        D=draw(st.sampled_from([4, 1, 6])),
        Dv=draw(st.sampled_from([5, 2])),
        block_size=draw(st.sampled_from([8, 4, 32, 48, 100])),
        prefill_block=draw(st.sampled_from([16, 1, 20, 5, 64])),
        top_k=draw(st.sampled_from([3, None, 1, 5])),
        window=draw(st.sampled_from([0, 1, 9, 40])),
        ragged=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        stride=draw(st.sampled_from([16, 1, 7, 200])),
        ratio=draw(st.sampled_from([None, 0.3, 0.55, 1.0])),
        mass=draw(st.sampled_from([None, 0.5, 0.9, 1.0])),
    )


def dense_mask(prompt: Prompt, selected: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Which keys a query sees, bool ``[B, Hkv, Sq, Sk]``, entry by entry."""
    visible = np.zeros((prompt.B, prompt.Hkv, prompt.Sq, prompt.Sk), bool)
    for b, h, i, j in np.ndindex(*visible.shape):
        length = prompt.Sk if lengths is None else lengths[b]
        chosen = selected[b, h, i // prompt.prefill_block].tolist()
        visible[b, h, i, j] = j < length and j <= length - prompt.Sq + i and j // prompt.block_size in chosen
    return visible


@given(prompts(), st.sampled_from([None, 2.0]), st.booleans())
def test_prefill_is_attention_over_the_selected_blocks(prompt: Prompt, softcap: float | None, with_sink: bool) -> None:
    q, k, v, lengths = prompt.arrays()
    sink = np.random.default_rng(prompt.seed).standard_normal(q.shape[1]) if with_sink else None
    before = q.tobytes(), k.tobytes(), v.tobytes()
    selected = prefill.select_key_blocks(q, k, **prompt.settings(), seq_lens=lengths)
    got = prefill.prefill_attention(q, k, v, **prompt.settings(), softcap=softcap, sink=sink, seq_lens=lengths)
    assert before == (q.tobytes(), k.tobytes(), v.tobytes())
    assert got[0].shape == (*q.shape[:3], prompt.Dv) and got[1].dtype == np.float32
    mask = dense_mask(prompt, selected, lengths)
    want = attention(q, k, v, mask, None, softcap, sink)
    blind = np.repeat(~mask.any(axis=3), prompt.G, axis=1)
    assert (got[0][blind] == 0).all()
    want[0][blind] = 0
    if sink is None:
        assert (got[1][blind] == -np.inf).all()
    assert_states_close(got, want)


@given(prompts(), st.sampled_from([None, 0.3]))
def test_selection_is_the_first_the_window_and_the_best_between(prompt: Prompt, sm_scale: float | None) -> None:
    check_selection(prompt, sm_scale)


@pytest.mark.parametrize("block_size", [256, 48, 32, 8])
@pytest.mark.parametrize("seed", range(3))
def test_selection_among_many_blocks(block_size: int, seed: int) -> None:
    """More blocks compete than there are slots, at every position of the query block in its key block."""
    check_selection(Prompt(1, 2, 3, 100, 12 * block_size + seed, 4, 5, block_size, 40, 5, block_size // 2, False, seed))
    check_selection(Prompt(1, 2, 3, 100, 8 * block_size + 40, 4, 5, block_size, 33, 6, 0, True, seed))


def check_selection(prompt: Prompt, sm_scale: float | None = None) -> None:
    q, k, _, lengths = prompt.arrays()
    S, P, G = prompt.block_size, prompt.prefill_block, prompt.G
    got = prefill.select_key_blocks(q, k, **prompt.settings(), sm_scale=sm_scale, seq_lens=lengths)
    nK, nQ = math.ceil(prompt.Sk / S), math.ceil(prompt.Sq / P)
    unlimited = prompt.ratio is not None or prompt.mass is not None
    top_k = prompt.top_k or (nK if unlimited else math.ceil(2048 / S))
    assert got.shape[:3] == (prompt.B, prompt.Hkv, nQ) and got.dtype == np.int32 and got.shape[3] <= nK
    for b, h, t in np.ndindex(*got.shape[:3]):
        length = prompt.Sk if lengths is None else int(lengths[b])
        positions = [length - prompt.Sq + i for i in range(t * P, min((t + 1) * P, prompt.Sq))]
        chosen = [n for n in got[b, h, t].tolist() if n >= 0]
        assert got[b, h, t].tolist() == sorted(set(chosen)) + [-1] * (got.shape[3] - len(chosen))
        if positions[-1] < 0:
            assert chosen == []
            continue
        visible = range(positions[-1] // S + 1)
        pinned = {0} | {j // S for j in range(max(0, positions[0] - prompt.window), positions[-1] + 1)}
        assert pinned <= set(chosen) <= set(visible)
        most = min(top_k, math.ceil((prompt.ratio or 1.0) * len(visible)))
        most = min(len(visible), max(most, len(pinned)))
        share = np.zeros(len(visible))
        ends = [i for i in range(t * P, min((t + 1) * P, prompt.Sq)) if (i - t * P + 1) % prompt.stride == 0]
        sampled = sorted({*ends, min((t + 1) * P, prompt.Sq) - 1})
        for head in range(h * G, (h + 1) * G):
            for i in sampled:
                keys = range(length - prompt.Sq + i + 1)  # those it sees
                scores = np.array([k[b, h, j] @ q[b, head, i] for j in keys])
                scores = scores * (prompt.D**-0.5 if sm_scale is None else sm_scale)
                weights = np.exp(scores - scores.max(initial=-np.inf))
                for j in keys:
                    share[j // S] += weights[j] / weights.sum() / G / len(sampled)
        free = sorted((j for j in visible if j not in pinned), key=lambda j: (-share[j], j))
        want, room = sorted(pinned), most - len(pinned)
        if prompt.mass is None or prompt.mass == 1:
            want += free[:room]
        else:
            for j in free[:room]:
                if sum(share[i] for i in want if i) >= prompt.mass * share[1:].sum():
                    break
                want.append(j)
        assert sorted(want) == chosen


def test_the_default_is_a_fixed_number_of_keys() -> None:
    assert [prefill.default_top_k(n) for n in (1, 64, 100, 256, 4096)] == [2048, 32, 21, 8, 1]


@pytest.mark.parametrize("seed", range(4))
def test_selection_does_not_depend_on_later_keys(seed: int) -> None:
    """A query block's blocks are the same whatever follows it."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, 6, 400, 6)), 3 * rng.standard_normal((1, 2, 400, 6))
    settings = {"block_size": 48, "prefill_block": 20, "top_k": 4, "prefill_window": 0}
    for length in (380, 340, 320, 260):
        part = prefill.select_key_blocks(q[:, :, :length], k[:, :, :length], **settings)
        k[:, :, length:] = 1000 * rng.standard_normal((400 - length, 6))  # what follows would drown the rest
        whole = prefill.select_key_blocks(q, k, **settings)
        for h, t in np.ndindex(2, length // 20):
            assert [n for n in part[0, h, t] if n >= 0] == [n for n in whole[0, h, t] if n >= 0]


# Faults that users of other projects met.


def prompt_arrays(Sq: int, Sk: int, D: int = 8, Dv: int = 6, dtype: object = np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(Sq + Sk)
    shapes = ((1, 6, Sq, D), (1, 2, Sk, D), (1, 2, Sk, Dv))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], bool)
    return attention(q, k, v, np.broadcast_to(visible, (q.shape[0], k.shape[1], *visible.shape)))


def test_the_last_partial_query_block_has_keys() -> None:
    """Blocks counted by ceil, mask filled by floor: no keys for the last queries (LMCache#3092)."""
    q, k, v = prompt_arrays(300, 300)
    out, lse = prefill.prefill_attention(q, k, v, 128, 128, 1, 0)
    selected = prefill.select_key_blocks(q, k, 128, 128, 1, 0)
    assert [n for n in selected[0, 0, 2] if n >= 0] == [0, 2]
    visible = np.zeros((1, 2, 300, 300), bool)
    for i in range(300):
        for j in range(i + 1):
            visible[:, :, i, j] = j // 128 in (0, i // 128)
    assert_states_close((out, lse), attention(q, k, v, visible), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 255, 257])
def test_prompts_around_one_block_are_dense(length: int) -> None:
    """A sequence shorter than one block crashed (LMCache#2791)."""
    q, k, v = prompt_arrays(length, length)
    for block in (64, 256):
        assert_states_close(prefill.prefill_attention(q, k, v, block, block), dense(q, k, v), rtol=1e-5, atol=1e-5)


def test_queries_are_aligned_to_the_last_key() -> None:
    """A causal mask aligned top-left hides the cached past (flash-attention#517, onnx#8068, executorch#21749)."""
    q, k, v = np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 5, 1)), np.arange(5.0).reshape(1, 1, 5, 1)
    for out, lse in (prefill.prefill_attention(q, k, v), decode.exact_attention(q, k, v)):
        assert out.ravel().tolist() == pytest.approx([1.5, 2.0])
        assert lse.ravel().tolist() == pytest.approx([1.386294, 1.609438], abs=1e-6)


def test_queries_before_the_first_key_are_empty() -> None:
    """More queries than keys: blind rows got a finite lse (flashinfer#4452, flash-attention#1778)."""
    q, k, v = np.zeros((1, 1, 5, 1)), np.zeros((1, 1, 2, 1)), np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    for out, lse in (prefill.prefill_attention(q, k, v), decode.exact_attention(q, k, v)):
        assert out.ravel().tolist() == pytest.approx([0, 0, 0, 10, 15])
        assert lse.ravel().tolist() == pytest.approx([-np.inf] * 3 + [0, np.log(2)])
        assert (out.ravel()[:3] == 0).all()


def test_no_slot_is_spent_on_the_future() -> None:
    """Early query blocks spent their top-K on future blocks (MInference#108)."""
    q, k, v = prompt_arrays(512, 512)
    q, k = abs(q), abs(k) * np.repeat(np.arange(8) ** 2, 64)[:, None].astype(np.float32)
    selected = prefill.select_key_blocks(q, k, 64, 64, 4, 0)
    for h, i in np.ndindex(2, 8):
        chosen = [n for n in selected[0, h, i].tolist() if n >= 0]
        assert set(chosen) <= set(range(i + 1)) and i in chosen and len(chosen) == min(4, i + 1)
    out, lse = prefill.prefill_attention(q, k, v, 64, 64, 4, 0)
    want = dense(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    assert_states_close((out[:, :, :64], lse[:, :, :64]), want, rtol=1e-5, atol=1e-5)


def test_the_order_of_the_list_does_not_matter() -> None:
    """The first visited block was fully masked for some rows (vllm#4405, aiter#2505, FlagAttention#25)."""
    q, k, v = prompt_arrays(200, 200)
    want = dense(q, k, v)
    rng = np.random.default_rng(0)
    descending = np.broadcast_to(np.array([3, 2, 1, 0, -1]), (1, 2, 7, 5))
    for indices in (descending, rng.permuted(descending, axis=3), np.repeat(descending, 2, axis=3)):
        got = prefill.prefill_attention(q, k, v, 64, 32, block_indices=indices)
        assert_states_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_large_count_is_dense() -> None:
    """Is a very large K really dense? (MInference#108)."""
    q, k, v = prompt_arrays(700, 700)
    got = prefill.prefill_attention(q, k, v, 64, 64, 11, 0)
    assert_states_close(got, dense(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chunks", [(256, 256, 88), (1, 599)])
def test_chunks_equal_one_shot(chunks: tuple[int, ...], dtype: object) -> None:
    """Prefill in chunks on a warm cache broke (candle#3743)."""
    q, k, v = prompt_arrays(600, 600, dtype=dtype)
    out, lse = prefill.prefill_attention(q, k, v)
    stop = 0
    for chunk in chunks:
        start, stop = stop, stop + chunk
        part, part_lse = prefill.prefill_attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(f64(part), f64(out[:, :, start:stop]), rtol=max(eps, 1e-5), atol=1e-5)
        np.testing.assert_allclose(part_lse, lse[:, :, start:stop], rtol=1e-5)
