"""A ratio becomes widths: the bytes are those of real blocks, the loss the least for them; bad ratios are refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import KEY_OPTIONS, VALUE_OPTIONS, profile_of

import dkv
from dkv import DKVConfig, HeadTier
from dkv.allocation import FORGETTING, block_bytes, fit, measured_heads, routed_heads
from dkv.config import EVERY_BLOCK, PRESETS

RATIOS = st.sampled_from([2, 2.5, 3, 4, 5.5, 6, 8, 11, 16])


def loss_of(profile, chosen):
    """The estimated loss of a choice ``[layers][heads]``, head by head."""
    total = 0.0
    for layer, row in enumerate(chosen):
        for head, widths in enumerate(row):
            if widths is None:
                total += FORGETTING * profile.drop_loss[layer][head]
            else:
                total += profile.key_loss[layer][head][profile.key_options.index(widths[0])]
                total += profile.value_loss[layer][head][profile.value_options.index(widths[1])]
    return total


def bytes_of(profile, chosen, size=256, rank=0):
    return sum(block_bytes(*widths, size, rank, profile.head_dim) for row in chosen for widths in row if widths)


@pytest.mark.parametrize("changes", [{}, {"rank": 4}, {"rank": 128}, {"router": "minmax"}, {"block_size": 64}])
@pytest.mark.parametrize("ratio", [2, 3, 4, 6, 8, 12])
def test_real_blocks_reach_the_ratio(ratio, changes):
    """Never below it; above it by about one step of one head of 24, while there are finer widths."""
    profile = profile_of(np.random.default_rng(1).random((6, 4)), head_dim=64)
    config = DKVConfig(ratio=ratio, profile=profile, **{"rank": 0, "router": "keys", **changes})
    size = config.block_size
    x = np.random.default_rng(0).standard_normal((1, 4, size, 64)).astype(np.float16)
    stored = 0
    for layer in range(6):
        for heads, own, weight in config.head_groups(layer, 4):
            if own is not None:
                part = x[:, list(heads)]
                stored += dkv.compress_blocks(part, part, config=own, channel_weight=np.array(weight)).nbytes
    got = 6 * 4 * 2 * size * 64 * 2 / stored
    finest = block_bytes(KEY_OPTIONS[0], VALUE_OPTIONS[0], size, config.rank, 64, config.router == "minmax")
    most = max(ratio, 2 * size * 64 * 2 / finest)  # where every head has the finest widths
    assert ratio <= got
    assert got <= 1.08 * most or config.rank == 128  # heads of a group share coefficients that each is charged for


@given(st.integers(0, 2**20), RATIOS)
def test_a_lower_ratio_never_loses_more(seed, ratio):
    profile = profile_of(np.random.default_rng(seed).random((3, 2)), head_dim=32, seed=seed)
    chosen = {each: fit(profile, each, 256, 0) for each in (ratio, 0.8 * ratio)}
    assert loss_of(profile, chosen[0.8 * ratio]) <= loss_of(profile, chosen[ratio]) + 1e-15
    fit.cache_clear()
    assert fit(profile, ratio, 256, 0) == chosen[ratio]  # and the same again
    assert bytes_of(profile, chosen[ratio]) <= 6 * 2 * 256 * 32 * 2 / ratio


def test_heads_get_what_they_need():
    profile = profile_of(np.full((2, 3), 0.5), head_dim=32)
    losses = {name: np.array(getattr(profile, name)) for name in ("key_loss", "value_loss", "drop_loss")}
    for array in losses.values():
        array[0, 1] *= 1e6
    losses["drop_loss"][1, 2] = losses["drop_loss"][0, 0] = 0
    for ratio in (3, 6, 10):
        chosen = fit(dataclasses.replace(profile, **losses), ratio, 256, 0)
        assert chosen[0][1] == (KEY_OPTIONS[0], VALUE_OPTIONS[0])
        assert chosen[1][2] is chosen[0][0] is None
    free = dataclasses.replace(profile, drop_loss=np.zeros((2, 3)))
    assert fit(free, 2, 256, 0) == ((None,) * 3,) * 2
    # keys and values of a head are chosen apart
    losses["value_loss"][0, 1] = 0
    assert fit(dataclasses.replace(profile, **losses), 8, 256, 0)[0][1] == (KEY_OPTIONS[0], VALUE_OPTIONS[-1])


@pytest.mark.parametrize("seed", range(8))
def test_at_the_bytes_that_it_takes_nothing_is_better(seed):
    """Every choice of 2 heads, brute force: those of the fit have the least loss of all that take no more bytes."""
    options = {"key_options": KEY_OPTIONS[:3], "value_options": VALUE_OPTIONS[1:]}
    rng = np.random.default_rng(seed)
    profile = profile_of(
        [[0.1, 0.9]],
        head_dim=32,
        **options,
        key_loss=np.sort(10 ** rng.uniform(-5, -1, (1, 2, 3)), axis=2),
        value_loss=np.sort(10 ** rng.uniform(-5, -1, (1, 2, 3)), axis=2),
        drop_loss=10 ** rng.uniform(-3, 0, (1, 2)),
    )
    each = [None, *itertools.product(*options.values())]
    every = [((a, b),) for a in each for b in each]
    table = np.array([(bytes_of(profile, x), loss_of(profile, x)) for x in every])
    found = set()
    for ratio in np.linspace(2, 16, 57):
        if not any(0 < size <= 2 * 2 * 256 * 32 * 2 / ratio for size, _ in lower_hull(table)):
            with pytest.raises(ValueError, match="every head would be forgotten"):
                fit(profile, float(ratio), 256, 0)
            continue
        chosen = fit(profile, float(ratio), 256, 0)
        found.add(chosen)
        taken, loss = bytes_of(profile, chosen), loss_of(profile, chosen)
        assert taken <= 2 * 2 * 256 * 32 * 2 / ratio
        assert loss <= table[table[:, 0] <= taken, 1].min() + 1e-12
        # and of what fits the ratio it is the last before the next corner of the convex hull
        hull = lower_hull(table)
        assert taken == max(size for size, _ in hull if size <= 2 * 2 * 256 * 32 * 2 / ratio)
    assert len(found) > 3


def lower_hull(points):
    """Corners of the lower convex hull of ``[n, (bytes, loss)]``, falling in loss."""
    best = {}
    for size, loss in points.tolist():
        best[size] = min(loss, best.get(size, np.inf))
    hull = []
    for point in sorted(best.items()):
        while len(hull) > 1 and cross(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    return [point for i, point in enumerate(hull) if all(point[1] < other[1] for other in hull[:i])]


def cross(a, b, c):
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def test_layers_without_a_full_cache_do_not_count():
    """Half of a model's layers slide: the other half keeps the ratio by itself, and its share of routed heads."""
    scores = np.random.default_rng(0).uniform(0.1, 1, (4, 3))
    full = profile_of(scores[:2], head_dim=32)
    empty = {}
    for name in ("scores", "key_loss", "value_loss", "drop_loss", "channel_weight"):
        own = np.array(getattr(full, name))
        empty[name] = np.stack([0 * own[0], own[0], 0 * own[0], own[1]])
    mixed = dataclasses.replace(full, num_layers=4, **empty)
    assert measured_heads(mixed) == [(layer, head) for layer in (1, 3) for head in range(3)]
    for ratio in (2, 4, 8):
        assert fit(mixed, ratio, 256, 0)[1::2] == fit(full, ratio, 256, 0)
        assert fit(mixed, ratio, 256, 0)[::2] == ((None,) * 3,) * 2
    for share in (0, 0.3, 0.5, 1):
        assert routed_heads(mixed, share)[1::2] == routed_heads(full, share)
        assert routed_heads(mixed, share)[::2] == ((False,) * 3,) * 2


