"""The mlx runtime of a layer beside the torch runtime, on the same blocks: same lengths, same attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")

import dkv  # noqa: E402
from dkv import DKVConfig  # noqa: E402
from dkv.cache import closing  # noqa: E402
from dkv.cache.layer import LayerCache as TorchLayer  # noqa: E402
from dkv.cache.mlx_layer import LayerCache, joined  # noqa: E402
from dkv.config import HeadGroup  # noqa: E402

BASE = DKVConfig(block_size=16, window=20, sink_tokens=6, rank=4, num_residuals=5, top_k=3)
FORMATS = [
    BASE,
    dataclasses.replace(BASE, num_residuals=15, router="keys"),
    dataclasses.replace(BASE, rank=0, num_residuals=0),
    dataclasses.replace(BASE, rank=3, residual_bits=16, router="residual", share="all", chunk_top_k=2),
    dataclasses.replace(BASE, num_residuals=15, rank=0, router="keys", key_bits=(7, 5, 4, 3, 2, 1, 1, 0), value_bits=3),
]
LAYOUTS = [
    None,
    (HeadGroup((0, 1, 2), FORMATS[1]),),
    (HeadGroup((0, 2), FORMATS[4], ((1.0,) * 4 + (3.0,) * 4,) * 2), HeadGroup((1,), None)),
    (HeadGroup((0,), None), HeadGroup((1,), FORMATS[3]), HeadGroup((2,), dataclasses.replace(BASE, top_k=2**31 - 1))),
]
TOLERANCE = 2e-5  # float32 sums in another order


def to_mx(x):
    return x.map(to_mx) if isinstance(x, dkv.CompressedBlocks) else mx.array(x.numpy())


def compress_as_torch(k, v, *, config, channel_weight=None):
    """Codes may differ by a rounding; the runtimes are compared on the same ones."""
    if isinstance(k, torch.Tensor):
        return dkv.compress_blocks(k, v, config=config, channel_weight=channel_weight)
    as_torch = [None if x is None else torch.from_numpy(np.array(x)) for x in (k, v, channel_weight)]
    return to_mx(dkv.compress_blocks(*as_torch[:2], config=config, channel_weight=as_torch[2]))


@pytest.fixture(autouse=True)
def _same_blocks(monkeypatch):
    monkeypatch.setattr(closing, "compress_blocks", compress_as_torch)


def rows_of(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


CHUNKS = [[1], [15], [16], [41, 1], [43, 40, 17, 1], [60, 2, 1, 50, 16], [130], [1, 41, 1, 15, 45, 1, 1]]


def check_same(ours, theirs):
    assert (ours.tokens, ours.rows, ours.block_counts) == (theirs.tokens, theirs.rows, theirs.block_counts)
    assert len(ours.blocks) == len(theirs.blocks)
    for mine, other in zip(ours.blocks, theirs.blocks):
        assert mine.nbytes == other.nbytes and mine.format == other.format
    assert ours.compressed_dense_nbytes == theirs.compressed_dense_nbytes


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@settings(max_examples=4)
@given(st.sampled_from(FORMATS), st.sampled_from(LAYOUTS), st.integers(1, 3), st.integers(0, 2**20))
def test_attention_and_lengths_are_those_of_torch(chunks, config, layout, per_head, seed):
    total = sum(chunks)
    q, k, v = (rows_of(seed + i, 2, h, total, d) for i, (h, d) in enumerate([(3 * per_head, 8), (3, 8), (3, 6)]))
    theirs, ours, start = TorchLayer(config, layout), LayerCache(config, layout), 0
    for length in chunks:
        part = [x[:, :, start : start + length] for x in (q, k, v)]
        expected = theirs.attend(*part, sm_scale=0.4)
        ours.append(to_mx(part[1]), to_mx(part[2]))
        got = ours.attend(to_mx(part[0]), sm_scale=0.4)
        np.testing.assert_allclose(np.array(got), expected.numpy(), atol=TOLERANCE)
        start += length
    check_same(ours, theirs)
    held = [ours.k_rows, ours.v_rows] + [part for blocks in ours.blocks for _, part in blocks.parts()]
    assert ours.nbytes == sum(array.nbytes for array in held)
    assert ours.dense_nbytes == theirs.dense_nbytes


@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(LAYOUTS), st.booleans(), st.integers(0, 2**20))
def test_padded_chunks_are_those_of_torch(data, config, layout, right, seed):
    """Sequences of other lengths, padded to the right or to the left, then single steps of all."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 3, 41, 57, 90]), min_size=2, max_size=3))
    length, batch = max(max(lengths), 1), len(lengths)
    q, k, v = (rows_of(seed + i, batch, h, length + 2, d) for i, (h, d) in enumerate([(6, 8), (3, 8), (3, 6)]))
    real = np.zeros((batch, length), bool)
    for row, count in enumerate(lengths):
        real[row, :count] = True
    real = real if right else real[:, ::-1].copy()
    theirs, ours, sink = TorchLayer(config, layout), LayerCache(config, layout), rows_of(7, 6)
    cut = data.draw(st.integers(1, length))
    for start, stop in ((0, cut), (cut, length), (length, length + 1), (length + 1, length + 2)):
        if start == stop:
            continue
        part = [x[:, :, start:stop] for x in (q, k, v)]
        mask = real[:, start:stop] if stop <= length else np.ones((batch, 1), bool)
        spans = [(int(row.argmax()) if row.any() else 0, int(row.sum())) for row in mask]
        expected = theirs.attend(*part, padding=torch.from_numpy(mask), sm_scale=0.4, sink=sink)
        ours.append(to_mx(part[1]), to_mx(part[2]), spans)
        got = np.array(ours.attend(to_mx(part[0]), spans, sm_scale=0.4, sink=to_mx(sink)))
        assert np.isfinite(got).all()
        for row in range(batch):
            np.testing.assert_allclose(got[row][:, mask[row]], expected.numpy()[row][:, mask[row]], atol=TOLERANCE)
    check_same(ours, theirs)


