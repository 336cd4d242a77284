"""Heads that see sink and window alone: in a layer, in whole models, and through everything that walks a cache."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from synthetic import MODELS, feed, profile_of

from dkv import DKVConfig
from dkv.config import HeadGroup

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dkv.cache import LayerCache  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach  # noqa: E402

BASE = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=0, router="keys")
KEPT = np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0]])  # layer 2 keeps no block of any head
SOME = dataclasses.replace(
    BASE,
    ratio=2,
    routed_share=0.5,
    top_k=2,
    profile=profile_of(np.random.default_rng(0).random((4, 3)), drop_loss=KEPT),
)
NONE = dataclasses.replace(SOME, profile=dataclasses.replace(SOME.profile, drop_loss=0 * KEPT))
TOLERANCE = 3e-5

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(params=sorted(MODELS))
def model(request):
    torch.manual_seed(0)
    config = MODELS[request.param]()
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).eval()


IDS = torch.randint(0, 97, (2, 150), generator=torch.Generator().manual_seed(1))
CHUNKS = [60, 40, 1, 1, 48]


def closed(tokens):
    """Blocks that are closed once ``tokens`` were seen."""
    return max(0, (tokens - 8 - 24) // 16)


def near(chunks):
    """Which rows a query sees of what its chunk finds exact, bool ``[n, n]``."""
    total, start = sum(chunks), 0
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    for length in chunks:
        seen[start : start + length, 8 : 8 + 16 * closed(start)] = False
        start += length
    return seen


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kept", [(), (1,), (0, 2)])
def test_a_forgotten_head_is_attention_over_sink_and_window(kept, softcap):
    gone = tuple(head for head in range(3) if head not in kept)
    layout = [HeadGroup(gone, None)] + [HeadGroup((head,), BASE) for head in kept]
    layer = LayerCache(BASE, layout)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 150, dim, generator=rng) for heads, dim in ((6, 8), (3, 8), (3, 5)))
    sink = torch.randn(6, generator=rng)
    outs, start = [], 0
    for length in CHUNKS:
        part = slice(start, start + length)
        outs.append(layer.attend(q[:, :, part], k[:, :, part], v[:, :, part], softcap=softcap, sink=sink))
        start += length
    logits = q.double() @ k.double().repeat_interleave(2, 1).mT * 8**-0.5
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    weight = logits.exp() * near(CHUNKS)
    weight = weight / (weight.sum(-1, keepdim=True) + sink.double().exp()[:, None, None])
    want = weight @ v.double().repeat_interleave(2, 1)
    for head in range(3):
        mine = slice(2 * head, 2 * head + 2)
        same = torch.allclose(torch.cat(outs, 2)[:, mine].double(), want[:, mine], atol=1e-5)
        assert same == (head in gone)
    assert layer.block_counts == [7, 7] and len(layer.blocks) == len(kept) == len(layer.stored_groups())
    assert (layer.compressed_nbytes == 0) == (not kept)
    assert layer.compressed_dense_nbytes == 2 * 7 * 16 * 3 * (8 + 5) * 4
    assert layer.nbytes == sum(x.nbytes for x in (layer.k_rows, layer.v_rows)) + sum(x.nbytes for x in layer.blocks)
    assert layer.k_rows.shape[2] < 60


def test_a_model_of_forgotten_heads_is_a_dense_one_with_their_mask(model):
    """All heads of all full layers see sink and window alone."""
    far = torch.finfo(torch.float32).min
    causal = torch.ones(150, 150, dtype=torch.bool).tril()
    masks = {
        "full_attention": torch.zeros(1, 1, 150, 150).masked_fill(~near(CHUNKS), far),
        "sliding_attention": torch.zeros(1, 1, 150, 150).masked_fill(~(causal & ~causal.tril(-40)), far),
    }
    kinds = getattr(model.config, "layer_types", None)
    want = model(IDS, attention_mask=masks if kinds else masks["full_attention"], use_cache=False).logits
    dense = model(IDS, use_cache=False).logits
    cache = DKVCache(attach(model, NONE))
    got = feed(model, IDS, CHUNKS, cache)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    assert not torch.allclose(got, dense, atol=0.1)
    assert all(layer.block_counts == [7, 7] and layer.blocks == () for layer in cache.dkv_layers)
    assert cache.compressed_nbytes == 0 < cache.compressed_dense_nbytes


@pytest.mark.parametrize("config", [SOME, NONE], ids=["some", "none"])
def test_everything_that_walks_a_cache(model, config, tmp_path):
    attach(model, config)
    cache, path = DKVCache(model), str(tmp_path / "cache.safetensors")
    feed(model, IDS, [100], cache)
    full = [index for index, layer in enumerate(cache.layers) if hasattr(layer, "state")]
    for index, layer in zip(full, cache.dkv_layers, strict=True):
        stored = {head for group in layer.stored_groups() for head in group.heads}
        assert stored == (set() if config is NONE else set(np.flatnonzero(KEPT[index])))
        assert len(layer.blocks) == len(layer.stored_groups()) and layer.block_counts == [4, 4]
    assert cache.compressed_nbytes == sum(b.nbytes for layer in cache.dkv_layers for b in layer.blocks)
    assert cache.compressed_dense_nbytes == len(full) * 2 * 4 * 16 * 3 * (8 + 8) * 4
    cache.save(path)
    swapped, cropped, picked, tail = (copy.deepcopy(cache) for _ in range(4))
    swapped.reorder_cache(torch.tensor([1, 0]))
    picked.batch_select_indices(torch.tensor([1]))
    rest, steps = IDS[:, 100:], [20, 1, 29]
    want = feed(model, rest, steps, tail)
    assert tail.dkv_layers[0].block_counts == [7, 7] and cache.dkv_layers[0].block_counts == [4, 4]
    loaded = DKVCache(model).load(path)
    assert loaded.nbytes == cache.nbytes - spare(cache)
    for layer, own in zip(loaded.dkv_layers, cache.dkv_layers, strict=True):
        assert set(layer.tensors()) == set(own.tensors()) and layer.block_counts == own.block_counts
    assert torch.equal(feed(model, rest, steps, loaded), want)
    torch.testing.assert_close(feed(model, rest.flip(0), steps, swapped), want.flip(0), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(feed(model, rest[1:], steps, picked), want[1:], atol=TOLERANCE, rtol=0)
    assert picked.dkv_layers[0].block_counts == [7]
    if len(full) == 4:  # transformers' sliding layers do not crop
        feed(model, rest.flip(1), [3], cropped)
        cropped.crop(-3)
        torch.testing.assert_close(feed(model, rest, steps, cropped), want, atol=TOLERANCE, rtol=0)
        with pytest.raises(ValueError, match="closed block"):
            cropped.crop(-60)
    cache.reset()
    assert cache.nbytes == 0 and all(layer.blocks == () for layer in cache.dkv_layers)


def spare(cache):
    """Bytes of rows that a cache has room for and does not use."""
    rows = [(layer.k_rows, layer.v_rows, max(layer.rows)) for layer in cache.dkv_layers]
    return sum((x[:, :, stored:]).numel() * x.element_size() for *both, stored in rows for x in both)


def test_padded_rows_equal_solo_runs():
    torch.manual_seed(0)
    model = attach(transformers.LlamaForCausalLM(MODELS["llama"]()).eval(), SOME)
    rows, mask = torch.zeros(2, 150, dtype=torch.long), torch.zeros(2, 150, dtype=torch.long)
    for row, length in enumerate((150, 70)):
        rows[row, -length:], mask[row, -length:] = IDS[0, :length], 1
    cache, outs = DKVCache(model), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, stop in ((0, 149), (149, 150)):
        extra = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        outs.append(model(rows[:, start:stop], past_key_values=cache, **extra).logits)
    assert cache.dkv_layers[2].block_counts == [7, 2] and cache.dkv_layers[2].blocks == ()
    for row, length in enumerate((150, 70)):
        solo = feed(model, IDS[:1, :length], [length - 1, 1], DKVCache(model))
        torch.testing.assert_close(torch.cat(outs, 1)[row, -length:], solo[0], atol=TOLERANCE, rtol=0)


def test_a_file_of_other_groups_is_refused(tmp_path):
    torch.manual_seed(0)
    model = attach(transformers.LlamaForCausalLM(MODELS["llama"]()).eval(), SOME)
    cache = DKVCache(model)
    feed(model, IDS, [100], cache)
    cache.save(str(tmp_path / "some"))
    other = DKVCache(model, NONE)
    feed(model, IDS, [30], other)
    with pytest.raises(ValueError, match="profile of the file has other scores"):
        other.load(str(tmp_path / "some"))
    with pytest.raises(ValueError, match=r"ratio of the file is 2, this cache has 3"):
        DKVCache(model, dataclasses.replace(SOME, ratio=3)).load(str(tmp_path / "some"))
    assert [layer.tokens for layer in other.dkv_layers] == [[30, 30]] * 4
    # closed blocks cannot be forgotten or made afterwards, rows that are not closed can
    for held, wanted in ((cache, NONE), (cache, dataclasses.replace(SOME, ratio=16))):
        with pytest.raises(ValueError, match="stores blocks in another way"):
            held.configure(wanted)
    other.configure(SOME)
    feed(model, IDS[:, 30:], [70], other)
    for got, want in zip(other.dkv_layers, cache.dkv_layers, strict=True):
        assert [x.nbytes for x in got.blocks] == [x.nbytes for x in want.blocks]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (profile_of(np.ones((5, 3))), "profile is of a model with 5 layers, this one has 4"),
        (profile_of(np.ones((4, 2))), "profile is of a model with 2 kv heads, this one has 3"),
        (profile_of(np.ones((4, 3)), head_dim=16), "profile is of a model with head dim 16, this one has 8"),
        (None, "ratio needs the profile of a model: make a profile with `dkv profile MODEL -o FILE`"),
    ],
)
def test_a_foreign_profile_is_refused_before_anything_is_compressed(profile, message):
    model = transformers.LlamaForCausalLM(MODELS["llama"]())
    before = model.config._attn_implementation
    config = dataclasses.replace(SOME, profile=profile)
    for call in (
        lambda: attach(model, config),
        lambda: DKVCache(model, config),
        lambda: DKVCache(model.config, config),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert model.config._attn_implementation == before and not hasattr(model, "_dkv_config")
