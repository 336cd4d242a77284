"""A scan of every block that several decode steps of the runtime share, and a selection that they share."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import dkv  # noqa: E402
from dkv._dispatch import op_module  # noqa: E402
from dkv.cache import LayerCache, routing  # noqa: E402
from dkv.kernels.torch import route  # noqa: E402

CONFIG = dkv.DKVConfig(block_size=16, rank=5, window=21, sink_tokens=3, top_k=2, route_every=4, route_candidates=0)
SHAPE = {"q": (2, 6, 40), "k": (2, 3, 40), "v": (2, 3, 24)}  # batch, heads, dim


def rows(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, length, d, generator=generator) for b, h, d in SHAPE.values()]


@pytest.fixture
def routed(monkeypatch):
    """What every call of the router gave; the first steps are as any others."""
    calls = []
    monkeypatch.setattr(routing, "FIRST_STEPS", 0)

    def spy(*args):
        calls.append(dkv.route_blocks(args[0], args[1], top_k=args[2], router=args[3], sink_blocks=args[6]))
        return calls[-1]

    monkeypatch.setattr(routing, "route_blocks", spy)
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
    monkeypatch.setattr(routing, "FIRST_STEPS", 3)
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


@pytest.fixture
def scans(monkeypatch):
    """How many blocks each call scored; every step may go by candidates."""
    scored = []
    monkeypatch.setattr(routing, "FIRST_STEPS", 0)
    for name in ("route_scores", "candidate_scores"):
        real = getattr(route, name)

        def spy(q, among, *args, name=name, real=real):
            scored.append((name, among.num_blocks if name == "route_scores" else among.valid.shape[2]))
            return real(q, among, *args)

        monkeypatch.setattr(route, name, spy)
    return scored


def steps(state: LayerCache, number: int, seed: int = 1) -> list[torch.Tensor]:
    return [state.attend(*rows(1, seed=seed + step)) for step in range(number)]


@pytest.mark.parametrize("router", ["lowrank", "keys", "residual", "minmax"])
@pytest.mark.parametrize("share", ["kv_head", "all"])
def test_with_every_block_a_candidate_all_is_as_if_each_step_scanned(scans, router, share):
    changes = {"router": router, "share": share, "recent_blocks": 1}
    every, some = (filled(3 + 9 * 16 + 21, route_every=n, route_candidates=99, **changes) for n in (1, 4))
    for one, other in zip(steps(every, 12), steps(some, 12), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    names = [name for name, _ in scans]
    assert names[:12] == ["route_scores"] * 12
    assert names[12:] == (["route_scores"] + ["candidate_scores"] * 3) * 3


def test_a_step_scores_the_candidates_of_the_last_scan_alone(scans):
    state = filled(3 + 12 * 16 + 21, route_candidates=3)
    steps(state, 5)
    assert [name for name, _ in scans] == ["route_scores", *["candidate_scores"] * 3, "route_scores"]
    assert [count for _, count in scans][::4] == [12, 12]
    assert all(3 <= count <= 5 for _, count in scans[1:4])  # and the two blocks after the selected ones


@pytest.mark.parametrize("seed", range(6))
def test_candidates_and_what_is_selected_among_them_are_those_of_the_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = [11, 5]
    blocks = dkv.compress_blocks(
        *(torch.randn(2, 3, 11 * 16, 40, generator=generator) for _ in range(2)), config=CONFIG
    )
    blocks = dkv.types.CompressedBlocks(**{**vars(blocks), "block_counts": torch.tensor(counts, dtype=torch.int32)})
    q, later = (2 * torch.randn(2, 6, 1, 40, generator=generator) for _ in range(2))
    reference, plain = op_module("reference", "route"), blocks.map(lambda part: part.numpy())
    rule = ("lowrank", ("kv_head", "all")[seed % 2], 40**-0.5, seed % 3, 1)
    chosen, candidates = route.scan_blocks(q, blocks, 4, *rule, 4 + seed % 2)
    wanted = reference.candidate_blocks(q.numpy(), plain, 4, *rule, 4 + seed % 2)
    torch.testing.assert_close(chosen, route.route_blocks(q, blocks, 4, *rule))
    for row, head in ((row, head) for row in range(2) for head in range(3)):
        got = candidates[row, head]
        assert got[got >= 0].tolist() == wanted[row, head][wanted[row, head] >= 0].tolist()
        assert got.max() < counts[row]
    among = reference.route_blocks(later.numpy(), plain, 4, *rule, candidates=wanted)
    assert route.route_among(later, blocks, candidates, 4, *rule).tolist() == among.tolist()


def test_sequences_of_a_batch_have_candidates_of_their_own(scans):
    lengths, length = [3 + 9 * 16 + 21, 3 + 4 * 16 + 21], 3 + 9 * 16 + 21
    padding = torch.arange(length) >= length - torch.tensor(lengths)[:, None]
    q, k, v = rows(length, seed=0)
    config = dkv.DKVConfig(**{**CONFIG.to_dict(), "tiers": (), "route_candidates": 3})
    both = LayerCache(config)
    both.attend(q, k, v, padding=padding)
    alone = []
    for row in range(2):
        alone.append(LayerCache(config))
        alone[row].attend(*(x[row : row + 1, :, length - lengths[row] :] for x in (q, k, v)))
    for step in range(7):
        q, k, v = rows(1, seed=step + 1)
        out = both.attend(q, k, v)
        for row in range(2):
            own = alone[row].attend(*(x[row : row + 1] for x in (q, k, v)))
            torch.testing.assert_close(out[row : row + 1], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["close", "crop", "select", "chunk"])
def test_what_brings_the_next_scan_forward(scans, change):
    state = filled(3 + 8 * 16 + 21 + (13 if change == "close" else 0), route_every=100, route_candidates=3)
    steps(state, 2)
    if change == "close":
        steps(state, 1)
        assert state.block_counts == [9, 9]
    elif change == "crop":
        state.crop(1)
    elif change == "select":
        state.select([1, 1])
    else:
        state.attend(*rows(2, seed=7))
    seen = len(scans)
    steps(state, 2)
    assert [name for name, _ in scans[seen:]] == ["route_scores", "candidate_scores"]


def test_a_shallow_copy_that_changes_leaves_the_layer_its_candidates(scans):
    state = filled(3 + 9 * 16 + 21, route_every=100, route_candidates=3)
    steps(state, 1)
    twin = copy.copy(state)
    twin.crop(1)
    copy.copy(state).configure(state.config)
    steps(state, 1)
    assert [name for name, _ in scans] == ["route_scores", "candidate_scores"]


def test_room_that_steps_reuse_changes_no_number(monkeypatch):
    """Other steps in between, of other shapes, leave nothing behind; nor does a step that asks for gradients."""
    from dkv.kernels.torch import _scratch, _storage

    state = filled(3 + 9 * 16 + 21, route_candidates=3)
    twin = copy.deepcopy(state)
    other = filled(3 + 14 * 16 + 21, top_k=5, num_residuals=7)
    outs = []
    for step in range(6):
        outs.append(state.attend(*rows(1, seed=step)))
        steps(other, 1)
    fresh = lambda name, shape, dtype, device: torch.full(shape, 7, dtype=dtype, device=device)  # noqa: E731
    for module in (_scratch, _storage, route):
        monkeypatch.setattr(module, "scratch", fresh)
    assert all(torch.equal(twin.attend(*rows(1, seed=step)), out) for step, out in enumerate(outs))


def test_gradients_pass_through_coded_rows():
    state = filled(3 + 9 * 16 + 21)
    q = rows(1, seed=1)[0].requires_grad_()
    chosen = torch.tensor([[[0, 3], [1, 2], [4, 8]]] * 2, dtype=torch.int32)
    dkv.decode_attention(q, state.blocks[0], block_indices=chosen).out.sum().backward()
    nudge = torch.zeros_like(q)
    nudge[0, 0, 0, 0] = 1e-2
    with torch.no_grad():
        up, down = (
            dkv.decode_attention(q + s * nudge, state.blocks[0], block_indices=chosen).out.sum() for s in (1, -1)
        )
    assert q.grad is not None
    torch.testing.assert_close(q.grad[0, 0, 0, 0], (up - down) / 2e-2, rtol=2e-2, atol=2e-3)


def test_route_every_is_checked():
    for bad, error in ((0, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="route_every must be"):
            dkv.DKVConfig(route_every=bad)
    for bad, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="route_candidates must be"):
            dkv.DKVConfig(route_candidates=bad)