def test_the_highest_scores_are_routed_and_the_others_attend_all():
    profile = profile_of([[0.2, 0.9, 0.2], [0.2, 0.8, 0.1]], drop_loss=np.ones((2, 3)))
    for share, heads in ((0, []), (0.25, [(0, 1), (1, 1)]), (0.5, [(0, 0), (0, 1), (1, 1)])):
        routed = routed_heads(profile, share)
        assert [at for at in itertools.product(range(2), range(3)) if routed[at[0]][at[1]]] == heads
        config = DKVConfig(ratio=3, routed_share=share, rank=0, router="keys", top_k=5, chunk_top_k=7, profile=profile)
        for layer, head in itertools.product(range(2), range(3)):
            (own,) = (group.config for group in config.head_groups(layer, 3) if head in group.heads)
            assert own.ratio is None and own.profile is None and own.tiers == ()
            assert (own.top_k, own.chunk_top_k) == ((5, 7) if (layer, head) in heads else (EVERY_BLOCK, None))


def test_groups_of_a_fitted_layer():
    profile = profile_of(np.random.default_rng(3).random((3, 6)), head_dim=16)
    config = DKVConfig(ratio=6, rank=0, router="keys", block_size=32, profile=profile)
    chosen = fit(profile, 6, 32, 0)
    assert None in itertools.chain(*chosen)
    for layer in range(3):
        groups = config.head_groups(layer, 6)
        assert sorted(head for group in groups for head in group.heads) == list(range(6))
        assert [group.heads for group in groups] == sorted(group.heads for group in groups)
        for heads, own, weight in groups:
            for index, head in enumerate(heads):
                assert (None if own is None else (own.key_bits, own.value_bits)) == chosen[layer][head]
                assert own is None or weight[index] == profile.channel_weight[layer][head]
            assert (own is None) == (weight is None)
        plain = [group.config for group in groups if group.config]
        assert len(set(plain)) == len(plain) and sum(group.config is None for group in groups) <= 1


