"""Head groups: each is what the public ops make of its heads alone, and a layer is its groups in the order of heads."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import MODELS, feed, profile_of, rewritten

import dkv
from dkv import DKVConfig, HeadTier
from dkv.config import PRESETS, HeadGroup
from dkv.reference import accounting, groups
from dkv.reference.compress import reconstruct_blocks

# which head is in which tier


@st.composite
def scored(draw):
    """Scores with many ties, and shares that sum to 1, empty tiers among them."""
    layers, heads = draw(st.sampled_from([(3, 2), (1, 1), (5, 3), (2, 8)]))
    seed, count = draw(st.integers(0, 2**20)), draw(st.integers(1, 4))
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 0.25, 0.25, 0.5, 1.0], (layers, heads)) * draw(st.sampled_from([1.0, 0.7]))
    weights = rng.integers(0, 4, count) + np.eye(count)[0]
    return scores, [float(share) for share in weights / weights.sum()]


@given(scored())
def test_tiers_are_those_of_the_law(case):
    scores, shares = case
    wanted = groups.assign_tiers(scores, shares)
    config = DKVConfig(tiers=tuple(HeadTier(share, rank=index) for index, share in enumerate(shares)))
    config = config.with_profile(profile_of(scores))
    for layer in range(scores.shape[0]):
        got = {group.config.rank: group.heads for group in config.head_groups(layer, scores.shape[1])}
        assert got == {int(tier): tuple(np.flatnonzero(wanted[layer] == tier)) for tier in np.unique(wanted[layer])}
        assert list(got.values()) == sorted(got.values())
    # and the law's own words: a head of an earlier tier is never less than one of a later tier
    for tier in range(len(shares) - 1):
        here, later = scores[wanted == tier], scores[wanted > tier]
        assert here.size == 0 or later.size == 0 or here.min() >= later.max()
    ends = np.concatenate([np.rint(np.cumsum(shares[:-1]) * scores.size), [scores.size]])
    assert [int((wanted <= tier).sum()) for tier in range(len(shares))] == [int(end) for end in ends]


def test_ties_go_to_the_lower_layer_then_to_the_lower_head():
    tiers = (HeadTier(0.5, num_residuals=255), HeadTier(0.5, num_residuals=0))
    config = DKVConfig(tiers=tiers, profile=profile_of([[0.2, 0.9, 0.2], [0.2, 0.2, 0.2]]))
    assert [[group.heads for group in config.head_groups(layer, 3)] for layer in (0, 1)] == [[(0, 1, 2)], [(0, 1, 2)]]
    config = DKVConfig(tiers=tiers, profile=profile_of([[0.2, 0.1, 0.2], [0.2, 0.2, 0.2]]))
    assert [[group.heads for group in config.head_groups(layer, 3)] for layer in (0, 1)] == [
        [(0, 2), (1,)],
        [(0,), (1, 2)],
    ]
    first, second = config.head_groups(0, 3)  # by their first heads
    assert (first.config.num_residuals, second.config.num_residuals) == (255, 0)


def test_a_group_has_a_plain_config():
    base = DKVConfig(block_size=64, rank=5, residual_bits=8, top_k=3, chunk_top_k=2, window=99)
    tiers = (HeadTier(0.5), HeadTier(0.5, routed=False, rank=0, num_residuals=7, residual_bits=4))
    config = dataclasses.replace(base, tiers=tiers, profile=profile_of([[0.1, 0.9]]))
    second, first = config.head_groups(0, 2)
    weight = config.profile.channel_weight[0]
    assert first == HeadGroup((1,), base, (weight[1],))
    assert second.heads == (0,) and second.channel_weight == (weight[0],)
    changed = dataclasses.replace(base, rank=0, num_residuals=7, residual_bits=4, chunk_top_k=None)
    assert dataclasses.replace(second.config, top_k=3) == changed
    assert second.config.top_k > 10**9  # every block, also for the ops
    assert second.config.block_format.rank == 0 and second.config.block_format.residual_bits == 4


def test_every_override_of_a_tier_is_a_setting():
    settings = {field.name: field for field in dataclasses.fields(DKVConfig)}
    for field in dataclasses.fields(HeadTier):
        if field.name not in ("share", "routed"):
            assert field.name in settings and field.default is None


def test_without_tiers_there_is_one_group():
    config = DKVConfig(rank=3)
    assert config.head_groups(7, 4) == (HeadGroup((0, 1, 2, 3), config),)
    assert config.head_groups(7, 4)[0].config is config
    assert config.with_profile(profile_of([[0.5]])).head_groups(7, 4) == (HeadGroup((0, 1, 2, 3), config),)


# the config


HALVES = (HeadTier(0.5), HeadTier(0.5, num_residuals=0))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HeadTier("0.5"), TypeError, "share of a tier must be a number, got '0.5'"),
        (lambda: HeadTier(True), TypeError, "share of a tier must be a number, got True"),
        (lambda: HeadTier(1.5), ValueError, r"share of a tier must be 0\.\.1, got 1\.5"),
        (lambda: HeadTier(float("nan")), ValueError, r"share of a tier must be 0\.\.1, got nan"),
        (lambda: HeadTier(0.5, routed=1), TypeError, "routed of a tier must be a bool, got 1"),
        (lambda: DKVConfig(tiers=(HeadTier(0.5),)), ValueError, r"shares of the tiers must sum to 1, got 0\.5"),
        (lambda: DKVConfig(tiers=(HeadTier(0.5), HeadTier(0.50001))), ValueError, "sum to 1, got 1.00001"),
        (lambda: DKVConfig(tiers=(0.5, 0.5)), TypeError, "tiers must be a tuple of HeadTier"),
        (lambda: DKVConfig(tiers=HeadTier(1.0)), TypeError, "tiers must be a tuple of HeadTier"),
        (lambda: DKVConfig(tiers=(HeadTier(1.0, rank=200),)), ValueError, r"tier 0: rank must be 0\.\.128, got 200"),
        (lambda: DKVConfig(tiers=(HeadTier(1.0, rank=2.0),)), TypeError, r"tier 0: rank must be an int, got 2\.0"),
        (lambda: DKVConfig(tiers=(HeadTier(1.0, residual_bits=9),)), ValueError, "tier 0: residual_bits must be"),
        (lambda: DKVConfig(profile={"model": "x"}), TypeError, "profile must be a HeadProfile, got dict"),
        (lambda: DKVConfig().with_profile(None), TypeError, "profile must be a HeadProfile, got NoneType"),
        (lambda: DKVConfig(tiers=HALVES).head_groups(0, 2), ValueError, "dkv profile MODEL -o FILE.*cfg.with_profile"),
        (
            lambda: DKVConfig(tiers=HALVES, profile=profile_of([[0.1, 0.2]])).head_groups(0, 3),
            ValueError,
            "profile is of a model with 2 kv heads, this one has 3",
        ),
        (
            lambda: DKVConfig(tiers=HALVES, profile=profile_of([[0.1, 0.2]])).head_groups(1, 2),
            ValueError,
            r"layer must be 0\.\.0, as in the profile, got 1",
        ),
        (
            lambda: DKVConfig.preset("fast"),
            ValueError,
            "unknown preset 'fast'; there are: default, quality, balanced, small, paper",
        ),
        (lambda: DKVConfig.from_dict({"tiers": [{"part": 1}]}), ValueError, r"unknown tier fields \['part'\]"),
        (lambda: DKVConfig.from_dict({"tiers": [3]}), TypeError, "tiers must be a tuple of HeadTier"),
        (lambda: DKVConfig.from_dict({"profile": {"model": "x"}}), ValueError, "fields of a profile: missing"),
    ],
)
def test_tiers_and_profiles_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_shares_may_miss_1_by_rounding():
    DKVConfig(tiers=(HeadTier(0.1),) * 10)
    DKVConfig(tiers=[HeadTier(0.33333333), HeadTier(0.66666666)])


def test_a_config_goes_through_json():
    falling = (8, 6, 4, 4, 3, 2, 1, 0)
    tiers = (HeadTier(0.25, rank=7, key_bits=falling), HeadTier(0.75, routed=False, num_residuals=0, value_bits=2))
    config = DKVConfig(rank=3, key_bits=falling, value_bits=3, tiers=tiers)
    for each in (config, config.with_profile(profile_of([[1 / 3, 0.2], [0, 1]])), DKVConfig()):
        assert DKVConfig.from_dict(json.loads(json.dumps(each.to_dict()))) == each
        assert DKVConfig.from_dict(dataclasses.asdict(each)) == each
        assert hash(DKVConfig.from_dict(each.to_dict())) == hash(each)


def test_presets():
    assert DKVConfig.preset("default") == DKVConfig()
    assert DKVConfig.preset("paper", num_residuals=64) == DKVConfig.paper(64)
    profile = profile_of([[0.1]])
    assert DKVConfig.preset("default", profile, rank=4) == DKVConfig(rank=4, profile=profile)
    for name in PRESETS:
        assert isinstance(DKVConfig.preset(name), DKVConfig)


def test_ops_refuse_a_config_with_tiers():
    config = DKVConfig(block_size=8, tiers=HALVES, profile=profile_of([[0.5, 0.1]]))
    x = np.random.default_rng(0).standard_normal((1, 2, 16, 8), np.float32)
    with pytest.raises(ValueError, match=r"config has tiers: use cfg\.head_groups\(layer, num_kv_heads\)"):
        dkv.compress_blocks(x, x, config=config)
    for group in config.head_groups(0, 2):
        blocks = dkv.compress_blocks(x[:, group.heads], x[:, group.heads], config=group.config)
        dkv.decode_attention(x[:, group.heads, :1], blocks, config=group.config)
        with pytest.raises(ValueError, match="config has tiers"):
            dkv.decode_attention(x[:, group.heads, :1], blocks, config=config)
    dkv.prefill_attention(x, x, x, config=config)  # plain rows: tiers do not concern it


def test_rank_0_rebuilds_the_anchor():
    config = DKVConfig(block_size=8, rank=0, num_residuals=0, top_k=2)
    x = np.random.default_rng(0).standard_normal((1, 2, 24, 8)).astype(np.float32)
    blocks = dkv.compress_blocks(x, x, config=config)
    k, _ = dkv.reconstruct_blocks(blocks)
    np.testing.assert_array_equal(k, np.repeat(x[:, :, ::8], 8, axis=2))
    assert dkv.decode_attention(x[:, :, :1], blocks, config=config).out.shape == (1, 2, 1, 8)


# the reference


@st.composite
def partitions(draw, heads):
    """Groups of ``range(heads)`` in any order, their heads ascending."""
    labels = draw(st.lists(st.integers(0, 2), min_size=heads, max_size=heads))
    order = draw(st.permutations(sorted(set(labels))))
    return [tuple(head for head in range(heads) if labels[head] == label) for label in order]


@given(st.data(), st.integers(0, 2**20), st.sampled_from([1, 2, 3]))
def test_reference_groups_of_exact_blocks_are_dense_attention(data, seed, per_head):
    parts = data.draw(partitions(4))
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, 4 * per_head, 3, 6))
    k, v = rng.standard_normal((2, 4, 16 + 5, 6)), rng.standard_normal((2, 4, 16 + 5, 7))
    sink = rng.standard_normal(4 * per_head)
    config = DKVConfig(block_size=8, rank=2, num_residuals=7, format="fp32")
    blocks = [
        dkv.compress_blocks(k[:, heads, :16].astype(np.float32), v[:, heads, :16].astype(np.float32), config=config)
        for heads in parts
    ]
    every = [np.broadcast_to(np.arange(2, dtype=np.int32), (2, len(heads), 2)) for heads in parts]
    out, lse = groups.decode_groups(q, parts, blocks, k[:, :, 16:], v[:, :, 16:], every, sink=sink)
    k[:, :, :16], v[:, :, :16] = k[:, :, :16].astype(np.float32), v[:, :, :16].astype(np.float32)
    logits = np.einsum("bhqd,bhkd->bhqk", q, np.repeat(k, per_head, axis=1)) / 6**0.5
    logits[..., 16:] = np.where(np.arange(5) <= np.arange(3)[:, None] + 2, logits[..., 16:], -np.inf)
    weight = np.exp(logits)
    total = weight.sum(-1) + np.exp(sink)[:, None]
    np.testing.assert_allclose(lse, np.log(total), atol=1e-6)
    expected = weight @ np.repeat(v, per_head, axis=1) / total[..., None]
    np.testing.assert_allclose(out, expected, atol=1e-12)
    for x in (q, k):
        np.testing.assert_array_equal(groups.join_heads(groups.split_heads(x, parts), parts), x)


# the runtime of a layer

torch = pytest.importorskip("torch")

from dkv.cache import LayerCache  # noqa: E402
from dkv.cache.heads import pick, put_back  # noqa: E402
from dkv.testing import to_numpy  # noqa: E402

BASE = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=4, num_residuals=5, top_k=3)
FORMATS = [
    BASE,
    dataclasses.replace(BASE, num_residuals=15),
    dataclasses.replace(BASE, rank=0, num_residuals=0),
    dataclasses.replace(BASE, rank=2, residual_bits=8, top_k=1),
    dataclasses.replace(BASE, rank=3, residual_bits=16, router="residual", share="all", chunk_top_k=2),
    dataclasses.replace(BASE, router="minmax"),
    dataclasses.replace(BASE, num_residuals=15, rank=0, router="keys", key_bits=(7, 5, 4, 3, 2, 1, 1, 0), value_bits=3),
]


@st.composite
def grouped(draw, heads=4):
    """Groups with and without weights of channels; those without a config see sink and window alone."""
    made = []
    for part in draw(partitions(heads)):
        weight = draw(st.none() | st.lists(st.floats(0.1, 9), min_size=8, max_size=8))
        config = draw(st.none() | st.sampled_from(FORMATS))
        made.append(HeadGroup(part, config, None if weight is None else (tuple(weight),) * len(part)))
    return tuple(made)


def rows_of(seed, heads, tokens, dim, batch=2):
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


@given(grouped(), st.integers(0, 2**20), st.sampled_from([1, 2]), st.sampled_from([1, 5]))
def test_a_grouped_cache_is_its_groups_computed_alone(layout, seed, per_head, last):
    tokens = 8 + 24 + 5 * 16 + 3
    q, k, v = (rows_of(seed + i, h, tokens, d) for i, (h, d) in enumerate([(4 * per_head, 8), (4, 8), (4, 6)]))
    layer = LayerCache(BASE, layout)
    for start, stop in ((0, 61), (61, tokens - last), (tokens - last, tokens)):
        out = layer.attend(*(x[:, :, start:stop] for x in (q, k, v)))
    # blocks before the last chunk: a chunk attends what was closed before it
    count = (tokens - last - 8 - 24) // 16
    closed = slice(8, 8 + count * 16)
    kept = [group for group in layout if group.config is not None]
    assert layer.block_counts == [5, 5] and len(layer.blocks) == len(kept) and layer.stored_groups() == kept
    exact = torch.cat([torch.arange(8), torch.arange(8 + count * 16, tokens)])
    states, chosen_of, blocks_of, stored = [], [], [], iter(layer.blocks)
    for heads, config, weight in layout:
        heads, options = list(heads), {"config": config or BASE}
        if weight is not None:
            options["channel_weight"] = torch.tensor(weight, dtype=torch.float64)
        if config is None:
            closed_rows = slice(0, 0)  # no blocks at all
        else:
            closed_rows = closed
            whole = dkv.compress_blocks(k[:, heads, 8 : 8 + 80], v[:, heads, 8 : 8 + 80], **options)
            for (name, got), (_, want) in zip(next(stored).parts(), whole.parts(), strict=True):
                assert torch.equal(got, want), name
        config = config or BASE
        blocks = dkv.compress_blocks(k[:, heads, closed_rows], v[:, heads, closed_rows], **options)
        queries = q[:, [h * per_head + i for h in heads for i in range(per_head)], tokens - last :]
        top_k = config.top_k if last == 1 else config.chunk_top_k or count
        settings = {"router": config.router, "share": config.share, "sink_blocks": 0}
        chosen = dkv.route_blocks(queries, blocks, top_k=top_k, **settings)
        state = dkv.decode_attention(
            queries, blocks, k[:, heads][:, :, exact], v[:, heads][:, :, exact], config=config, block_indices=chosen
        )
        states.append(state.out)
        chosen_of.append(to_numpy(chosen))
        blocks_of.append(to_numpy(blocks))
    place = [h * per_head + i for group in layout for h in group.heads for i in range(per_head)]
    expected = torch.empty_like(out)
    expected[:, place] = torch.cat(states, dim=1)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)  # the same sums in another order of rows
    law, _ = groups.decode_groups(
        *(to_numpy(q[:, :, tokens - last :]).astype(np.float64), [group.heads for group in layout], blocks_of),
        *(to_numpy(x[:, :, exact]) for x in (k, v)),
        chosen_of,
    )
    np.testing.assert_allclose(to_numpy(out), law, atol=2e-5)
    # bytes are those of the arrays, and of the formula
    held = [part for blocks in layer.blocks for _, part in blocks.parts()]
    held += [layer.k_rows, layer.v_rows]
    assert layer.nbytes == sum(tensor.nbytes for tensor in held)
    formula = [accounting.block_nbytes(g.config.block_format, len(g.heads), 8, 6, 4) for g in kept]
    assert layer.compressed_nbytes == 2 * 5 * sum(sum(part.values()) for part in formula)
    assert layer.compressed_dense_nbytes == 2 * 5 * 16 * 4 * (8 + 6) * 4 and layer.dense_nbytes == 2 * tokens * 4 * 56


def test_heads_side_by_side_are_views():
    x = rows_of(0, 12, 3, 5)
    assert pick(x, (0, 1, 2, 3), 4) is x
    part = pick(x, (1, 2), 4)
    assert part.data_ptr() == x[:, 3:].data_ptr() and part.shape[1] == 6
    assert torch.equal(pick(x, (0, 2, 3), 4), torch.cat([x[:, :3], x[:, 6:]], dim=1))
    assert put_back([x], [(0, 1, 2, 3)]) is x


@given(st.data(), st.sampled_from([1, 3]))
def test_picked_heads_are_put_back(data, per_head):
    parts = data.draw(partitions(5))
    x = rows_of(1, 5 * per_head, 2, 3)
    assert torch.equal(put_back([pick(x, heads, 5) for heads in parts], parts), x)


def test_an_unrouted_tier_attends_every_block():
    scores = [[0.9, 0.1, 0.8, 0.2]]
    base = dataclasses.replace(BASE, top_k=1)
    outs = {}
    for routed in (True, False):
        config = dataclasses.replace(base, tiers=(HeadTier(0.5), HeadTier(0.5, rank=3, routed=routed)))
        layer = LayerCache(config, config.with_profile(profile_of(scores)).head_groups(0, 4))
        q, k, v = (rows_of(i, h, 150, 8) for i, h in enumerate((8, 4, 4)))
        layer.attend(q[:, :, :149], k[:, :, :149], v[:, :, :149])
        every = copy.deepcopy(layer)
        every.groups = tuple(HeadGroup(g.heads, dataclasses.replace(g.config, top_k=99)) for g in every.groups)
        step = [x[:, :, 149:] for x in (q, k, v)]
        outs[routed], all_blocks = layer.attend(*step), every.attend(*step)
    first, second = [0, 1, 4, 5], [2, 3, 6, 7]
    assert torch.equal(outs[False][:, second], all_blocks[:, second])
    assert not torch.allclose(outs[True][:, second], all_blocks[:, second], atol=1e-3)
    assert torch.equal(outs[False][:, first], outs[True][:, first])
    assert not torch.allclose(outs[False][:, first], all_blocks[:, first], atol=1e-3)


def test_a_nan_in_a_later_group_closes_nothing():
    layer = LayerCache(BASE, (HeadGroup((0,), BASE), HeadGroup((1,), FORMATS[1])))
    q, k, v = (rows_of(i, 2, 60, 8) for i in range(3))
    v[1, 1, 12, 3] = float("nan")
    with pytest.raises(ValueError, match="batch row 1, block 0"):
        layer.attend(q, k, v)
    assert (layer.tokens, layer.rows, layer.block_counts, layer.blocks) == ([60, 60], [60, 60], [0, 0], ())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([HeadGroup((0, 1), BASE), HeadGroup((1,), BASE)], r"every kv head once, got \[\[0, 1\], \[1\]\]"),
        ([HeadGroup((0, 2), BASE)], "every kv head once"),
        ([], "every kv head once"),
        ([HeadGroup((0, 1), DKVConfig())], "block_size"),
        ([HeadGroup((0, 1), BASE), HeadGroup((), BASE)], "must have heads"),
        ([HeadGroup((0, 1), dataclasses.replace(BASE, tiers=HALVES))], "plain config"),
        ([HeadGroup((0, 1, 2), BASE)], r"k must have the kv heads of \[\[0, 1, 2\]\], got 2"),
    ],
)
def test_groups_that_do_not_fit_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        LayerCache(BASE, layout).attend(*(rows_of(i, 2, 3, 8) for i in range(3)))


def test_a_layer_needs_the_groups_of_its_tiers():
    for config in (dataclasses.replace(BASE, tiers=HALVES), DKVConfig(ratio=4)):
        with pytest.raises(ValueError, match="config splits the heads: give its config.head_groups"):
            LayerCache(config)


def test_the_codec_of_closed_blocks_cannot_change():
    layer = LayerCache(BASE, (HeadGroup((0,), BASE), HeadGroup((1,), FORMATS[1])))
    layer.attend(*(rows_of(i, 2, 20, 8) for i in range(3)))
    layer.configure(BASE)  # nothing is closed yet
    layer.attend(*(rows_of(i, 2, 60, 8) for i in range(3)))
    routed = dataclasses.replace(BASE, top_k=1)
    layer.configure(routed)
    layer.configure(BASE, (HeadGroup((0, 1), BASE),))
    for config, layout in (
        (FORMATS[1], None),
        (BASE, (HeadGroup((0,), BASE), HeadGroup((1,), BASE))),
    ):
        with pytest.raises(ValueError, match="stores blocks in another way"):
            layer.configure(config, layout)
    assert layer.config is BASE and layer.groups == (HeadGroup((0, 1), BASE),)


# models

transformers = pytest.importorskip("transformers")

from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

EXACT = DKVConfig(
    block_size=16,
    window=24,
    sink_tokens=8,
    format="fp32",
    rank=4,
    num_residuals=15,
    top_k=1000,
    tiers=(HeadTier(0.4), HeadTier(0.3, rank=0), HeadTier(0.3, routed=False, rank=2)),
)
LOSSY = dataclasses.replace(
    EXACT,
    format="compact",
    top_k=2,
    tiers=(
        HeadTier(0.5, num_residuals=15, key_bits=(8, 8, 6, 6, 5, 5, 4, 2), value_bits=5),
        HeadTier(0.5, routed=False, rank=2, num_residuals=2),
    ),
)
TOLERANCE = 3e-5  # logits of 5: float32 sums in another order; the largest difference seen is 8e-6

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module", params=sorted(MODELS))
def case(request):
    torch.manual_seed(0)
    config = MODELS[request.param]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 97, (1, 150))
    with torch.no_grad():
        dense = model(ids).logits
    return model, ids, dense


def scores(seed):
    return np.random.default_rng(seed).random((4, 3))


@pytest.mark.parametrize("seed", range(6))
def test_exact_tiers_are_the_dense_model_whatever_the_partition(case, seed):
    model, ids, dense = case
    config = EXACT.with_profile(profile_of(scores(seed)))
    attach(model, config)
    cache = DKVCache(model)
    layouts = {tuple(group.heads for group in layer.groups) for layer in cache.dkv_layers}
    assert any(len(layout) > 1 for layout in layouts)
    torch.testing.assert_close(feed(model, ids, [100, 1, 1, 48], cache), dense, atol=TOLERANCE, rtol=0)
    assert all(layer.block_counts == [7] and len(layer.blocks) == len(layer.groups) for layer in cache.dkv_layers)


def test_layer_indices_are_those_of_the_model(case):
    model, _, _ = case
    config = EXACT.with_profile(profile_of(scores(3)))
    cache = DKVCache(attach(model, config))
    kept = [index for index, layer in enumerate(cache.layers) if hasattr(layer, "state")]
    assert len(kept) == len(cache.dkv_layers) and kept in ([0, 1, 2, 3], [1, 3])
    for index, layer in zip(kept, cache.dkv_layers, strict=True):
        assert layer.groups == config.head_groups(index, 3)


def test_left_padded_rows_equal_solo_runs(case):
    model, ids, dense = case
    attach(model, EXACT.with_profile(profile_of(scores(1))))
    rows, mask = torch.zeros(3, 150, dtype=torch.long), torch.zeros(3, 150, dtype=torch.long)
    lengths = [150, 57, 3]
    for row, length in enumerate(lengths):
        rows[row, -length:], mask[row, -length:] = ids[0, :length], 1
    out = feed(model, rows, [64, 64, 18, 1, 1, 1, 1], DKVCache(model), mask)
    assert not out.isnan().any()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[row, -length:], dense[0, :length], atol=TOLERANCE, rtol=0)


def test_surgery_walks_every_group(case, tmp_path):
    model, ids, _ = case
    attach(model, LOSSY.with_profile(profile_of(scores(2))))
    cache = DKVCache(model)
    feed(model, torch.cat([ids, ids.flip(1)]), [100], cache)
    assert cache.compressed_nbytes == sum(b.nbytes for layer in cache.dkv_layers for b in layer.blocks)
    assert cache.compressed_nbytes < cache.compressed_dense_nbytes
    dense = 2 * sum(layer.block_counts[0] * 16 * 3 * (8 + 8) * 4 for layer in cache.dkv_layers)
    assert cache.compressed_dense_nbytes == dense
    path = str(tmp_path / "cache.safetensors")
    cache.save(path)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    cropped = copy.deepcopy(cache)
    picked = copy.deepcopy(cache)
    picked.batch_select_indices(torch.tensor([1]))
    rest = torch.cat([ids, ids.flip(1)])[:, 100:]
    tail = feed(model, rest, [20, 1, 29], cache)
    assert torch.equal(feed(model, rest, [20, 1, 29], DKVCache(model).load(path)), tail)
    torch.testing.assert_close(feed(model, rest.flip(0), [20, 1, 29], swapped), tail.flip(0), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(feed(model, rest[1:], [20, 1, 29], picked), tail[1:], atol=TOLERANCE, rtol=0)
    if all(hasattr(layer, "state") for layer in cropped.layers):  # transformers' sliding layers do not crop
        feed(model, rest.flip(1), [3], cropped)
        cropped.crop(-3)
        torch.testing.assert_close(feed(model, rest, [20, 1, 29], cropped), tail, atol=TOLERANCE, rtol=0)
        with pytest.raises(ValueError, match="closed block"):
            cropped.crop(-60)
    cache.reset()
    assert cache.nbytes == 0 and all(layer.blocks == () for layer in cache.dkv_layers)


def _renamed(entries, **to):
    """Groups of layer 0 under other numbers."""
    held = {name: entries.pop(name) for name in list(entries) if name.startswith("0.groups.")}
    for name, entry in held.items():
        layer, groups_word, index, part = name.split(".")
        entries[".".join((layer, groups_word, to.get(f"_{index}", index), part))] = entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta, entries: meta.update(version=1), r"its version is 1, this dkv reads cache files of version 4"),
        (lambda meta, entries: _renamed(entries, _1="2"), r"layer 0 of the file has blocks of the groups \['0', '2'\]"),
        (lambda meta, entries: _renamed(entries, _0="1", _1="0"), "layer 0 of the file|of the file must"),
        (lambda meta, entries: entries.update({"0.groups.1.x": entries.pop("0.groups.1.u")}), "parts of the file"),
        (lambda meta, entries: meta["config"]["tiers"][0].update(rank=3), "tiers of the file is"),
        (
            lambda meta, entries: meta["config"]["profile"]["scores"][3].reverse(),
            "profile of the file has other scores",
        ),
        (lambda meta, entries: meta["config"].update(profile=None), "profile of the file is None"),
    ],
)
def test_a_changed_file_is_refused_and_nothing_is_loaded(tmp_path, change, message):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
    attach(model, LOSSY.with_profile(profile_of([[0.9, 0.1, 0.8], [0.7, 0.2, 0.1], [0.9, 0.9, 0.9], [0, 0, 0.1]])))
    cache, path = DKVCache(model), tmp_path / "cache.safetensors"
    model(torch.arange(90)[None], past_key_values=cache)
    cache.save(str(path))
    rewritten(path, change)
    other = DKVCache(model)
    model(torch.arange(30)[None], past_key_values=other)
    with pytest.raises(ValueError, match=message):
        other.load(str(path))
    assert [layer.tokens for layer in other.dkv_layers] == [[30]] * 4


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (profile_of(np.ones((5, 3))), "profile is of a model with 5 layers, this one has 4"),
        (profile_of(np.ones((4, 2))), "profile is of a model with 2 kv heads, this one has 3"),
        (profile_of(np.ones((4, 3)), head_dim=16), "profile is of a model with head dim 16, this one has 8"),
        (None, "tiers need the profile of a model: make a profile with `dkv profile MODEL -o FILE`"),
    ],
)
def test_a_foreign_profile_is_refused_before_anything_is_compressed(case, profile, message):
    model, _, _ = case
    detach(model)
    before = model.config._attn_implementation
    config = dataclasses.replace(EXACT, profile=profile)
    with pytest.raises(ValueError, match=message):
        attach(model, config)
    assert model.config._attn_implementation == before and not hasattr(model, "_dkv_config")
    with pytest.raises(ValueError, match=message):
        DKVCache(model, config)
    with pytest.raises(ValueError, match=message):
        DKVCache(model.config, config)
    if profile is not None:
        with pytest.raises(ValueError, match=message):
            attach(model, DKVConfig(profile=profile))  # also where it changes nothing
    cache = DKVCache(model, EXACT.with_profile(profile_of(scores(0))))
    with pytest.raises(ValueError, match=message):
        cache.configure(config)
    assert cache.config.profile == profile_of(scores(0))


def test_a_cache_goes_on_with_other_settings_while_nothing_is_closed(case):
    model, ids, dense = case
    attach(model, EXACT.with_profile(profile_of(scores(4))))
    cache = DKVCache(model, dataclasses.replace(EXACT, tiers=(), window=500))
    feed(model, ids, [100], cache)
    cache.configure(EXACT.with_profile(profile_of(scores(4))))
    cache.compress()
    assert all(layer.block_counts == [4] and len(layer.blocks) == len(layer.groups) for layer in cache.dkv_layers)
    torch.testing.assert_close(feed(model, ids[:, 100:], [50], cache), dense[:, 100:], atol=TOLERANCE, rtol=0)
    before = [layer.groups for layer in cache.dkv_layers]
    later = scores(4)
    later[3] = later[3, [1, 2, 0]]  # the last layer alone is grouped otherwise
    with pytest.raises(ValueError, match="stores blocks in another way"):
        cache.configure(dataclasses.replace(EXACT, top_k=1, profile=profile_of(later)))
    assert [layer.groups for layer in cache.dkv_layers] == before


def test_generate_with_groups(case):
    model, ids, _ = case
    attach(model, EXACT.with_profile(profile_of(scores(0))))
    options = {"max_new_tokens": 24, "num_beams": 3, "do_sample": False}
    ours = model.generate(ids[:, :90], past_key_values=DKVCache(model), **options)
    detach(model)
    assert torch.equal(ours, model.generate(ids[:, :90], **options))


def test_blocks_of_a_group_rebuild_its_heads():
    config = dataclasses.replace(BASE, tiers=(HeadTier(0.5, num_residuals=15, residual_bits=16), HeadTier(0.5)))
    second, first = config.with_profile(profile_of([[0.1, 0.9, 0.2, 0.8]])).head_groups(0, 4)
    k = rows_of(5, 4, 32, 8).numpy()
    blocks = dkv.compress_blocks(k[:, first.heads], k[:, first.heads], config=first.config)
    np.testing.assert_array_equal(reconstruct_blocks(blocks)[0], k[:, [1, 3]])
    assert second.heads == (0, 2)
