"""Numbers that kernels get wrong: long sums, the ends of a dtype, rows without rank, NaN and infinity."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from strategies import CASE_BACKENDS, call, library

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import AttentionState, BlockFormat, CompressedBlocks

ATTENTION = ("exact_attention", "decode_attention", "prefill_attention")
EVERY_ROW = BlockFormat(16, 5, 15)  # codes of 4 bits
EXACT_ROWS = BlockFormat(16, 5, 6, 16, 16)
LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38}
LARGEST_KEYS = {"float16": 65504.0, "bfloat16": 1e34}  # beyond, queries of moderate logits end at 2^-126
TINY = {"float16": 3e-7, "bfloat16": 1e-39}  # subnormal


@pytest.fixture(autouse=True)
def _quiet():
    """NumPy warns of the numbers that these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def run(backend: str, op: str, x: testing.Inputs, **options: Any) -> AttentionState:
    if op == "decode_attention":
        return call(backend, op, x.q, x.blocks, x.k_window, x.v_window, **options)
    return call(backend, op, x.q, x.k_window, x.v_window, **options)


def inputs(k: np.ndarray, v: np.ndarray, q: np.ndarray, fmt: BlockFormat, dtype: str) -> testing.Inputs:
    """Rows of which all but the newest 16 are blocks, compressed by the reference."""
    kind = testing.make_inputs(0, num_blocks=0, dtype=dtype).q.dtype
    k, v, q = (np.ascontiguousarray(x).astype(kind) for x in (k, v, q))
    old, new = slice(0, k.shape[2] - 16), slice(k.shape[2] - 16, None)
    made = op_module("reference", "compress").compress_blocks(k[:, :, old], v[:, :, old], fmt, "distinct")
    blocks = CompressedBlocks(format=fmt, **made)
    window = [np.ascontiguousarray(x[:, :, new]) for x in (k, v)]
    return testing.Inputs(q, k[:, :, old], v[:, :, old], *window, blocks, dkv.DKVConfig())


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


