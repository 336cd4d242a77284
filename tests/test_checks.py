"""Every public op refuses what it cannot take, and says which argument, what came and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from strategies import ALL_BACKENDS, library

import dkv
from dkv import _dispatch, testing
from dkv.types import AttentionState, BlockFormat

SHAPE = {"batch": 2, "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 20, "num_blocks": 3}
OPS = [
    *("compress_blocks", "reconstruct_blocks", "route_blocks", "lowrank_attention", "residual_attention"),
    *("exact_attention", "decode_attention", "merge_states", "prefill_attention"),
]


def arguments(op: str, kind: str) -> dict[str, Any]:
    """A call of ``op`` that works, by name."""
    made = testing.make_inputs(0, **SHAPE, window=13, library=kind)
    indices = testing.to_library(np.zeros((2, 2, 2), np.int32), kind)
    state = testing.to_library(AttentionState(zeros(2, 6, 1, 20), zeros(2, 6, 1)), kind)
    return {
        "compress_blocks": {"k": made.k, "v": made.v, "config": made.config},
        "reconstruct_blocks": {"blocks": made.blocks},
        "route_blocks": {"q": made.q, "blocks": made.blocks},
        "lowrank_attention": {"q": made.q, "blocks": made.blocks, "block_indices": indices},
        "residual_attention": {"q": made.q, "blocks": made.blocks, "block_indices": indices},
        "exact_attention": {"q": made.q, "k": made.k_window, "v": made.v_window},
        "decode_attention": {
            **{"q": made.q, "blocks": made.blocks, "k_window": made.k_window, "v_window": made.v_window},
            **{"block_indices": indices},
        },
        "merge_states": {"states": [state, state]},
        "prefill_attention": {"q": made.q, "k": made.k_window, "v": made.v_window},
    }[op]


def refuse(op: str, backend: str, error: type[Exception], message: str, **wrong: Any) -> None:
    """``op`` with some arguments replaced; arrays are given in NumPy."""
    kind = library(backend)
    given = arguments(op, kind)
    given |= {name: testing.to_library(x, kind) if isinstance(x, np.ndarray) else x for name, x in wrong.items()}
    with pytest.raises(error, match=message):
        getattr(dkv, op)(**given, backend=backend)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_calls_that_these_tests_spoil_do_work(backend: str, op: str) -> None:
    getattr(dkv, op)(**arguments(op, library(backend)), backend=backend)


NAN = np.float32("nan")
SHAPES = {
    "compress_blocks": [
        ("k", zeros(2, 48, 24), r"k must have shape \[B, Hkv, N, D\], got \[2, 48, 24\]"),
        ("v", zeros(2, 2, 48), r"v must have shape \[2, 2, 48, Dv\], got \[2, 2, 48\]"),
        ("v", zeros(2, 3, 48, 20), r"v must have shape \[2, 2, 48, Dv\], got \[2, 3, 48, 20\]"),
        ("v", zeros(2, 2, 32, 20), r"v must have shape \[2, 2, 48, Dv\]"),
        ("v", zeros(2, 2, 48, 0), "k and v need heads and channels"),
        ("token_weight", zeros(2, 47), r"token_weight must have shape \[2, 48\], got \[2, 47\]"),
        ("token_weight", zeros(48), r"token_weight must have shape \[2, 48\], got \[48\]"),
        ("token_weight", np.full((2, 48), -1.0, np.float32), "token_weight must be finite and not negative"),
        ("token_weight", np.full((2, 48), NAN), "token_weight must be finite and not negative"),
        ("token_weight", np.full((2, 48), np.float32("inf")), "token_weight must be finite and not negative"),
        ("channel_weight", zeros(2, 20), r"channel_weight must have shape \[2, 24\], got \[2, 20\]"),
        ("channel_weight", zeros(6, 24), r"channel_weight must have shape \[2, 24\], got \[6, 24\]"),
        ("channel_weight", zeros(24), r"channel_weight must have shape \[2, 24\], got \[24\]"),
        ("channel_weight", np.full((2, 24), -1.0, np.float32), "channel_weight must be finite and not negative"),
        ("channel_weight", np.full((2, 24), NAN), "channel_weight must be finite and not negative"),
        ("channel_weight", np.full((2, 24), np.float32("inf")), "channel_weight must be finite and not negative"),
    ],
    "route_blocks": [
        ("q", zeros(2, 6, 24), r"q must have shape \[2, Hq, Sq, 24\], got \[2, 6, 24\]"),
        ("q", zeros(3, 6, 1, 24), r"q must have shape \[2, Hq, Sq, 24\], got \[3, 6, 1, 24\]"),
        ("q", zeros(2, 6, 1, 20), r"q must have shape \[2, Hq, Sq, 24\]"),
        ("q", zeros(2, 5, 1, 24), r"q must have a multiple of 2 heads \(kv heads\), got 5"),
        ("q", zeros(2, 0, 1, 24), r"q must have a multiple of 2 heads \(kv heads\), got 0"),
    ],
    "lowrank_attention": [
        ("q", zeros(2, 6, 1, 20), r"q must have shape \[2, Hq, Sq, 24\]"),
        ("q", zeros(2, 5, 1, 24), "q must have a multiple of 2 heads"),
        ("block_indices", zeros(2, 2, dtype=np.int32), r"block_indices must have shape \[2, 2, W\], got \[2, 2\]"),
        ("block_indices", zeros(2, 6, 2, dtype=np.int32), r"block_indices must have shape \[2, 2, W\], got \[2, 6"),
        ("block_indices", zeros(1, 2, 2, dtype=np.int32), r"block_indices must have shape \[2, 2, W\]"),
    ],
    "exact_attention": [
        ("q", zeros(6, 1, 24), r"q must have shape \[B, Hq, Sq, D\], got \[6, 1, 24\]"),
        ("q", zeros(2, 5, 1, 24), "q must have a multiple of 2 heads"),
        ("k", zeros(2, 13, 24), r"k must have shape \[2, Hkv, Sk, 24\], got \[2, 13, 24\]"),
        ("k", zeros(2, 2, 13, 20), r"k must have shape \[2, Hkv, Sk, 24\]"),
        ("v", zeros(2, 2, 12, 20), r"v must have shape \[2, 2, 13, Dv\], got \[2, 2, 12, 20\]"),
        ("v", zeros(2, 1, 13, 20), r"v must have shape \[2, 2, 13, Dv\]"),
        ("seq_lens", zeros(3, dtype=np.int32), r"seq_lens must have shape \[2\], got \[3\]"),
        ("seq_lens", np.array([-1, 3], np.int32), r"seq_lens must be 0\.\.13, got -1\.\.3"),
        ("seq_lens", np.array([0, 14], np.int32), r"seq_lens must be 0\.\.13, got 0\.\.14"),
        ("sink", zeros(2), r"sink must have shape \[6\], got \[2\]"),
        ("sink", zeros(1, 6), r"sink must have shape \[6\]"),
    ],
    "decode_attention": [
        ("q", zeros(2, 6, 1, 20), r"q must have shape \[2, Hq, Sq, 24\]"),
        ("k_window", zeros(2, 2, 13, 20), r"k_window must have shape \[2, 2, Sw, 24\]"),
        ("k_window", zeros(2, 6, 13, 24), r"k_window must have shape \[2, 2, Sw, 24\]"),
        ("v_window", zeros(2, 2, 12, 20), r"v_window must have shape \[2, 2, 13, 20\], got \[2, 2, 12, 20\]"),
        ("v_window", zeros(2, 2, 13, 24), r"v_window must have shape \[2, 2, 13, 20\]"),
        ("seq_lens", np.array([0, 14], np.int32), r"seq_lens must be 0\.\.13"),
        ("block_indices", zeros(2, 3, 2, dtype=np.int32), r"block_indices must have shape \[2, 2, W\]"),
        ("sink", zeros(2), r"sink must have shape \[6\]"),
    ],
    "prefill_attention": [
        ("q", zeros(2, 6, 24), r"q must have shape \[B, Hq, Sq, D\]"),
        ("q", zeros(2, 3, 1, 24), "q must have a multiple of 2 heads"),
        ("k", zeros(1, 2, 13, 24), r"k must have shape \[2, Hkv, Sk, 24\]"),
        ("v", zeros(2, 2, 14, 20), r"v must have shape \[2, 2, 13, Dv\]"),
        ("block_indices", zeros(2, 2, 2, 1, dtype=np.int32), r"block_indices must have shape \[2, 2, 1, W\]"),
        ("sink", zeros(5), r"sink must have shape \[6\]"),
    ],
}
SHAPES["residual_attention"] = SHAPES["lowrank_attention"]


@pytest.mark.parametrize(("op", "index"), [(op, i) for op, cases in SHAPES.items() for i in range(len(cases))])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_shapes_and_values_that_do_not_fit(backend: str, op: str, index: int) -> None:
    name, array, message = SHAPES[op][index]
    refuse(op, backend, ValueError, message, **{name: array})


FLOATS = {
    "compress_blocks": ("k",),
    "route_blocks": ("q",),
    "lowrank_attention": ("q",),
    "residual_attention": ("q",),
    "exact_attention": ("q", "k", "v"),
    "decode_attention": ("q", "k_window", "v_window"),
    "prefill_attention": ("q", "k", "v"),
}


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.bool_])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in FLOATS.items() for name in names])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_dtypes_that_no_op_takes(backend: str, op: str, name: str, dtype: Any) -> None:
    array = testing.to_numpy(arguments(op, "numpy")[name]).astype(dtype)
    message = rf"{name} must be one of \('float16', 'bfloat16', 'float32'\), got {np.dtype(dtype).name}"
    refuse(op, backend, TypeError, message, **{name: array})


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_keys_and_values_of_two_dtypes(backend: str) -> None:
    message = r"v must have the dtype of k \(float32\), got float16"
    refuse("compress_blocks", backend, TypeError, message, v=zeros(2, 2, 48, 20, dtype=np.float16))


@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        ("lowrank_attention", "block_indices", (2, 2, 2)),
        ("residual_attention", "block_indices", (2, 2, 2)),
        ("decode_attention", "block_indices", (2, 2, 2)),
        ("prefill_attention", "block_indices", (2, 2, 1, 1)),
        ("exact_attention", "seq_lens", (2,)),
        ("decode_attention", "seq_lens", (2,)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_indices_and_lengths_are_signed_integers(
    backend: str, dtype: Any, op: str, name: str, shape: tuple[int, ...]
) -> None:
    message = f"{name} must hold signed integers, got {np.dtype(dtype).name}"
    refuse(op, backend, TypeError, message, **{name: zeros(*shape, dtype=dtype)})


SETTINGS = [
    ("route_blocks", {"top_k": 0}, ValueError, "top_k must be 1 or more, got 0"),
    ("route_blocks", {"top_k": -3}, ValueError, "top_k must be 1 or more, got -3"),
    ("route_blocks", {"top_k": True}, TypeError, "top_k must be an int, got True"),
    ("route_blocks", {"top_k": 2.0}, TypeError, r"top_k must be an int, got 2\.0"),
    ("route_blocks", {"top_k": None}, TypeError, "top_k must be an int, got None"),
    ("route_blocks", {"sink_blocks": -1}, ValueError, "sink_blocks must be 0 or more, got -1"),
    ("route_blocks", {"recent_blocks": "1"}, TypeError, "recent_blocks must be an int, got '1'"),
    ("route_blocks", {"top_k": 2, "recent_blocks": 2}, ValueError, r"sink_blocks \+ recent_blocks \(1 \+ 2\) must not"),
    ("route_blocks", {"router": "best"}, ValueError, r"router must be one of .*lowrank.*, got 'best'"),
    ("route_blocks", {"router": ["lowrank"]}, ValueError, "router must be one of"),
    ("route_blocks", {"router": "minmax"}, ValueError, "router 'minmax' needs k_min and k_max"),
    ("route_blocks", {"share": "none"}, ValueError, r"share must be one of .*kv_head.*, got 'none'"),
    ("route_blocks", {"sm_scale": 0.0}, ValueError, r"sm_scale must be a positive finite number, got 0\.0"),
    ("route_blocks", {"sm_scale": float("nan")}, ValueError, "sm_scale must be a positive finite number, got nan"),
    ("route_blocks", {"blocks": 3}, TypeError, "blocks must be CompressedBlocks, got int"),
    ("reconstruct_blocks", {"blocks": None}, TypeError, "blocks must be CompressedBlocks, got NoneType"),
    ("exact_attention", {"window": 0}, ValueError, "window must be 1 or more, got 0"),
    ("exact_attention", {"window": True}, TypeError, "window must be an int, got True"),
    ("exact_attention", {"window": 1.5}, TypeError, r"window must be an int, got 1\.5"),
    ("exact_attention", {"lse_base": "10"}, ValueError, r"lse_base must be one of .*'e'.*, got '10'"),
    ("exact_attention", {"q": [1.0]}, TypeError, r"q must be an array \[B, Hq, Sq, D\], got list"),
    ("exact_attention", {"k": None}, TypeError, r"k must be an array \[B, Hkv, Sk, D\], got NoneType"),
    ("decode_attention", {"window": -2}, ValueError, "window must be 1 or more, got -2"),
    ("decode_attention", {"v_window": None}, ValueError, "k_window and v_window go together"),
    ("decode_attention", {"blocks": "x"}, TypeError, "blocks must be CompressedBlocks, got str"),
    ("decode_attention", {"config": {"top_k": 2}}, TypeError, "config must be a DKVConfig, got dict"),
    ("prefill_attention", {"config": 3}, TypeError, "config must be a DKVConfig, got int"),
    ("compress_blocks", {"config": BlockFormat()}, TypeError, "config must be a DKVConfig, got BlockFormat"),
    ("compress_blocks", {"config": dkv.DKVConfig()}, ValueError, "multiple of block_size=256 tokens, got 48"),
    (
        "compress_blocks",
        {"k": zeros(2, 2, 48, 257), "config": dkv.DKVConfig(block_size=16, key_bits=(8, 4, 4, 4, 4, 4, 4, 4))},
        ValueError,
        "k must have at most 256 channels where key_bits differ, got 257",
    ),
    ("compress_blocks", {"k": 1.0}, TypeError, r"k must be an array \[B, Hkv, N, D\], got float"),
    ("exact_attention", {"causal": 1}, TypeError, "causal must be a bool, got 1"),
    ("merge_states", {"states": [(zeros(1, 1, 1, 1),)]}, TypeError, r"states\[0\] must be an AttentionState, got tup"),
    ("merge_states", {"states": [zeros(2, 1, 1, 1)]}, TypeError, r"states\[0\] must be an AttentionState, got ndarr"),
    ("merge_states", {"states": []}, ValueError, "states must hold at least one AttentionState"),
]
SCALED = ["lowrank_attention", "residual_attention", "exact_attention", "decode_attention", "prefill_attention"]
for op_name in SCALED:
    SETTINGS += [
        (op_name, {"softcap": 0.0}, ValueError, r"softcap must be a positive finite number, got 0\.0"),
        (op_name, {"softcap": True}, TypeError, "softcap must be a number, got True"),
        (op_name, {"softcap": float("inf")}, ValueError, "softcap must be a positive finite number, got inf"),
        (op_name, {"sm_scale": -1.0}, ValueError, r"sm_scale must be a positive finite number, got -1\.0"),
        (op_name, {"sm_scale": "1"}, TypeError, "sm_scale must be a number, got '1'"),
    ]


@pytest.mark.parametrize(("op", "wrong", "error", "message"), SETTINGS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_settings_that_are_not_allowed(
    backend: str, op: str, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    refuse(op, backend, error, message, **wrong)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_states_that_do_not_fit_one_another(backend: str) -> None:
    kind = library(backend)

    def state(*shape: int, lse: tuple[int, ...] | None = None) -> AttentionState:
        return testing.to_library(AttentionState(zeros(*shape), zeros(*(lse or shape[:3]))), kind)

    good = state(2, 6, 1, 20)
    for bad, message in (
        (state(2, 6, 1, 21), r"states\[1\]\.out must have shape \[2, 6, 1, 20\], got \[2, 6, 1, 21\]"),
        (state(2, 5, 1, 20), r"states\[1\]\.out must have shape"),
        (state(2, 6, 1, 20, lse=(2, 6)), r"states\[1\]\.lse must have shape \[2, 6, 1\], got \[2, 6\]"),
        (state(2, 6, 1, 20, lse=(2, 1, 6)), r"states\[1\]\.lse must have shape \[2, 6, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dkv.merge_states([good, bad], backend=backend)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_states_of_other_dtypes(backend: str) -> None:
    kind = library(backend)
    for state, message in (
        (AttentionState(zeros(2, 6, 1, 20), zeros(2, 6, 1, dtype=np.float16)), r"lse must be float32, got float16"),
        (AttentionState(zeros(2, 6, 1, 20), zeros(2, 6, 1, dtype=np.float64)), r"lse must be float32, got float64"),
        (AttentionState(zeros(2, 6, 1, 20, dtype=np.int32), zeros(2, 6, 1)), r"out must be one of .*, got int32"),
    ):
        with pytest.raises(TypeError, match=rf"states\[0\]\.{message}"):
            dkv.merge_states([testing.to_library(state, kind)], backend=backend)


@pytest.mark.parametrize("format_name", ["fp16", "bf16"])
def test_factors_of_another_half_precision(format_name: str) -> None:
    config = dkv.DKVConfig(block_size=16, format=format_name)
    other = {"fp16": "bfloat16", "bf16": "float16"}[format_name]
    made = testing.make_inputs(1, dtype=other)
    with pytest.raises(ValueError, match=f"format '{format_name}' cannot store factors of a {other} cache"):
        dkv.compress_blocks(made.k, made.v, config=config)


@pytest.mark.parametrize("op", OPS)
def test_a_backend_that_does_not_exist(op: str) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*'reference'.*or None, got 'cuda'"):
        getattr(dkv, op)(**arguments(op, "numpy"), backend="cuda")


@pytest.mark.parametrize("op", OPS)
def test_a_backend_of_another_library(op: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="backend 'torch' takes torch arrays, got numpy"):
        getattr(dkv, op)(**arguments(op, "numpy"), backend="torch")
    with pytest.raises(TypeError, match="backend 'reference' takes numpy arrays, got torch"):
        getattr(dkv, op)(**arguments(op, "torch"), backend="reference")


MIXED = {
    "compress_blocks": ("v", "token_weight", "channel_weight"),
    "route_blocks": ("q",),
    "lowrank_attention": ("q", "block_indices"),
    "residual_attention": ("q", "block_indices"),
    "exact_attention": ("q", "k", "v", "seq_lens", "sink"),
    "decode_attention": ("q", "k_window", "v_window", "block_indices", "seq_lens", "sink"),
    "prefill_attention": ("q", "k", "v", "sink", "block_indices"),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in MIXED.items() for name in names])
def test_arrays_of_two_libraries(op: str, name: str) -> None:
    pytest.importorskip("torch")
    optional = {
        "token_weight": zeros(2, 48),
        "channel_weight": zeros(2, 24),
        "seq_lens": zeros(2, dtype=np.int32),
        "sink": zeros(6),
    }
    if op == "prefill_attention":
        optional["block_indices"] = zeros(2, 2, 1, 1, dtype=np.int32)
    given, torch_given = arguments(op, "numpy"), arguments(op, "torch")
    given[name] = torch_given[name] if name in torch_given else testing.to_library(optional[name], "torch")
    with pytest.raises(TypeError, match=r"arrays must come from one library, got \{.*'torch'.*\}"):
        getattr(dkv, op)(**given)


def test_states_of_two_libraries() -> None:
    pytest.importorskip("torch")
    states = [arguments("merge_states", kind)["states"][0] for kind in ("numpy", "torch")]
    with pytest.raises(TypeError, match=r"arrays must come from one library, got \{.*states\[1\]\.out.*'torch'"):
        dkv.merge_states(states)


def test_arrays_of_no_known_library() -> None:
    class Array:
        shape, dtype = (2, 6, 1, 24), "float32"

    given = arguments("exact_attention", "numpy") | {"q": Array()}
    with pytest.raises(TypeError, match=r"q must be a NumPy, torch or mlx array, got .*Array"):
        dkv.exact_attention(**given)


@pytest.mark.parametrize("op", OPS)
def test_a_backend_that_cannot_run_gives_its_reason(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "unavailable_reason", lambda backend: 'it is not installed: pip install "dkv[x]"')
    with pytest.raises(ImportError, match=r"backend 'reference' is not available: .*pip install \"dkv\[x\]\""):
        getattr(dkv, op)(**arguments(op, "numpy"), backend="reference")


def test_reasons_are_those_of_the_list() -> None:
    pytest.importorskip("torch")
    available = dkv.available_backends()
    assert list(available) == ["reference", "torch", "triton", "mlx", "mlx-metal", "mlx-twin"]
    assert available["reference"] is None
    reason = available["triton"]
    if reason is not None:
        with pytest.raises(ImportError) as raised:
            dkv.exact_attention(**arguments("exact_attention", "torch"), backend="triton")
        assert str(raised.value) == f"backend 'triton' is not available: {reason}"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rank": 129}, ValueError, r"rank must be 0\.\.128, got 129"),
        ({"rank": True}, TypeError, "rank must be an int, got True"),
        ({"block_size": 257}, ValueError, r"block_size must be 1\.\.256, got 257"),
        ({"block_size": 16.0}, TypeError, r"block_size must be an int, got 16\.0"),
        ({"num_residuals": -1}, ValueError, "num_residuals must be 0 or more, got -1"),
        ({"factor_bits": 4}, ValueError, r"factor_bits must be one of \(8, 16, 32\), got 4"),
        ({"residual_bits": 0}, ValueError, r"residual_bits must be 1\.\.8 or 16, got 0"),
        ({"residual_bits": 9}, ValueError, r"residual_bits must be 1\.\.8 or 16, got 9"),
        ({"residual_bits": True}, ValueError, r"residual_bits must be 1\.\.8 or 16, got True"),
        ({"key_bits": 4}, TypeError, "key_bits must be a tuple of 8 ints, got 4"),
        ({"key_bits": "88888888"}, TypeError, "key_bits must be a tuple of 8 ints, got '88888888'"),
        ({"key_bits": (4,) * 7}, ValueError, r"key_bits must be 8 widths of 0\.\.8, never rising, got \(4, 4"),
        ({"key_bits": (4,) * 9}, ValueError, "key_bits must be 8 widths"),
        ({"key_bits": (8, 4, 4, 4, 5, 2, 2, 0)}, ValueError, "key_bits must be 8 widths .*never rising"),
        ({"key_bits": (9, 4, 4, 4, 4, 2, 2, 0)}, ValueError, "key_bits must be 8 widths"),
        ({"key_bits": (8, 4, 4, 4, 4, 2, 2, -1)}, ValueError, "key_bits must be 8 widths"),
        ({"key_bits": (8, 4.0, 4, 4, 4, 2, 2, 0)}, ValueError, "key_bits must be 8 widths"),
        ({"key_bits": (4,) * 8, "residual_bits": 16}, ValueError, "key_bits must be None where rows are exact, got"),
        ({"value_bits": 4, "residual_bits": 16}, ValueError, "value_bits must be None where rows are exact, got 4"),
        ({"value_bits": 9}, ValueError, r"value_bits must be 0\.\.8, got 9"),
        ({"value_bits": -1}, ValueError, r"value_bits must be 0\.\.8, got -1"),
        ({"value_bits": 2.0}, ValueError, r"value_bits must be 0\.\.8, got 2\.0"),
        ({"minmax": 1}, TypeError, "minmax must be a bool, got 1"),
    ],
)
def test_formats_that_do_not_exist(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockFormat(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"block_size": 1}, ValueError, r"block_size must be 2\.\.256, got 1"),
        ({"rank": -1}, ValueError, r"rank must be 0\.\.128, got -1"),
        ({"top_k": 1.0}, TypeError, r"top_k must be an int, got 1\.0"),
        ({"window": False}, TypeError, "window must be an int, got False"),
        ({"keep": "all"}, ValueError, r"keep must be one of .*distinct.*, got 'all'"),
        ({"format": "fp8"}, ValueError, r"format must be one of .*compact.*, got 'fp8'"),
        ({"residual_bits": 10}, ValueError, r"residual_bits must be 1\.\.8 or 16, got 10"),
        ({"key_bits": (4,) * 3}, ValueError, "key_bits must be 8 widths"),
        ({"format": "fp32", "key_bits": (4,) * 8}, ValueError, "key_bits must be None where rows are exact"),
        ({"router": "values"}, ValueError, "router must be one of .*'keys'.*, got 'values'"),
        ({"prefill_top_k": 0}, ValueError, "prefill_top_k must be 1 or more, got 0"),
        ({"prefill_key_block": 0}, ValueError, "prefill_key_block must be 1 or more, got 0"),
        ({"prefill_stride": 1.5}, TypeError, r"prefill_stride must be an int, got 1\.5"),
        ({"prefill_ratio": 0}, ValueError, "prefill_ratio must be above 0, got 0"),
        ({"prefill_mass": 1.2}, ValueError, r"prefill_mass must be 0\.\.1, got 1\.2"),
        ({"prefill_mass": float("nan")}, ValueError, r"prefill_mass must be 0\.\.1, got nan"),
        ({"prefill_mass": "all"}, TypeError, "prefill_mass must be a number, got 'all'"),
        ({"prefill_share": None}, TypeError, "prefill_share must be a number, got None"),
        ({"prefill_dense_below": -1}, ValueError, "prefill_dense_below must be 0 or more, got -1"),
        ({"prefill_tail": -1}, ValueError, "prefill_tail must be 0 or more, got -1"),
    ],
)
def test_configs_that_do_not_exist(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dkv.DKVConfig(**settings)
    with pytest.raises(ValueError, match=r"unknown config fields \['bits'\]"):
        dkv.DKVConfig.from_dict(dataclasses.asdict(dkv.DKVConfig()) | {"bits": 4})


@pytest.mark.parametrize("states", [None, 3, "one state"])
def test_what_is_no_sequence_of_states(states):
    named = "states must be a sequence" if not isinstance(states, str) else r"states\[0\] must be an AttentionState"
    with pytest.raises(TypeError, match=named):
        dkv.merge_states(states)
    state = dkv.AttentionState(np.ones((1, 2, 1, 3), np.float32), np.zeros((1, 2, 1), np.float32))
    np.testing.assert_allclose(dkv.merge_states(each for each in [state, state]).lse, np.log(2), rtol=1e-6)
    with pytest.raises(TypeError, match="states must be a sequence"):
        dkv.merge_states(state)
    with pytest.raises(TypeError, match="config must be a mapping"):
        dkv.DKVConfig.from_dict(None)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_more_than_there_is(backend):
    """Query blocks and windows beyond all rows cost and change nothing."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, h, 40, 8), np.float32) for i, h in enumerate((4, 2, 2)))
    wide = dkv.DKVConfig(prefill_block=10**9, prefill_window=2**62, prefill_key_block=8, prefill_top_k=1)
    args = [testing.to_library(each, library(backend)) for each in (q, k, v)]
    got = testing.to_numpy(dkv.prefill_attention(*args, config=wide, backend=backend))
    want = dkv.exact_attention(q, k, v, backend="reference")
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    with pytest.raises(ValueError, match="q must have at least one channel"):
        dkv.exact_attention(args[0][..., :0], args[1][..., :0], args[2], backend=backend)
