"""Block-sparse prefill in the runtime: over exact rows, over closed blocks, and where the two meet."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.config import EVERY_POSITION, HeadGroup

torch = pytest.importorskip("torch")

SPARSE = dkv.DKVConfig(
    block_size=16,
    rank=4,
    num_residuals=5,
    window=24,
    sink_tokens=10,
    prefill_block=12,
    prefill_key_block=8,
    prefill_stride=5,
    prefill_window=9,
    prefill_mass=0.7,
    prefill_dense_below=0,
    prefill_tail=0,
)
EXACT = dataclasses.replace(SPARSE, window=10_000)
DENSE = {"prefill_dense_below": EVERY_POSITION}


def layer(config: dkv.DKVConfig, **options: Any) -> Any:
    from dkv.cache import LayerCache

    return LayerCache(config, **options)


def rows(seed: int, tokens: int, batch: int = 2, heads: int = 2, group: int = 3, dim: int = 6, dim_v: int = 6) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads * group, tokens, dim), (batch, heads, tokens, dim), (batch, heads, tokens, dim_v))
    return tuple(2 * torch.randn(shape, generator=generator) for shape in shapes)


def fed(cache: Any, parts: Any, lengths: Any, **options: Any) -> Any:
    outs, start = [], 0
    for length in lengths:
        chunk = [x[:, :, start : start + length] for x in parts]
        outs.append(cache.attend(*chunk, **options))
        start += length
    return torch.cat(outs, dim=2)


def all_rows(cache: Any, k: Any, v: Any) -> list[np.ndarray]:
    """Sink rows, what the blocks stand for, window and a chunk's own rows, of a cache of one group."""
    found = []
    rebuilt = dkv.reconstruct_blocks(cache.blocks[0]) if cache.blocks else (k[:, :, :0], v[:, :, :0])
    for held, closed, new in zip((cache.k_rows, cache.v_rows), rebuilt, (k, v), strict=True):
        held = new[:, :, :0] if held is None else held[:, :, : cache.rows[0]]
        sinks = cache.config.sink_tokens
        found.append(torch.cat([held[:, :, :sinks], closed, held[:, :, sinks:], new], dim=2).numpy())
    return found


def by_reference(q: Any, k: np.ndarray, v: np.ndarray, config: dkv.DKVConfig, **options: Any) -> np.ndarray:
    names = ("top_k", "ratio", "mass", "stride")
    limits = {name: getattr(config, f"prefill_{name}") for name in names}
    limits |= {"block_size": config.prefill_keys, "prefill_block": config.prefill_block}
    limits["prefill_window"] = config.prefill_window
    return op_module("reference", "prefill").prefill_attention(q.numpy(), k, v, **limits, **options)[0]


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(b).max()))