# what is refused, before anything is compressed

TINY = profile_of([[0.1, 0.2]])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DKVConfig(ratio=1.9), ValueError, r"ratio must be 2\.\.16, got 1\.9"),
        (lambda: DKVConfig(ratio=17), ValueError, r"ratio must be 2\.\.16, got 17"),
        (lambda: DKVConfig(ratio=float("nan")), ValueError, r"ratio must be 2\.\.16, got nan"),
        (lambda: DKVConfig(ratio=float("inf")), ValueError, r"ratio must be 2\.\.16, got inf"),
        (lambda: DKVConfig(ratio="4"), TypeError, "ratio must be a number, got '4'"),
        (lambda: DKVConfig(ratio=True), TypeError, "ratio must be a number, got True"),
        (lambda: DKVConfig(ratio=4, tiers=(HeadTier(1.0),)), ValueError, "ratio chooses the widths itself: tiers"),
        (lambda: DKVConfig(ratio=4, key_bits=(4,) * 8), ValueError, "ratio chooses the widths itself: key_bits must"),
        (lambda: DKVConfig(ratio=4, value_bits=0), ValueError, "ratio chooses the widths itself: value_bits must"),
        (
            lambda: DKVConfig(ratio=4, residual_bits=8),
            ValueError,
            "ratio chooses the widths itself: residual_bits must",
        ),
        (lambda: DKVConfig(ratio=4, format="fp16"), ValueError, "ratio chooses the widths itself: format must"),
        (lambda: DKVConfig(ratio=4, num_residuals=9), ValueError, "keeps every row: num_residuals must be 255 or more"),
        (lambda: DKVConfig(routed_share=1.1), ValueError, r"routed_share must be 0\.\.1, got 1\.1"),
        (lambda: DKVConfig(routed_share=-0.1), ValueError, r"routed_share must be 0\.\.1, got -0\.1"),
        (lambda: DKVConfig(routed_share=None), TypeError, "routed_share must be a number, got None"),
        (
            lambda: DKVConfig(ratio=4).head_groups(0, 2),
            ValueError,
            "ratio needs the profile of a model: make a profile",
        ),
        (
            lambda: DKVConfig(ratio=4, profile=TINY).head_groups(0, 3),
            ValueError,
            "profile is of a model with 2 kv heads",
        ),
        (lambda: DKVConfig(ratio=4, profile=TINY).head_groups(1, 2), ValueError, r"layer must be 0\.\.0"),
        (lambda: DKVConfig(ratio=4, profile="p.json"), TypeError, "profile must be a HeadProfile, got str"),
    ],
)
def test_ratios_that_are_refused(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_ops_refuse_a_config_with_a_ratio():
    config = DKVConfig(block_size=64, ratio=2, rank=0, profile=profile_of([[0.5, 0.1]], drop_loss=[[1, 1]]))
    x = np.random.default_rng(0).standard_normal((1, 2, 128, 8), np.float32)
    message = r"config has a ratio: use cfg\.head_groups\(layer, num_kv_heads\)"
    with pytest.raises(ValueError, match=message):
        dkv.compress_blocks(x, x, config=config)
    for heads, own, weight in config.head_groups(0, 2):
        part = x[:, list(heads)]
        blocks = dkv.compress_blocks(part, part, config=own, channel_weight=np.array(weight))
        dkv.decode_attention(part[:, :, :1], blocks, config=own)
        with pytest.raises(ValueError, match=message):
            dkv.decode_attention(part[:, :, :1], blocks, config=config)


@pytest.mark.parametrize("name", ["quality", "balanced", "small"])
def test_presets_with_a_ratio_need_a_profile(name):
    config = DKVConfig.preset(name)
    assert config.ratio == {"quality": 4, "balanced": 6, "small": 8}[name] == PRESETS[name]["ratio"]
    with pytest.raises(ValueError, match="ratio needs the profile of a model"):
        config.head_groups(0, 2)
    profile = profile_of(np.random.default_rng(0).random((4, 2)), head_dim=64)
    assert DKVConfig.preset(name, profile) == config.with_profile(profile)
    assert DKVConfig.from_dict(DKVConfig.preset(name, profile).to_dict()) == config.with_profile(profile)
    taken = bytes_of(profile, fit(profile, config.ratio, 256, 0))
    assert config.ratio <= 8 * 2 * 256 * 64 * 2 / taken
