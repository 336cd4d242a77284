"""What a cache holds after some tokens is a function of the tokens: any chunks, any format, torch and mlx."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dkv
from dkv import testing
from dkv.config import HeadGroup

CONFIG = dkv.DKVConfig(block_size=16, window=20, sink_tokens=6, rank=4, num_residuals=5, top_k=2)
CONFIGS = [
    CONFIG,
    dkv.DKVConfig(block_size=16, window=20, sink_tokens=6, rank=3, num_residuals=15, router="keys", top_k=2),
    dkv.DKVConfig(block_size=16, window=1, sink_tokens=0, rank=3, num_residuals=4, residual_bits=16, keep="error"),
]
GROUPS = [
    None,
    (HeadGroup((1,), CONFIGS[0]), HeadGroup((0, 2), CONFIGS[1])),
    (HeadGroup((0, 1), CONFIGS[0]), HeadGroup((2,), None)),
]
few = settings(max_examples=max(5, settings().max_examples // 3))


def layer_of(kind: str, config: dkv.DKVConfig, groups: Any) -> Any:
    if kind == "torch":
        return pytest.importorskip("dkv.cache.layer").LayerCache(config, groups)
    return pytest.importorskip("dkv.cache.mlx_layer").LayerCache(config, groups)


def step(kind: str, layer: Any, q: Any, k: Any, v: Any) -> np.ndarray:
    """Append and attend a chunk."""
    if kind == "torch":
        return testing.to_numpy(layer.attend(q, k, v))
    layer.append(k, v)
    return testing.to_numpy(layer.attend(q))


@pytest.mark.parametrize("kind", ["torch", "mlx"])
@few
@given(data=st.data(), seed=st.integers(0, 2**31), length=st.sampled_from([150, 41, 42, 43, 26, 58, 5, 97]))
def test_the_state_depends_on_the_tokens_alone(kind: str, data: st.DataObject, seed: int, length: int) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    groups = data.draw(st.sampled_from(GROUPS)) if config is CONFIG else None
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    made = testing.make_inputs(seed, num_q_heads=6, num_kv_heads=3, head_dim=8, head_dim_v=6, num_blocks=0,
                               window=length, q_len=length, dtype=dtype, library=kind)  # fmt: skip
    q, k, v = made.q, made.k_window, made.v_window
    cuts = data.draw(st.lists(st.integers(1, length), max_size=5))
    held = []
    for edges in ([0, length], sorted({0, length, *cuts}), range(length + 1) if length < 60 else [0, 1, length]):
        layer = layer_of(kind, config, groups)
        for start, stop in zip(edges, list(edges)[1:]):
            last = step(kind, layer, *(x[:, :, start:stop] for x in (q, k, v)))
        rows = [testing.to_numpy(x)[:, :, : layer.rows[0]] for x in (layer.k_rows, layer.v_rows)]
        parts = [testing.to_numpy(part) for blocks in layer.blocks for _, part in blocks.parts()]
        held.append((layer.tokens, layer.rows, layer.block_counts, [x.tobytes() for x in (*rows, *parts)]))
        assert np.isfinite(last.astype(np.float64)).all()
    closed = max(0, length - min(length, config.sink_tokens) - config.window) // config.block_size
    assert held[0][:3] == ([length] * 2, [length - closed * config.block_size] * 2, [closed] * 2)
    assert all(one == held[0] for one in held[1:])
