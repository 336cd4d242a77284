"""Coded rows against packing by hand, ranges chosen by brute force, and quantisers whose error is known."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import DTYPES, codes, compressed, f64, place_bits

from dkv.reference import compress, storage
from dkv.types import BlockFormat, CompressedBlocks, code_bytes

FALLING = (8, 5, 4, 3, 2, 1, 0, 0)


@pytest.mark.parametrize(
    ("segments", "numbers", "packed"),
    [
        (((3, 8),), [0, 255, 7], [0, 255, 7]),
        (((5, 4),), [1, 2, 3, 4, 15], [1 + 16 * 4, 2 + 16 * 15, 3]),
        (((5, 2),), [3, 1, 2, 0, 1], [3 + 4 * 2 + 16 * 1, 1 + 4 * 0]),
        (((10, 1),), [1, 0, 1, 1, 0, 0, 0, 1, 1, 1], [0b10011, 0b11010]),
        (((5, 3),), [5, 2, 7, 0, 3], [2 + 4 * 3 + 16 * 1, 1 + 4 * 0, 0b10101]),  # 2 + 1
        (((3, 5),), [31, 16, 9], [15 + 16 * 4, 8, 0b101]),  # 4 + 1
        (((2, 6),), [63, 36], [15 + 16 * 9, 3 + 4 * 0]),  # 4 + 2
        (((1, 7),), [0b1100101], [0b1100, 0b10, 1]),  # 4 + 2 + 1
        (((4, 0),), [0, 0, 0, 0], []),
        (((1, 8), (3, 5), (1, 1), (2, 0)), [200, 31, 16, 9, 1, 0, 0], [200, 79, 8, 5, 1]),
    ],
)
def test_codes_are_packed_as_by_hand(segments: storage.Segments, numbers: list[int], packed: list[int]) -> None:
    got = storage.pack_codes(np.array([numbers], np.uint8), segments)
    assert got.tolist() == [packed] and got.dtype == np.uint8
    assert storage.code_bytes(segments) == code_bytes(segments) == len(packed)
    assert storage.unpack_codes(got, segments).tolist() == [numbers]
    assert codes(got[0], [bits for count, bits in segments for _ in range(count)]) == numbers


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), max_size=4), st.integers(0, 2**32 - 1))
def test_codes_are_unpacked_and_no_other_bit_is_set(drawn: list[tuple[int, int]], seed: int) -> None:
    segments = tuple(drawn)
    bits = np.array([width for count, width in segments for _ in range(count)], int)
    numbers = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, len(bits))).astype(np.uint8)
    packed = storage.pack_codes(numbers, segments)
    assert packed.shape == (2, 3, storage.code_bytes(segments))
    assert (storage.unpack_codes(packed, segments) == numbers).all()
    assert np.unpackbits(packed).sum() == np.unpackbits(numbers).sum()


@pytest.mark.parametrize(
    ("dim", "segments"),
    [
        (128, ((16, 8), (16, 5), (16, 4), (16, 3), (16, 2), (16, 1), (32, 0))),
        (96, ((12, 8), (12, 5), (12, 4), (12, 3), (12, 2), (12, 1), (24, 0))),
        (80, ((10, 8), (10, 5), (10, 4), (10, 3), (10, 2), (10, 1), (20, 0))),
        (72, ((9, 8), (9, 5), (9, 4), (9, 3), (9, 2), (9, 1), (18, 0))),
        (17, ((2, 8), (2, 5), (2, 4), (2, 3), (2, 2), (2, 1), (5, 0))),
        (3, ((1, 4), (1, 1), (1, 0))),
        (1, ((1, 0),)),
    ],
)
def test_eighths_of_channels(dim: int, segments: storage.Segments) -> None:
    fmt = BlockFormat(key_bits=FALLING)
    assert fmt.key_segments(dim) == segments
    assert place_bits(FALLING, dim) == [bits for count, bits in segments for _ in range(count)]


def test_the_ranges_are_those_of_the_law() -> None:
    law = (Path(__file__).parents[1] / "reference" / "README.md").read_text()
    table = re.findall(
        r"^\| ([\d, ]+) \| ([\d., ]+) \|$", law.split("| bits | `f` |")[1].split("\n\n")[0], re.MULTILINE
    )
    listed = {int(b): tuple(float(f) for f in fs.split(", ")) for bits, fs in table for b in bits.split(", ")}
    assert listed == storage.CLIPS and sorted(listed) == list(range(1, 9))


def rows_of(*columns: np.ndarray) -> np.ndarray:
    """Keys ``[1, 1, S, D]`` with a zero anchor in front of these channels."""
    return np.stack([np.concatenate([[0], column]) for column in columns], axis=1)[None, None].astype(np.float32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_range_is_the_best_of_the_list(bits: int) -> None:
    """Column by column, number by number: normal, uniform, skewed, two-valued, and one far number among small ones."""
    rng = np.random.default_rng(bits)
    far = rng.standard_normal(128)
    far[77] = 40
    columns = [rng.standard_normal(128), rng.uniform(-3, 1, 128), rng.exponential(2, 128), rng.choice([-1.0, 2], 128)]
    v = rows_of(*columns, far)
    blocks = compressed(v.copy(), v, BlockFormat(129, 0, 128, residual_bits=bits))
    unit = float(blocks.residual_v_unit[0, 0, 0])
    assert unit == 64 / 2**14
    got = storage.residual_rows(blocks)[1][0, 0, 0]
    clipped = 0
    for d in range(v.shape[3]):
        x = f64(v[0, 0, 1:, d])
        middle, spread, levels = (x.min() + x.max()) / 2, x.max() - x.min(), 2**bits - 1
        best, unclipped = None, 0.0
        for f in storage.CLIPS[bits]:
            low = float(np.float16((middle - f * spread / 2) / unit))
            step = float(np.float16(f * spread / levels / unit))
            decoded = [unit * (low + step * min(max(round((y / unit - low) / step), 0), levels)) for y in x]
            error = sum((a - b) ** 2 for a, b in zip(decoded, x, strict=True))
            unclipped = error if f == 1 else unclipped
            if best is None or error < best[0]:
                best = (error, f, low, step, decoded)
        assert float(blocks.residual_v_min[0, 0, 0, 0, d]) == best[2]
        assert float(blocks.residual_v_scale[0, 0, 0, 0, d]) == best[3]
        np.testing.assert_allclose(got[:, d], best[4], rtol=1e-12, atol=1e-12)
        assert ((got[:, d] - x) ** 2).sum() <= unclipped * (1 + 1e-12)
        clipped += best[1] < 1
    assert clipped >= (2 if bits < 5 else 0)
    assert bits < 6 or storage.CLIPS[bits] == (1,)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1188), (3, 0.03744), (4, 0.01154), (5, 0.00349)])
def test_normal_rows_lose_what_the_best_uniform_quantiser_loses(bits: int, error: float) -> None:
    """The least mean squared errors of uniform quantisers of a normal number (J. Max, 1960, table II).

    128 rows reach less far than all normal numbers, so wide codes lose less.
    """
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, 2, 256, 96)).astype(np.float32) for _ in "kv")
    k[:, :, 0] = 0
    blocks = compressed(k, v, BlockFormat(256, 0, 255, residual_bits=bits))
    for got, want in zip(storage.residual_rows(blocks), (k, v), strict=True):
        mean = ((got[0, 0] - want[0, :, 1:]) ** 2).mean()
        assert (0.85 if bits < 4 else 0.6) * error < mean < 1.12 * error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [6, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 72, 3])
def test_wide_codes_stay_within_half_a_step(bits: int, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((1, 2, 256, dim)).astype(DTYPES[dtype]) for dim in (head_dim, 7))
    blocks = compressed(k, v, BlockFormat(256, 4, 200, residual_bits=bits))
    kept = blocks.residual_indices[0, 0].astype(int)
    rows_k, rows_v = f64(k)[0][:, kept], f64(v)[0][:, kept]
    for got, rows, shift in zip(
        storage.residual_rows(blocks), (rows_k, rows_v), (f64(blocks.anchor_k)[0, 0], np.zeros((2, 7))), strict=True
    ):
        for group in (slice(0, 128), slice(128, 200)):
            x = rows[:, group] - shift[:, None]
            low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
            bound = 0.5 * (high - low) / (2**bits - 1) + (abs(low) + high - low) * 2.0**-10
            assert (abs(got[0, 0][:, group] - rows[:, group]) <= bound).all()


def test_a_group_of_128_rows_has_scales_of_its_own() -> None:
    rng = np.random.default_rng(3)
    v = rng.standard_normal((1, 1, 256, 5)).astype(np.float32)
    v[:, :, 129:] *= 1000
    blocks = compressed(v, v, BlockFormat(256, 0, 255, residual_bits=8))
    assert blocks.residual_v_scale.shape == (1, 1, 1, 2, 5)
    error = abs(storage.residual_rows(blocks)[1][0, 0, 0] - v[0, 0, 1:])
    assert error[:128].max() < 0.02 and 1 < error[128:].max() < 20


def test_zero_bits_decode_to_the_mean_of_the_group() -> None:
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((1, 2, 256, dim)).astype(np.float32) + 3 for dim in (24, 10))
    blocks = compressed(k, v, BlockFormat(256, 3, 255, key_bits=(0,) * 8, value_bits=0))
    assert blocks.residual_k.shape[4] == blocks.residual_v.shape[4] == 0 and blocks.residual_k_order is None
    assert not blocks.residual_k_scale.any() and not blocks.residual_v_scale.any()
    for got, rows in zip(storage.residual_rows(blocks), (k, v), strict=True):
        for group in (slice(0, 128), slice(128, 255)):
            mean = f64(rows)[0, :, 1:][:, group].mean(axis=1, keepdims=True)
            np.testing.assert_allclose(got[0, 0][:, group], np.broadcast_to(mean, got[0, 0][:, group].shape), atol=4e-3)


# The order of channels.


def keys(seed: int, dim: int = 24, heads: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, heads, 256, dim)).astype(np.float32)


@pytest.mark.parametrize("dim", [24, 72, 80, 96, 33])
def test_an_outlier_channel_gets_the_most_bits(dim: int) -> None:
    k = keys(5, dim)
    k[0, 0, :, 13] *= 100
    k[0, 1, :, 21] *= 100
    blocks = compressed(k, k, BlockFormat(256, 4, 255, key_bits=(8, 2, 2, 2, 2, 2, 1, 0)))
    assert blocks.residual_k_order[0, 0, :, 0].tolist() == [13, 21]
    assert (np.sort(blocks.residual_k_order[0, 0], axis=1) == np.arange(dim)).all()
    error = abs(storage.residual_rows(blocks)[0][0, 0] - k[0, :, 1:]).max(axis=1)  # [H, D]
    for head, channel in ((0, 13), (1, 21)):
        assert error[head, channel] < np.ptp(k[0, head, :, channel]) / 255 * 0.51
        for place, bits in enumerate(place_bits((8, 2, 2, 2, 2, 2, 1, 0), dim)):
            if place and bits == 8:
                assert error[head, blocks.residual_k_order[0, 0, head, place]] < 0.05
    plain = compressed(k, k, BlockFormat(256, 4, 255, residual_bits=2))
    error_plain = abs(storage.residual_rows(plain)[0][0, 0] - k[0, :, 1:]).max(axis=1)
    assert error[0, 13] < 0.1 * error_plain[0, 13]


def test_channels_are_ordered_by_weighted_squared_range_per_head() -> None:
    k, weight = keys(6), np.random.default_rng(7).uniform(0, 2, (2, 24)).astype(np.float32)
    fmt = BlockFormat(256, 4, 150, key_bits=FALLING)
    for given_weight in (None, weight):
        blocks = compressed(k, k, fmt, channel_weight=given_weight)
        kept = blocks.residual_indices[0, 0].astype(int)
        for h in range(2):
            importance = []
            for d in range(24):
                x = f64(k[0, h, kept, d]) - f64(k[0, h, 0, d])
                total = (x[:128].max() - x[:128].min()) ** 2 + (x[128:].max() - x[128:].min()) ** 2
                importance.append(total * (1 if given_weight is None else float(weight[h, d])))
            assert blocks.residual_k_order[0, 0, h].tolist() == sorted(range(24), key=lambda d: -importance[d])
    weight[:, 4] = 1e6
    weight[:, [2, 9]] = 0
    order = compressed(k, k, fmt, channel_weight=weight).residual_k_order[0, 0]
    assert order[:, 0].tolist() == [4, 4] and order[:, -2:].tolist() == [[2, 9]] * 2


def test_importance_sums_the_groups_and_ties_go_to_the_lowest_channel() -> None:
    swing = np.tile([-1.0, 1], 128)[:255]
    moved = np.where(np.arange(255) < 128, -9, 9) + swing  # far between the groups, near within one
    k = rows_of(swing, moved, 1.5 * swing, swing, 0 * swing, swing, 0 * swing, -swing)
    blocks = compressed(k, k, BlockFormat(256, 1, 255, key_bits=FALLING))
    assert blocks.residual_k_order[0, 0, 0].tolist() == [2, 0, 1, 3, 5, 7, 4, 6]
    none = compressed(k, k, BlockFormat(256, 1, 0, key_bits=FALLING))
    assert none.residual_k_order[0, 0, 0].tolist() == list(range(8))


def test_equal_widths_store_no_order_and_say_the_same_as_residual_bits() -> None:
    k, v = keys(8), keys(9, 20)
    want = compressed(k, v, BlockFormat(256, 4, 100, residual_bits=3))
    got = compressed(k, v, BlockFormat(256, 4, 100, residual_bits=8, key_bits=(3,) * 8, value_bits=3))
    assert all(getattr(got, name).tobytes() == part.tobytes() for name, part in want.parts())
    assert len(dict(got.parts())) == len(dict(want.parts())) and got.residual_k_order is None


def test_a_permutation_of_channels_permutes_the_decoded_rows() -> None:
    k, order = keys(10, 40), np.random.default_rng(11).permutation(40)
    weight = np.random.default_rng(12).uniform(0, 2, (2, 40))
    fmt = BlockFormat(256, 4, 90, key_bits=FALLING, value_bits=2)
    want = storage.residual_rows(compressed(k, k, fmt, channel_weight=weight))
    got = storage.residual_rows(compressed(k[..., order], k[..., order], fmt, channel_weight=weight[:, order]))
    for rows, rows_want in zip(got, want, strict=True):
        np.testing.assert_array_equal(rows, rows_want[..., order])


def test_widths_and_order_go_through_a_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    k, path = keys(13), str(tmp_path / "blocks")
    want = compressed(k, k, BlockFormat(256, 4, 90, key_bits=FALLING, value_bits=2))
    want.save(path)
    got = CompressedBlocks.load(path)
    assert got.format == want.format and hash(got.format) == hash(want.format)
    assert all(getattr(got, name).tobytes() == part.tobytes() for name, part in want.parts())
    for wrong in (0, 24, 255):
        spoilt = want.map(np.copy)
        spoilt.residual_k_order[0, 0, 1, 5] = wrong if wrong != spoilt.residual_k_order[0, 0, 1, 5] else 1
        spoilt.save(path)
        with pytest.raises(ValueError, match="residual_k_order of the file must hold each of 24 channels once"):
            CompressedBlocks.load(path)
    dataclasses.replace(want, residual_k_order=None).save(path)
    with pytest.raises(ValueError, match="residual_k_order of the file must have shape"):
        CompressedBlocks.load(path)


# The ends of what can be stored.


@pytest.mark.parametrize("bits", range(9))
def test_quantised_rows_without_spread_come_back_exactly(bits: int) -> None:
    """A group without spread collapses its scale (VeloxQuant-MLX#162), here the scale of coded rows."""
    k, v = (np.random.default_rng(9).standard_normal((1, 2, 1, dim)).astype(np.float16) for dim in (7, 6))
    k, v = np.tile(k, (1, 1, 64, 1)), np.tile(v, (1, 1, 64, 1))
    fmt = BlockFormat(64, 8, 63, key_bits=(bits,) * 4 + (0,) * 4, value_bits=bits)
    got = compress.reconstruct_blocks(compressed(k, v, fmt))
    assert (got[0] == k).all() and (got[1] == v).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", ["largest", "smallest", "both"])
def test_every_coded_number_is_finite_and_near_at_the_ends_of_the_dtype(dtype: str, magnitude: str) -> None:
    """Huge "masked" keys overflowed to inf and the model printed one token for ever (kvpress#250)."""
    import ml_dtypes

    info = ml_dtypes.finfo(DTYPES[dtype])
    sizes = {"largest": [info.max], "smallest": [info.smallest_subnormal]}
    size = [float(x) for x in sizes.get(magnitude, [info.max, info.smallest_subnormal])]
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 0.0, 1.0], (2, 1, 2, 256, 16)) * np.resize(size, 16)
    k, v = signs.astype(DTYPES[dtype])
    weight = np.full((2, 16), np.finfo(np.float32).max)
    for widths in (
        {"key_bits": (8, 7, 6, 5, 3, 2, 1, 0)},
        {"key_bits": FALLING, "value_bits": 0},
        {"residual_bits": 1},
    ):
        for num_residuals in (255, 100, 1):
            with np.errstate(over="raise", invalid="raise"):
                blocks = compressed(k, v, BlockFormat(256, 4, num_residuals, **widths), channel_weight=weight)
                rows = storage.residual_rows(blocks)
            for name, part in blocks.parts():
                assert np.isfinite(f64(part)).all(), name
            for part in (*rows, *compress.reconstruct_blocks(blocks)):
                assert np.isfinite(f64(part)).all()
    exact = compressed(k, v, BlockFormat(256, 4, 255, residual_bits=8))
    for got, want in zip(compress.reconstruct_blocks(exact), (k, v), strict=True):
        assert abs(f64(got) - f64(want)).max() <= 0.01 * float(abs(f64(want)).max()) + 2.0**-148