SPARSE = {"prefill_block": 12, "prefill_key_block": 8, "prefill_stride": 5, "prefill_window": 9}
LIMITS = [
    {"prefill_mass": 0.6},
    {"prefill_top_k": 4, "prefill_key_block": 13},
    {"prefill_ratio": 0.4},
    {"prefill_share": 0, "prefill_ratio": 1.0},
]


@settings(max_examples=10)
@given(st.data(), st.sampled_from(FORMATS[:3]), st.sampled_from(LAYOUTS[:3]), st.integers(0, 2**20))
def test_sparse_prefill_is_that_of_torch(data, config, layout, seed):
    """From the first position or a later one on, for sequences as long as each other and for padded ones."""
    below = data.draw(st.sampled_from([0, 57, 100]))
    chosen = SPARSE | data.draw(st.sampled_from(LIMITS)) | {"prefill_tail": data.draw(st.sampled_from([0, 7]))}
    config = dataclasses.replace(config, prefill_dense_below=below, **chosen)
    selects = None if config.prefill_share == 0 else data.draw(st.sampled_from([None, (True, True, False)]))
    q, k, v = (rows_of(seed + i, 2, h, 170, d) for i, (h, d) in enumerate([(6, 8), (3, 8), (3, 6)]))
    q, real, sink = 2 * q, np.ones((2, 170), bool), rows_of(7, 6) if data.draw(st.booleans()) else None
    padded = data.draw(st.sampled_from([None, slice(0, 25), slice(70, 83)]))
    if padded is not None:
        real[0, padded] = False
    theirs, ours = TorchLayer(config, layout, selects), LayerCache(config, layout, selects)
    for start, stop in ((0, 70), (70, 120), (120, 122), (122, 123), (123, 170)):
        part, mask = [x[:, :, start:stop] for x in (q, k, v)], real[:, start:stop]
        spans = None if mask.all() else [(int(row.argmax()), int(row.sum())) for row in mask]
        options = {} if spans is None else {"padding": torch.from_numpy(mask)}
        expected = theirs.attend(*part, sm_scale=0.4, sink=sink, **options).numpy()
        ours.append(to_mx(part[1]), to_mx(part[2]), spans)
        got = np.array(ours.attend(to_mx(part[0]), spans, sm_scale=0.4, sink=None if sink is None else to_mx(sink)))
        for row in range(2):
            np.testing.assert_allclose(got[row][:, mask[row]], expected[row][:, mask[row]], atol=TOLERANCE)
    check_same(ours, theirs)
    assert theirs.visited < theirs.visible


def test_a_chunk_whose_first_token_alone_is_dense_attends_all_blocks_with_it():
    config = dataclasses.replace(BASE, top_k=1, prefill_dense_below=121)
    k, v, q = (to_mx(rows_of(i, 1, h, 150, d)) for i, (h, d) in enumerate([(2, 8), (2, 6), (4, 8)]))
    outs = []
    for below in (121, 150):
        layer = LayerCache(dataclasses.replace(config, prefill_dense_below=below))
        for start, stop in ((0, 120), (120, 150)):
            layer.append(k[:, :, start:stop], v[:, :, start:stop])
            outs.append(layer.attend(q[:, :, start:stop]))
    np.testing.assert_allclose(np.array(outs[1][:, :, 0]), np.array(outs[3][:, :, 0]), atol=TOLERANCE)