@settings(max_examples=max(6, settings().max_examples // 2))
@given(
    seed=st.integers(0, 2**31),
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([(2, 3), (1, 2), (3, 1)]),
    dims=st.sampled_from([(6, 6), (8, 5)]),
    residuals=st.sampled_from([5, 15, 0]),
    format=st.sampled_from(["compact", "fp32"]),
    sinks=st.sampled_from([10, 0, 16]),
    limits=st.sampled_from(
        [{}, {"prefill_top_k": 4, "prefill_mass": None}, {"prefill_ratio": 0.4}, {"prefill_key_block": 13}]
    ),
    softcap=st.sampled_from([None, 3.0]),
    with_sink=st.booleans(),
)
def test_a_compressed_past_is_the_rows_it_stands_for(
    seed: int, batch: int, heads: Any, dims: Any, residuals: int, format: str, sinks: int, limits: Any, softcap: Any,
    with_sink: bool,
) -> None:  # fmt: skip
    config = dataclasses.replace(SPARSE, num_residuals=residuals, format=format, sink_tokens=sinks, **limits)
    parts = rows(seed, 150, batch, *heads, *dims)
    sink = torch.randn(heads[0] * heads[1], generator=torch.Generator().manual_seed(seed)) if with_sink else None
    cache, start = layer(config), 0
    for length in (70, 37, 2, 41):
        q, k, v = (x[:, :, start : start + length] for x in parts)
        before = [x.clone() for x in (q, k, v)]
        want = by_reference(
            q, *all_rows(cache, k, v), config, softcap=softcap, sink=None if sink is None else sink.numpy()
        )
        close(cache.attend(q, k, v, softcap=softcap, sink=sink), want)
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
        start += length
    assert cache.block_counts == [(150 - sinks - 24) // 16] * batch


def test_one_workspace_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from dkv.cache import prefill

    parts, lengths = rows(3, 200), (90, 60, 50)
    whole = fed(layer(SPARSE), parts, lengths)
    for size in (1, 5000, 20_000):
        monkeypatch.setattr(prefill, "WORKSPACE_BYTES", size)
        close(fed(layer(SPARSE), parts, lengths), whole, 2e-6)


def test_chunks_of_whole_query_blocks_are_the_whole() -> None:
    parts = rows(4, 150)
    whole = fed(layer(EXACT), parts, [150])
    assert float((whole - fed(layer(dataclasses.replace(EXACT, **DENSE)), parts, [150])).abs().max()) > 0.01
    for lengths in ((12, 48, 90), (36, 60, 54)):
        close(fed(layer(EXACT), parts, lengths), whole, 2e-6)
    close(whole, by_reference(parts[0], parts[1].numpy(), parts[2].numpy(), EXACT))


@pytest.mark.parametrize("limits", [{"prefill_mass": 1.0}, {"prefill_mass": None, "prefill_top_k": 99}])
def test_every_block_selected_is_dense(limits: dict[str, Any]) -> None:
    """Over blocks too, whose dense attention is the decode ops' own."""
    parts, lengths = rows(5, 170), (80, 50, 40)
    config = dataclasses.replace(SPARSE, **limits)
    close(fed(layer(config), parts, lengths), fed(layer(dataclasses.replace(config, **DENSE)), parts, lengths))


def test_queries_below_the_stated_position_are_dense() -> None:
    parts = rows(6, 150)
    dense = fed(layer(dataclasses.replace(EXACT, **DENSE)), parts, [150])
    for below, lengths in ((50, [150]), (50, [30, 120]), (50, [50, 100])):
        got = fed(layer(dataclasses.replace(EXACT, prefill_dense_below=below)), parts, lengths)
        close(got[:, :, :below], dense[:, :, :below], 2e-6)
        want = by_reference(parts[0][:, :, below:], parts[1].numpy(), parts[2].numpy(), EXACT)
        close(got[:, :, below:], want)
    config = dataclasses.replace(SPARSE, prefill_dense_below=100)
    half, plain = (fed(layer(c), parts, [80, 70]) for c in (config, dataclasses.replace(SPARSE, **DENSE)))
    close(half[:, :, :100], plain[:, :, :100], 2e-6)
    assert float((half - plain)[:, :, 100:].abs().max()) > 0.01


def test_the_tail_of_a_chunk_is_dense() -> None:
    parts, config = rows(12, 150), dataclasses.replace(SPARSE, prefill_tail=20)
    for lengths in ([150], [80, 70], [140, 10]):
        got, sparse, dense = (
            fed(layer(c), parts, lengths) for c in (config, SPARSE, dataclasses.replace(SPARSE, **DENSE))
        )
        start = 0
        for length in lengths:
            tail = start + max(0, length - 20)
            close(got[:, :, tail : start + length], dense[:, :, tail : start + length], 2e-5)
            whole = tail - (tail - start) % 12  # query blocks are counted from the chunk's start
            if whole > start:
                close(got[:, :, start:whole], sparse[:, :, start:whole])
            start += length


def test_a_decode_step_is_not_prefill() -> None:
    parts = rows(7, 100)
    states = []
    for config in (EXACT, dataclasses.replace(EXACT, **DENSE)):
        cache = layer(config)
        cache._append(*(x[:, :, :99] for x in parts[1:]), None)
        states.append(cache.attend(*(x[:, :, 99:] for x in parts)))
    assert torch.equal(*states)


def test_a_chunk_that_routes_keeps_its_router() -> None:
    parts, config = rows(8, 150), dataclasses.replace(SPARSE, chunk_top_k=2, top_k=2)
    assert torch.equal(*(fed(layer(c), parts, [90, 60]) for c in (config, dataclasses.replace(config, **DENSE))))


def test_a_chunk_whose_first_token_alone_is_dense_attends_all_blocks_with_it() -> None:
    parts, config = rows(12, 150), dataclasses.replace(SPARSE, top_k=1)
    one, every = (fed(layer(dataclasses.replace(config, prefill_dense_below=n)), parts, [120, 30]) for n in (121, 150))
    close(one[:, :, 120], every[:, :, 120])


def test_padding_is_no_part_of_a_prompt() -> None:
    """Every sequence of a ragged batch is what it is alone."""
    parts, config = rows(9, 120), dataclasses.replace(SPARSE, prefill_dense_below=20)
    padding = torch.ones(2, 120, dtype=torch.bool)
    padding[0, :33] = padding[1, 70:75] = False
    cache, outs = layer(config), []
    for start, stop in ((0, 60), (60, 110), (110, 120)):
        outs.append(cache.attend(*(x[:, :, start:stop] for x in parts), padding=padding[:, start:stop]))
    got = torch.cat(outs, dim=2)
    for row in range(2):
        alone, out = layer(config), []
        for start, stop in ((0, 60), (60, 110), (110, 120)):
            real = padding[row, start:stop].nonzero().flatten() + start
            out.append(alone.attend(*(x[row : row + 1, :, real] for x in parts)))
        close(got[row : row + 1][:, :, padding[row]], torch.cat(out, dim=2))


def test_heads_without_a_say_have_their_window_and_forgotten_ones_their_rows() -> None:
    plain = dataclasses.replace(SPARSE, prefill_mass=1.0)
    parts, lengths = rows(10, 150, heads=3, group=2), (70, 40, 40)
    groups = (HeadGroup((0, 2), plain), HeadGroup((1,), None))
    cache = layer(plain, groups=groups, selects=(True, True, False))
    got = fed(cache, parts, lengths)
    every = layer(plain)
    full = fed(every, parts, lengths)
    close(got[:, :2], _first_group(parts, plain, groups, lengths)[:, :2])
    q, k, v = (x[:, :, 110:] for x in parts)
    exact = [torch.cat([x[:, 1:2, :10], x[:, 1:2, 74:110], n[:, 1:2]], dim=2) for x, n in zip(parts[1:], (k, v))]
    close(got[:, 2:4, 110:], by_reference(q[:, 2:4], *(x.numpy() for x in exact), plain))
    assert float((got[:, 4:] - full[:, 4:]).abs().max()) > 0.01
    mandatory = dataclasses.replace(plain, prefill_mass=None, prefill_top_k=1)
    close(got[:, 4:], _first_group(parts, mandatory, groups, lengths)[:, 2:])


def _first_group(parts: Any, config: dkv.DKVConfig, groups: Any, lengths: Any) -> Any:
    """The heads 0 and 2 alone, as a layer of two heads."""
    q, k, v = parts
    return fed(layer(config), (q[:, [0, 1, 4, 5]], k[:, [0, 2]], v[:, [0, 2]]), lengths)


def test_shares_of_heads_go_by_the_profile() -> None:
    from test_profile import profile

    made = profile()
    config = dkv.DKVConfig(profile=made, prefill_share=0.5)
    chosen = [config.prefill_heads(i, made.num_kv_heads) for i in range(made.num_layers)]
    ranked = made.ranked_heads()
    want = set(ranked[: round(0.5 * len(ranked))])
    assert {(i, h) for i, layer_heads in enumerate(chosen) for h, on in enumerate(layer_heads) if on} == want
    for share, on in ((0, False), (1, True)):
        assert dkv.DKVConfig(prefill_share=share).prefill_heads(0, 3) == (on,) * 3
    with pytest.raises(ValueError, match="prefill_share needs the profile"):
        dkv.DKVConfig(prefill_share=0.5).prefill_heads(0, 3)
    with pytest.raises(ValueError, match="config has a prefill_share"):
        layer(config)


def test_float16_rows() -> None:
    parts = [x.half() for x in rows(11, 120)]
    got = fed(layer(dataclasses.replace(SPARSE, format="fp16")), parts, (80, 40))
    want = fed(layer(SPARSE), [x.float() for x in parts], (80, 40))
    assert got.dtype == torch.float16 and testing.to_numpy(got).shape == (2, 6, 120, 6)
    assert float((got.float() - want)[:, :, :80].abs().max()) < 0.01


@pytest.mark.parametrize("case", ["plain", "pieces", "masks", "padding", "sink", "softcap", "groups"])
def test_a_dense_chunk_over_blocks_is_the_same_decoded_or_by_codes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dkv.cache import layer as layers
    from dkv.cache import prefill

    monkeypatch.setattr(prefill, "MASKED_QUERIES", 7 if case == "masks" else 512)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 4096 if case == "pieces" else 1 << 20)
    config = dataclasses.replace(SPARSE, **DENSE)
    options: dict[str, Any] = {"softcap": 3.0} if case == "softcap" else {}
    if case == "sink":
        options["sink"] = torch.linspace(-1, 2, 6)
    groups = [HeadGroup((1,), config), HeadGroup((0,), None)] if case == "groups" else None
    parts = rows(3, 120, dim_v=5)
    real = torch.ones(2, 120, dtype=torch.bool)
    if case == "padding":
        real[0, :30], real[1, 70:75] = False, False
    found = []
    for fewest in (1, 1 << 30):
        monkeypatch.setattr(layers, "FEWEST_QUERIES", fewest)
        cache, outs, start = layer(config, groups=groups), [], 0
        for length in (75, 1, 20, 24):
            chunk, padding = [x[:, :, start : start + length] for x in parts], real[:, start : start + length]
            outs.append(cache.attend(*chunk, padding=padding if case == "padding" else None, **options))
            start += length
        assert cache.blocks and cache.visited == 0
        found.append(torch.cat(outs, dim=2).transpose(1, 2)[real])
    close(*found, tolerance=2e-6)