# long sums


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("backend", CASE_BACKENDS[1:])
def test_lse_over_128k_keys_is_that_of_float64(backend: str, op: str) -> None:
    # the interpreter takes a minute for blocks of 128k keys; however many, a program takes some and all are merged
    rng, keys = np.random.default_rng(0), 1 << (14 if (backend, op) == ("triton", "decode_attention") else 17)
    q = 3 * rng.standard_normal((1, 1, 1, 16)).astype(np.float32)
    k, v = (rng.standard_normal((1, 1, keys, dim)).astype(np.float32) for dim in (16, 4))
    logits = wide(k[0, 0]) @ wide(q[0, 0, 0]) / 4
    if op == "decode_attention":
        # one block repeated: what it stands for is known to float64, and there are as many terms
        block = dkv.compress_blocks(k[:, :, :256], v[:, :, :256])
        blocks = block.map(lambda part: np.ascontiguousarray(np.repeat(part, keys // 256 - 1, axis=1)))
        k_rows, v_rows = op_module("reference", "storage").residual_rows(blocks.map(lambda part: part[:, :1]))
        rows = np.concatenate([k[0, 0, :1], k_rows[0, 0, 0]])
        logits = np.concatenate([np.tile(wide(rows) @ wide(q[0, 0, 0]) / 4, keys // 256 - 1), logits[-256:]])
        window = (np.ascontiguousarray(x[:, :, -256:]) for x in (k, v))
        state = call(backend, op, q, blocks, *window, config=dkv.DKVConfig(top_k=keys))
    elif op == "prefill_attention":
        config = dkv.DKVConfig(prefill_ratio=1.0, prefill_block=1, prefill_key_block=256)
        state = call(backend, op, q, k, v, config=config)
    else:
        state = call(backend, op, q, k, v)
    peak = logits.max()
    assert abs(float(state.lse.item()) - (peak + np.log(np.exp(logits - peak).sum()))) < 1e-5


# the ends of a dtype, and rows without rank


def shaped(what: str, dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """``k``, ``v``, ``q`` and how far ``out`` may be off beside its rounding."""
    k, v, q = (rng.standard_normal(shape) for shape in ((1, 2, 48, 8), (1, 2, 48, 5), (1, 4, 2, 8)))
    if what == "largest values":
        return k, LARGEST[dtype] * rng.choice([1.0, -1.0, 1.0, 1.0], v.shape), q, 0.0
    if what == "largest and equal values":
        return 0 * k, np.full_like(v, LARGEST[dtype]), q, 0.0
    if what == "largest keys":
        size = LARGEST_KEYS[dtype]
        return size * rng.uniform(-1, 1, k.shape), v, rng.choice([-8.0, 8.0], q.shape) / size, 0.0
    if what == "subnormal":
        return TINY[dtype] * k, TINY[dtype] * v, q, 2.0**-24 if dtype == "float16" else 2.0**-126
    if what == "equal rows":
        return np.repeat(k[:, :, :1], 48, axis=2), np.repeat(v[:, :, :1], 48, axis=2), q, 0.0
    rank = {"rank one": 1, "rank three": 3}[what]
    return *(x[:, :, :, :rank] @ x[:, :, :rank] for x in (k, v)), q, 0.0


SHAPES = (
    "largest values",
    "largest and equal values",
    "largest keys",
    "subnormal",
    "equal rows",
    "rank one",
    "rank three",
)


@pytest.mark.parametrize("dtype", [*LARGEST])
@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("backend", CASE_BACKENDS[1:])
def test_ends_of_a_dtype_and_rows_without_rank(backend: str, what: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    k, v, q, apart = shaped(what, dtype, rng)
    for fmt in (EVERY_ROW, EXACT_ROWS):
        if fmt is EXACT_ROWS and what.startswith("largest"):
            fmt = BlockFormat(16, 5, 15, 16, 16)  # factors of what is far apart in size hold the larger half alone
        x = inputs(k, v, q, fmt, dtype)
        for op in ATTENTION:
            got, want = run(backend, op, x), run("reference", op, x)
            assert np.isfinite(wide(got.out)).all() and np.isfinite(got.lse).all(), (op, fmt)
            rounding = 2 * testing.ROUNDING[dtype] * np.abs(wide(want.out)).max()
            off = np.abs(wide(got.out) - wide(want.out)).max()
            assert off <= rounding + testing.SMALLEST[dtype] + apart, (op, fmt, off, rounding)
            np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_a_mean_of_the_largest_numbers_of_a_long_window_is_finite(backend: str) -> None:
    x = testing.make_inputs(0, batch=1, num_blocks=0, window=3000, head_dim=8, head_dim_v=3, dtype="bfloat16")
    v = np.full_like(x.v_window, LARGEST["bfloat16"])
    for op in ("exact_attention", "prefill_attention"):
        out = run(backend, op, x._replace(v_window=v)).out
        assert out.tobytes() == np.full_like(out, LARGEST["bfloat16"]).tobytes(), op


# NaN and infinity


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["q", "k_window", "v_window"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_what_is_not_finite_is_seen_where_it_is_seen(backend: str, part: str, bad: float) -> None:
    clean = testing.make_inputs(1, batch=2, num_q_heads=2, num_kv_heads=1, head_dim=8, head_dim_v=5, window=40,
                                num_blocks=2, q_len=3, dtype="float16")  # fmt: skip
    rows = np.array(getattr(clean, part))
    rows[0, 0, 1 if part == "q" else 38, 1] = bad  # query 1, or a row that queries 1 and 2 see
    dirty = clean._replace(**{part: rows})
    for op in ATTENTION:
        was, now = run(backend, op, clean), run(backend, op, dirty)
        law = run("reference", op, dirty)
        assert was.out[1].tobytes() == now.out[1].tobytes() and was.lse[1].tobytes() == now.lse[1].tobytes()
        for got, want in zip(now, law, strict=True):
            got, want = wide(got), wide(want)
            assert np.array_equal(np.isnan(got), np.isnan(want)), op
            assert np.array_equal(got[np.isinf(want)], want[np.isinf(want)]), op  # 65504 would be garbage
            some = np.isfinite(want)
            np.testing.assert_allclose(got[some], want[some], rtol=2e-3, atol=2e-3)
        assert not np.isfinite(wide(now.out[0])).all()
        if part != "v_window":
            seen = {"q": slice(1, 2), "k_window": slice(1, 3)}[part]
            others = np.delete(np.arange(3), seen)
            np.testing.assert_allclose(wide(now.out[:, :, others]), wide(was.out[:, :, others]), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_an_infinite_out_of_a_state_stays_infinite(backend: str) -> None:
    outs = np.array([[[[np.inf, 1, -np.inf]]], [[[2, 1, 2]]]], np.float16)[:, None]
    states = [AttentionState(out, np.zeros((1, 1, 1), np.float32)) for out in outs]
    merged = call(backend, "merge_states", states).out[0, 0, 0]
    assert merged.tolist() == [np.inf, 1.0, -np.inf]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_a_sink_that_is_not_finite_is_refused_and_minus_infinity_is_none(backend: str, op: str, bad: float) -> None:
    x = testing.make_inputs(2, num_q_heads=2, num_kv_heads=1, window=20, dtype="float16")
    with pytest.raises(ValueError, match="sink must be finite, or -inf for none"):
        run(backend, op, x, sink=np.array([0.5, bad], np.float32))
    none, without = run(backend, op, x, sink=np.full(2, -np.inf, np.float32)), run(backend, op, x)
    np.testing.assert_allclose(none.out, without.out, atol=1e-3)
    np.testing.assert_allclose(none.lse, without.lse, atol=1e-6)


def test_an_infinite_sink_that_only_a_device_sees_gives_nan() -> None:
    """Kernels that a cache calls are not checked before."""
    decode, prefill = (pytest.importorskip(f"dkv.kernels.torch.{op}") for op in ("decode", "prefill"))
    x = testing.make_inputs(2, num_q_heads=2, num_kv_heads=1, window=20, library="torch")
    sink = x.q.new_tensor([float("inf"), 0.5])
    rows = (x.q, x.k_window, x.v_window)
    every = sink.new_zeros(2, 1, 1, 1).int()
    for _, lse in (
        decode.exact_attention(*rows, True, None, None, None, sink, 0.2),
        prefill.prefill_attention(*rows, every, 32, 8, None, sink, 0.2),
    ):
        assert lse[:, 0].isnan().all() and lse[:, 1].isfinite().all()


@pytest.mark.parametrize("name", ["token_weight", "channel_weight", "sink"])
@pytest.mark.parametrize("kind", ["complex64", "bool"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_weights_and_sinks_are_real_numbers(backend: str, name: str, kind: str) -> None:
    x = testing.make_inputs(3, num_q_heads=2, num_kv_heads=1, window=20)
    shape = {"token_weight": x.k.shape[:1] + x.k.shape[2:3], "channel_weight": x.k.shape[1::2], "sink": (2,)}[name]
    given = {name: testing.to_library(np.ones(shape, kind), library(backend))}
    rows = testing.to_library((x.q, x.k, x.v), library(backend))
    with pytest.raises(TypeError, match=f"{name} must hold real numbers, got {kind}"):
        if name == "sink":
            dkv.exact_attention(*rows, **given, backend=backend)
        else:
            dkv.compress_blocks(*rows[1:], config=x.config, **given, backend=backend)


# through the caches

CACHE = dkv.DKVConfig(block_size=16, window=20, sink_tokens=6, rank=4, num_residuals=15, top_k=9)


def layer_of(kind: str) -> Any:
    return pytest.importorskip(f"dkv.cache.{'layer' if kind == 'torch' else 'mlx_layer'}").LayerCache(CACHE)


def step(layer: Any, q: Any, k: Any, v: Any) -> np.ndarray:
    if library_of(q) == "torch":
        return testing.to_numpy(layer.attend(q, k, v))
    layer.append(k, v)
    return testing.to_numpy(layer.attend(q))


def library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("kind", ["torch", "mlx"])
def test_a_token_that_is_not_finite_is_never_compressed(kind: str, part: int, bad: float) -> None:
    """Its row is seen until its block is due; that block is named with its tokens, and nothing changes."""
    made = testing.make_inputs(
        4, num_q_heads=2, num_kv_heads=1, head_dim=8, head_dim_v=6, num_blocks=0, window=80, q_len=80
    )
    rows = [made.q, made.k_window, made.v_window]
    rows[part][1, 0, 30, 2] = bad  # of tokens 22 to 37, the second block behind six sink tokens
    rows = testing.to_library(rows, kind)
    layer, loud = layer_of(kind), []
    for token in range(57):
        loud.append(not np.isfinite(step(layer, *(x[:, :, token : token + 1] for x in rows))).all())
    seen = all if np.isnan(bad) or part == 2 else any  # an infinite key is a logit of either sign
    assert not any(loud[:30]) and seen(loud[30:]) and layer.block_counts == [1, 1]
    message = "batch row 1, block 1 of the cache, tokens 22 to 37; nothing was compressed"
    for token in (57, 58):
        with pytest.raises(ValueError, match=f"NaN or infinity in {message}"):
            step(layer, *(x[:, :, token : token + 1] for x in rows))
        assert layer.block_counts == [1, 1] and layer.tokens == [token + 1] * 2


def test_a_model_names_the_layer_of_a_number_that_is_not_finite() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from dkv.integrations.transformers import DKVCache, attach

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **shape)
    ).eval()
    attach(model, CACHE)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("inf"))
        with pytest.raises(
            ValueError, match="layer 1: NaN or infinity in batch row 0, block 0 of the cache, tokens 6 to"
        ):
            model(torch.arange(45)[None], past_key_values=DKVCache(model))