@given(st.sampled_from(FORMATS), st.sampled_from(LAYOUTS), st.integers(0, 2**20))
def test_a_batch_is_its_sequences(config, layout, seed):
    """Joined, picked out again and gone on with, each sequence is what it is alone, bit for bit."""
    lengths = [60, 130, 0, 90]
    q, k, v = (to_mx(rows_of(seed + i, 4, h, 140, d)) for i, (h, d) in enumerate([(6, 8), (3, 8), (3, 6)]))
    alone = [LayerCache(config, layout) for _ in lengths]
    for row, length in enumerate(lengths):
        if length:
            alone[row].append(k[row : row + 1, :, :length], v[row : row + 1, :, :length])
            alone[row].attend(q[row : row + 1, :, :length])
        else:
            alone[row].reset(1)
    batch = joined([joined(alone[:2]), joined(alone[2:])])
    assert batch.tokens == lengths and batch.block_counts == [layer.block_counts[0] for layer in alone]
    batch.select([3, 1, 2])
    order = [3, 1, 2]
    batch.append(k[order][:, :, 135:136], v[order][:, :, 135:136])
    got = batch.attend(q[order][:, :, 135:136])
    for place, row in enumerate(order):
        alone[row].append(k[row : row + 1, :, 135:136], v[row : row + 1, :, 135:136])
        expected = alone[row].attend(q[row : row + 1, :, 135:136])
        np.testing.assert_allclose(np.array(got[place]), np.array(expected[0]), atol=TOLERANCE)
        assert batch.rows[place] == alone[row].rows[0]
        for mine, other in zip(batch.blocks, alone[row].blocks):
            for name, part in other.parts():
                assert mx.array_equal(getattr(mine, name)[place, : alone[row].block_counts[0]], part[0]), name


def test_the_state_depends_on_the_tokens_alone(monkeypatch):
    monkeypatch.undo()
    k, v, q = (to_mx(rows_of(i, 1, h, 150, d)) for i, (h, d) in enumerate([(2, 8), (2, 6), (4, 8)]))
    layers = []
    for chunks in ([150], [30] * 5, [1] * 150, [100, 1, 49]):
        layer, start = LayerCache(BASE), 0
        for length in chunks:
            layer.append(k[:, :, start : start + length], v[:, :, start : start + length])
            layer.attend(q[:, :, start : start + length])
            start += length
        layers.append(layer)
    for layer in layers[1:]:
        assert (layer.rows, layer.block_counts) == (layers[0].rows, layers[0].block_counts) == ([38], [7])
        assert mx.array_equal(layer.k_rows[:, :, :38], layers[0].k_rows[:, :, :38])
        for (name, got), (_, want) in zip(layer.blocks[0].parts(), layers[0].blocks[0].parts(), strict=True):
            assert mx.array_equal(got, want), name


def test_single_steps_are_compressed_and_the_window_is_bounded():
    """VeloxQuant-MLX#86: tokens that come one at a time were never compressed."""
    k, v, q = (to_mx(rows_of(i, 1, h, 200, d)) for i, (h, d) in enumerate([(2, 8), (2, 6), (4, 8)]))
    layer = LayerCache(BASE)
    for token in range(200):
        layer.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
        layer.attend(q[:, :, token : token + 1])
        assert layer.rows[0] < 6 + 20 + 16 and layer.k_rows.shape[2] <= 48
    assert layer.block_counts == [(200 - 26) // 16]


def test_crop_refuses_before_it_changes_anything():
    k, v, q = (to_mx(rows_of(i, 2, h, 60, d)) for i, (h, d) in enumerate([(2, 8), (2, 6), (4, 8)]))
    layer = LayerCache(BASE)
    layer.append(k, v)
    layer.attend(q)
    assert (layer.rows, layer.block_counts) == ([28, 28], [2, 2])
    with pytest.raises(ValueError, match="trim of 23 tokens reaches into a closed block: sequence 0 holds 22 exact"):
        layer.crop(23)
    assert (layer.rows, layer.tokens) == ([28, 28], [60, 60])
    assert layer.crop(22) == 22 and layer.rows == [6, 6]


def test_rows_of_another_kind_are_refused():
    layer = LayerCache(BASE)
    layer.append(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 6)))
    for keys, message in (
        (mx.zeros((2, 2, 1, 8)), "batch size 1, got 2"),
        (mx.zeros((1, 3, 1, 8)), "2 heads of 8 channels"),
        (mx.zeros((1, 2, 1, 9)), "2 heads of 8 channels"),
        (mx.zeros((1, 2, 1, 8), dtype=mx.float16), "float32; got"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.append(keys, mx.zeros((*keys.shape[:3], 6), dtype=keys.dtype))
    assert layer.tokens == [3]
    with pytest.raises(ValueError, match="config splits the heads"):
        LayerCache(DKVConfig(ratio=4.0))
    with pytest.raises(ValueError, match="config has a prefill_share"):
        LayerCache(DKVConfig(prefill_share=0.5))
    with pytest.raises(ValueError, match="3 kv heads that selects names, got 2"):
        LayerCache(BASE, selects=(True, False, True)).append(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 6)))
    with pytest.raises(IndexError, match="0..0"):
        layer.select([1])
