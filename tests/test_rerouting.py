"""A selection of blocks that several decode steps of the runtime share."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import dkv  # noqa: E402
from dkv.cache import LayerCache, layer  # noqa: E402

CONFIG = dkv.DKVConfig(block_size=16, rank=5, window=21, sink_tokens=3, top_k=2, route_every=4)
SHAPE = {"q": (2, 6, 40), "k": (2, 3, 40), "v": (2, 3, 24)}  # batch, heads, dim


def rows(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, length, d, generator=generator) for b, h, d in SHAPE.values()]


@pytest.fixture
def routed(monkeypatch):
    """What every call of the router gave; the first steps are as any others."""
    calls = []
    monkeypatch.setattr(layer, "FIRST_STEPS", 0)

    def spy(*args):
        calls.append(dkv.route_blocks(args[0], args[1], top_k=args[2], router=args[3], sink_blocks=args[6]))
        return calls[-1]

    monkeypatch.setattr(layer, "route_blocks", spy)
    return calls


def filled(tokens: int, **changes) -> LayerCache:
    state = LayerCache(dkv.DKVConfig(**{**CONFIG.to_dict(), "tiers": (), **changes}))
    state.attend(*rows(tokens, seed=0))
    return state


def test_steps_in_between_attend_the_same_blocks_and_their_own_window(routed):
    state = filled(3 + 5 * 16 + 21)
    for step in range(10):
        q, k, v = rows(1, seed=step + 1)
        stored = ((state.k_rows, k), (state.v_rows, v))
        exact = [torch.cat([old[:, :, : state.rows[0]], new], dim=2) for old, new in stored]
        out = state.attend(q, k, v)
        wanted = dkv.decode_attention(q, state.blocks[0], *exact, block_indices=routed[step // 4])
        torch.testing.assert_close(out, wanted.out, rtol=1e-5, atol=1e-5)
    assert len(routed) == 3


@pytest.mark.parametrize("every", [1, 3, 100])
def test_how_often_the_router_runs(routed, every):
    state = filled(3 + 5 * 16 + 21, route_every=every)
    for step in range(13):  # none of them closes a block
        state.attend(*rows(1, seed=step))
    assert len(routed) == -(-13 // every)


def test_the_first_steps_after_a_chunk_have_selections_of_their_own(routed, monkeypatch):
    monkeypatch.setattr(layer, "FIRST_STEPS", 3)
    state = filled(3 + 5 * 16 + 21, route_every=4)
    seen = []
    for step in range(9):
        state.attend(*rows(1, seed=step))
        seen.append(len(routed))
    assert seen == [1, 2, 3, 3, 3, 3, 4, 4, 4]
    state.attend(*rows(2, seed=0))
    for step in range(2):
        state.attend(*rows(1, seed=step))
    assert len(routed) == 6


def test_a_block_that_closes_ends_a_selection(routed):
    state = filled(3 + 5 * 16 + 21 + 14, route_every=100)
    for step in range(4):
        state.attend(*rows(1, seed=step))
    assert state.block_counts == [6, 6] and len(routed) == 2
    assert routed[0].shape == routed[1].shape == (2, 3, 2)


@pytest.mark.parametrize("change", ["chunk", "crop", "select", "configure", "reset"])
def test_what_ends_a_selection(routed, change):
    state = filled(3 + 5 * 16 + 21, route_every=100)
    state.attend(*rows(1, seed=1))
    state.attend(*rows(1, seed=2))
    assert len(routed) == 1
    if change == "chunk":
        state.attend(*rows(2, seed=3))
    elif change == "crop":
        state.crop(1)
    elif change == "select":
        state.select([1, 0])
    elif change == "configure":
        state.configure(dkv.DKVConfig(**{**state.config.to_dict(), "tiers": (), "top_k": 3}))
    else:
        state.reset()
        state.attend(*rows(3 + 5 * 16 + 21, seed=0))
    out = state.attend(*rows(1, seed=4))
    assert len(routed) == 2 and out.isfinite().all()


def test_a_copy_goes_on_alone(routed):
    state = filled(3 + 5 * 16 + 21, route_every=3)
    state.attend(*rows(1, seed=1))
    twin = copy.deepcopy(state)
    for seed in (2, 3, 4):
        first, second = state.attend(*rows(1, seed=seed)), twin.attend(*rows(1, seed=seed))
        assert torch.equal(first, second)
    assert len(routed) == 3


def test_route_every_is_checked():
    for bad, error in ((0, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="route_every must be"):
            dkv.DKVConfig(route_every=bad)
