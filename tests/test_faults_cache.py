"""Ways in which a cache was once made to give a wrong number without a word; each is now right or refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from synthetic import rewritten

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import dkv  # noqa: E402
from dkv import DKVConfig  # noqa: E402
from dkv.cache import LayerCache  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

EXACT = DKVConfig(block_size=16, window=16, sink_tokens=8, format="fp32", rank=4, top_k=1000)
SHAPE = {"vocab_size": 64, "initializer_range": 0.3, "hidden_size": 64, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return attach(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval(), EXACT)


@pytest.fixture
def ids():
    return torch.randint(0, 64, (2, 100), generator=torch.Generator().manual_seed(1))


def dense_logits(model, ids, **extra):
    twin = copy.deepcopy(model)
    detach(twin)
    return twin(ids, **extra).logits


def test_right_padding_in_a_prepared_mask(model, ids):
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, 15:] = False
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    mask = causal[None, None] & real[:, None, None, :] & real[:, None, :, None]
    cache = DKVCache(model)
    out = model(ids[:, :20], past_key_values=cache, attention_mask=mask).logits
    assert cache.dkv_layers[0].tokens == [15, 20]
    torch.testing.assert_close(out[real], dense_logits(model, ids[:, :20])[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["2d", "bool", "min", "inf"])
def test_a_mask_that_hides_stored_positions_is_refused(model, ids, form):
    cache = DKVCache(model)
    model(ids[:, :20], past_key_values=cache)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, 3:12] = 0
    if form != "2d":
        mask = mask.bool()[:, None, None]
    if form in ("min", "inf"):
        low = torch.finfo(torch.float32).min if form == "min" else -torch.inf
        mask = torch.zeros(mask.shape).masked_fill(~mask, low)
    with pytest.raises(NotImplementedError, match="attention_mask differs"):
        model(ids[:, 20:21], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("value", [-2.0, -1e4])
def test_a_bias_in_the_mask_is_refused(model, ids, value):
    mask = torch.zeros(2, 1, 20, 20).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    mask[:, :, 12, 3] = value
    with pytest.raises(NotImplementedError, match="bias"):
        model(ids[:, :20], past_key_values=DKVCache(model), attention_mask=mask)


@pytest.mark.parametrize("form", ["bool", "min", "inf"])
def test_left_padding_as_a_prepared_mask(model, ids, form):
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, :6] = False
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None, None] & real[:, None, None, :]
    if form != "bool":
        low = torch.finfo(torch.float32).min if form == "min" else -torch.inf
        mask = torch.zeros(mask.shape).masked_fill(~mask, low)
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    cache = DKVCache(model)
    out = model(ids[:, :20], past_key_values=cache, attention_mask=mask, position_ids=positions).logits
    solo = dense_logits(model, ids[:1, 6:20])
    torch.testing.assert_close(out[:1, 6:], solo, atol=1e-4, rtol=0)
    assert cache.dkv_layers[0].tokens == [14, 20] and not out.isnan().any()


def test_a_step_after_an_interrupted_one_is_refused(model, ids):
    cache = DKVCache(model)
    model(ids[:, :60], past_key_values=cache)

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 60:61], past_key_values=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match="different tokens"):
        model(ids[:, 60:61], past_key_values=cache)
    cache.reset()
    out = model(ids[:, :60], past_key_values=cache).logits
    torch.testing.assert_close(out, dense_logits(model, ids[:, :60]), atol=1e-4, rtol=0)


def test_compress_refuses_a_negative_window_and_never_grows(model, ids):
    cache = DKVCache(model)
    model(ids[:, :80], past_key_values=cache)
    with pytest.raises(ValueError, match="window must be 0 or more"):
        cache.compress(-8)
    layer = LayerCache(DKVConfig(window=1024, sink_tokens=256))
    torch.manual_seed(0)
    layer.attend(*(torch.randn(1, heads, 1200, 64) for heads in (3, 3, 3)))
    before = layer.nbytes
    layer.close(256)
    assert layer.block_counts == [2] and layer.nbytes < before


def test_a_format_that_cannot_hold_the_models_dtype_is_refused_at_once(model):
    with pytest.raises(ValueError, match="cannot store factors of a bfloat16 cache"):
        DKVCache(model.bfloat16(), DKVConfig(format="fp16"))


def test_two_models_that_share_a_config_detach():
    first = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    attach(first, EXACT)
    second = attach(transformers.LlamaForCausalLM(first.config).eval(), EXACT)
    detach(second)
    assert second.config._attn_implementation == "sdpa"


def test_selection_of_nothing_bools_and_an_empty_cache(model, ids):
    cache = DKVCache(model)
    cache.batch_select_indices(torch.tensor([0, 1]))
    model(ids[:, :30], past_key_values=cache)
    with pytest.raises(TypeError, match="index"):
        cache.reorder_cache(torch.tensor([True, False]))
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.get_seq_length() == 0
    model(ids[:1, :30], past_key_values=cache)


def test_finite_input_never_gives_infinity():
    generator = torch.Generator().manual_seed(3)
    v = (torch.randn(1, 1, 64, 8, generator=generator).sign() * 65504).half()
    k = (torch.randn(1, 1, 64, 8, generator=generator) * 4).half()
    config = DKVConfig(block_size=64)
    blocks = dkv.compress_blocks(k, v, config=config)
    q = k[:, :, 5:9] * 3
    assert dkv.decode_attention(q, blocks, config=config).out.isfinite().all()


# files


def _rename(entries, old, new):
    entries[new] = entries.pop(old)


CHANGES = {
    "offset": lambda meta, entries: meta["layers"][0].update(offset=90),
    "layers are a number": lambda meta, entries: meta.update(layers=5),
    "layers are numbers": lambda meta, entries: meta.update(layers=[1, 2]),
    "tokens": lambda meta, entries: meta["layers"][1].update(tokens=[79, 80]),
    "dtype of an anchor": lambda meta, entries: entries["0.groups.0.anchor_v"].update(dtype="I32"),
    "dtype of the rows": lambda meta, entries: entries["0.k_rows"].update(dtype="I32"),
    "dtype of the coefficients": lambda meta, entries: entries["1.groups.0.u"].update(dtype="I32"),
    "positions that the format does not store": lambda meta, entries: _rename(
        entries, "1.groups.0.u_unit", "1.groups.0.residual_indices"
    ),
    "missing rows": lambda meta, entries: _rename(entries, "1.v_rows", "1.other"),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_changed_file_is_refused_and_nothing_is_loaded(model, ids, tmp_path, change):
    path = tmp_path / "cache.safetensors"
    cache = DKVCache(model)
    model(ids[:, :80], past_key_values=cache)
    cache.save(str(path))
    rewritten(path, CHANGES[change])
    other = DKVCache(model)
    model(ids[:1, :30], past_key_values=other)
    with pytest.raises(ValueError, match="file"):
        other.load(str(path))
    assert [layer.tokens for layer in other.dkv_layers] == [[30], [30]]


@pytest.mark.parametrize("positions", [0, 5, 255])
def test_residual_positions_that_name_no_row_are_refused(tmp_path, positions):
    torch.manual_seed(0)
    some = dataclasses.replace(EXACT, num_residuals=3)
    blocks = dkv.compress_blocks(*(torch.randn(1, 2, 32, 8) for _ in range(2)), config=some)
    blocks.residual_indices.fill_(positions)
    blocks.save(str(tmp_path / "blocks"))
    with pytest.raises(ValueError, match="residual_indices"):
        dkv.CompressedBlocks.load(str(tmp_path / "blocks"), backend="torch")


def _hybrid():
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**{**SHAPE, "num_hidden_layers": 4}, head_dim=16, sliding_window=24)
    return attach(transformers.Gemma2ForCausalLM(config).eval(), EXACT)


def test_loading_an_empty_cache_empties_every_layer(ids, tmp_path):
    model, path = _hybrid(), str(tmp_path / "empty")
    DKVCache(model).save(path)
    cache = DKVCache(model)
    model(ids[:1, :81], past_key_values=cache)
    cache.load(path)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [0, 0, 0, 0]


def test_a_hybrid_cache_loads_whole_or_not_at_all(ids, tmp_path):
    model, path = _hybrid(), tmp_path / "cache"
    cache = DKVCache(model)
    model(ids[:1, :81], past_key_values=cache)
    cache.save(str(path))
    twin = DKVCache(model).load(str(path))
    first, second = (model(ids[:1, 81:84], past_key_values=each).logits for each in (cache, twin))
    assert torch.equal(first, second)
    sliding = next(index for index, kind in enumerate(cache.is_sliding) if kind)
    rewritten(path, lambda meta, entries: _rename(entries, f"{sliding}.keys", f"{sliding}.kees"))
    other = DKVCache(model)
    model(ids[:1, :30], past_key_values=other)
    with pytest.raises(ValueError, match="must hold keys and values"):
        other.load(str(path))
    assert [other.get_seq_length(layer) for layer in range(4)] == [30] * 4


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_cache_saved_in_the_midst_of_drafts_goes_on_alike(model, ids, tmp_path, kind):
    """Its newest chunk has not closed what it made due, and bounded layers hold more rows than they need."""
    model = model if kind == "llama" else _hybrid()
    cache = DKVCache(model)
    cache.activate_past_recording()
    model(ids[:1, :81], past_key_values=cache)
    cache.save(str(tmp_path / "cache"))
    twin = DKVCache(model).load(str(tmp_path / "cache"))
    assert twin.dkv_layers[0].block_counts == [3] and cache.dkv_layers[0].block_counts == [0]
    first, second = (model(ids[:1, 81:99], past_key_values=each).logits for each in (cache, twin))
    assert torch.equal(first, second)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("first", [0, 20])
def test_a_hybrid_step_cut_short_in_any_layer_is_noticed(ids, layer, first):
    """Bounded layers had seen the cut step and full ones had not, or the other way round; positions were then wrong."""
    model = _hybrid()
    cache = DKVCache(model)
    if first:
        model(ids[:1, :first], past_key_values=cache)

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].self_attn.q_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:1, first : first + 4], past_key_values=cache)
    hook.remove()
    if layer == 0:  # nothing was stored yet
        out = model(ids[:1, first : first + 4], past_key_values=cache).logits
        torch.testing.assert_close(out, dense_logits(model, ids[:1, : first + 4])[:, first:], atol=1e-4, rtol=0)
    else:
        with pytest.raises(RuntimeError, match="different tokens"):
            model(ids[:1, first : first + 4], past_key_values=cache)


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(model, ids):
    with torch.inference_mode():
        cache = DKVCache(model)
        model(ids[:, :60], past_key_values=cache)
    out = torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in ((60, 61), (61, 90))], dim=1)
    torch.testing.assert_close(out, dense_logits(model, ids[:, :90])[:, 60:], atol=1e-4, rtol=0)


def test_layers_that_share_keys_are_refused_at_once():
    shape = SHAPE | {"num_hidden_layers": 4, "intermediate_size": [64] * 4, "head_dim": 16, "sliding_window": 7}
    types = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3nTextConfig(**shape, layer_types=types, num_kv_shared_layers=2)
    with pytest.raises(NotImplementedError, match="share keys and values"):
        DKVCache(config, EXACT)
