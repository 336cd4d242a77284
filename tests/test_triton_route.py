"""What only the Triton backend has: selections in tiles, and scores that one program does not hold."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import BACKENDS, special_scores, stable_selection

from dkv import testing

pytestmark = pytest.mark.skipif("triton" not in BACKENDS, reason="the triton backend does not run here")


def kernels():
    from dkv.kernels.triton import _select

    return _select


@pytest.mark.parametrize("size", [129, 2048, 2100, 4500])
def test_triton_selects_among_many_blocks_as_a_stable_sort_does(size: int) -> None:
    rng = np.random.default_rng(size)
    score = special_scores(rng, size)
    counts = np.array([size, size - 7], np.int32)
    for top_k, first, last in ((9, 2, 1), (1000, 0, 3), (size + 1, 0, 0)):
        got = kernels().select_blocks(*testing.to_library([score, counts], "torch"), top_k, first, last)
        assert np.array_equal(testing.to_numpy(got), stable_selection(score, counts, top_k, first, last))


@pytest.mark.parametrize(
    "shape", [(1, 1, 50), (1, 1, 300), (3, 1, 40), (2, 9, 20), (1, 70, 300), (2, 3, 4500), (20, 2, 1000)]
)
@pytest.mark.parametrize("fewer_rows", [False, True])
def test_triton_selects_from_scores(shape: tuple[int, int, int], fewer_rows: bool) -> None:
    """Softmax over blocks, the largest of the first axis, the mean of some of the second; held in registers or not."""
    rng = np.random.default_rng(shape[2])
    scores = 3 * rng.standard_normal((4, *shape)).astype(np.float32)
    if shape[:2] == (1, 1):
        scores = scores.round(0)  # ties
    scores[0, :, 0, 3] = np.nan
    scores[1, 0, 0, [5, 6]] = np.inf
    scores[2, 0, 0] = -np.inf
    counts = np.array([shape[2], shape[2] - 2], np.int32)
    scores[2:, ..., -2:] = np.nan
    rows = rng.integers(1, shape[1] + 1, 4).astype(np.int32) if fewer_rows else np.full(4, shape[1], np.int32)
    mean = np.zeros((4, shape[2]))
    for p in range(4):
        part = scores[p, :, : rows[p], : counts[p // 2]].astype(np.float64)
        part = np.where(np.isnan(part), -np.inf, part)
        infinite = np.isposinf(part)
        part = np.where(infinite.any(-1, keepdims=True), np.where(infinite, 0.0, -np.inf), part)
        top = part.max(-1, keepdims=True)
        weight = np.exp(part - np.where(np.isneginf(top), 0.0, top))
        weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
        mean[p, : counts[p // 2]] = weight.max(0).mean(0)
    select = kernels()
    arguments = testing.to_library([scores, counts, rows if fewer_rows else None], "torch")
    for pins in (select.Pins(5, 1), select.Pins(7, 0, 2)):
        got = select.select_scores(*arguments[:2], 2, 3, pins, 7, arguments[2])
        want = stable_selection(mean.reshape(2, 2, -1), counts, pins.top_k, pins.sink, pins.recent).reshape(4, -1)
        got = testing.to_numpy(got)
        assert got.shape == (4, 3, 7) and (got[:, :, pins.top_k :] == -1).all()
        assert (got[:, :, : pins.top_k] == want[:, None]).all()


def test_triton_pinned_blocks_may_exceed_the_number_to_choose() -> None:
    import torch

    select = kernels()
    shares = torch.linspace(0, 1, 300).repeat(3, 1)
    tails, counts = torch.tensor([290, 0, 4], dtype=torch.int32), torch.tensor([300, 9, 2], dtype=torch.int32)
    pins = select.Pins(5, 1, tails=tails, grow=True)
    got = testing.to_numpy(select.select_shares(shares, counts, 1, 1, pins, 12))[:, 0]
    assert got[0].tolist() == [0, *range(290, 300), -1]
    assert got[1].tolist() == [*range(9), -1, -1, -1] and got[2].tolist() == [0, 1, *[-1] * 10]
    one = shares.log().view(3, 1, 1, 300)
    assert np.array_equal(testing.to_numpy(select.select_scores(one, counts, 1, 1, pins, 12))[:, 0], got)


def test_triton_pieces_of_the_prefill_workspace_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    from dkv.kernels.triton import _sample, prefill

    made = testing.make_inputs(1, num_blocks=0, window=150, q_len=150, library="torch")
    whole, pieces = (), ()
    for size, queries in ((1 << 20, 512), (1, 3)):
        monkeypatch.setattr(_sample, "SCORED_NUMBERS", size)
        monkeypatch.setattr(_sample, "SCORED_QUERIES", queries)
        whole, pieces = pieces, prefill.select_key_blocks(made.q, made.k_window, 16, 24, 4, 20, 0.3, 5, 0.8, 0.7)
    assert np.array_equal(testing.to_numpy(whole), testing.to_numpy(pieces))


def test_triton_configurations_hold_what_they_say() -> None:
    from dkv.kernels.triton import prefill, route

    for total, maxed, meaned in ((1, 1, 1), (64, 4, 1), (512, 16, 3), (5000, 8, 2), (10, 3, 5000)):
        tiles = kernels().config(total, maxed, meaned)
        assert not tiles.fused or tiles.block >= total
        assert not tiles.fused or tiles.block * tiles.queries * maxed <= 2 * kernels().REGISTERS
    for rows, size, dim in ((1, 256, 128), (7, 11, 3), (4096, 256, 256), (64, 1, 80)):
        tiles = route.config(2, 5, 8, rows, size, dim, True, True, False)
        assert 128 % tiles.tile == 0 and 1 <= tiles.heads <= 8 and tiles.rows >= 16
        assert prefill.config(rows, size, dim, False).rows >= 16
