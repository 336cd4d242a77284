"""The runtime in transformers models with small random weights: at exact formats it is the dense model."""

from __future__ import annotations

import copy

import pytest
from synthetic import feed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dkv import DKVConfig  # noqa: E402
from dkv.cache import LayerCache  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen2": lambda: transformers.Qwen2Config(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=None),
    "gemma2": lambda: transformers.Gemma2Config(**BASE, sliding_window=40, query_pre_attn_scalar=8),
}
EXACT = DKVConfig(block_size=16, window=24, sink_tokens=8, format="fp32", rank=4, num_residuals=15, top_k=1000)
TOLERANCE = 2e-6  # float32 sums in another order; the largest difference seen is 4e-7
TOKENS = 150


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request):
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 97, (1, TOKENS))
    with torch.no_grad():
        dense = model(ids).logits
    attach(model, EXACT)
    return model, ids, dense

pytestmark = pytest.mark.usefixtures("quiet")


def padded(ids, lengths):
    rows = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        rows[row, -length:] = ids[0, :length]
        mask[row, -length:] = 1
    return rows, mask


@pytest.mark.parametrize("chunks", [[150], [100, 1, 1, 48], [30] * 5, [1] * 150], ids=["one", "mixed", "even", "ones"])
def test_logits_equal_the_dense_models(case, chunks):
    model, ids, dense = case
    cache = DKVCache(model)
    torch.testing.assert_close(feed(model, ids, chunks, cache), dense, atol=TOLERANCE, rtol=0)
    assert cache.get_seq_length() == TOKENS
    for layer in cache.dkv_layers:  # the state depends on the tokens alone: 150 - 8 sink - 24 window holds 7 blocks
        assert (layer.block_counts, layer.rows) == ([7], [TOKENS - 7 * 16])


def test_without_a_cache_nothing_changes(case):
    model, ids, dense = case
    torch.testing.assert_close(model(ids).logits, dense, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunks", [[150], [64, 64, 18, 1, 1, 1, 1]], ids=["one", "chunks"])
def test_left_padded_rows_equal_solo_runs(case, chunks):
    model, ids, dense = case
    lengths = [150, 57, 3]
    rows, mask = padded(ids, lengths)
    out = feed(model, rows, chunks, DKVCache(model), mask)
    assert not out.isnan().any()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[row, -length:], dense[0, :length], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", ["greedy", "beam", "sample"])
def test_generate_equals_dense(case, how):
    model, ids, _ = case
    rows, mask = padded(ids, [90, 41])
    options = {"greedy": {}, "beam": {"num_beams": 3}, "sample": {"do_sample": True}}[how]
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    torch.manual_seed(1)
    ours = model.generate(rows, attention_mask=mask, past_key_values=DKVCache(model), **options)
    detach(model)
    try:
        torch.manual_seed(1)
        assert torch.equal(ours, model.generate(rows, attention_mask=mask, **options))
    finally:
        attach(model, EXACT)


def test_save_load_and_deepcopy_go_on_bit_equal(case, tmp_path):
    model, ids, _ = case
    cache = DKVCache(model)
    feed(model, ids, [100], cache)
    cache.save(str(tmp_path / "cache.safetensors"))
    others = [DKVCache(model).load(str(tmp_path / "cache.safetensors")), copy.deepcopy(cache)]
    tail = feed(model, ids[:, 100:], [50], cache)
    for other in others:
        assert torch.equal(feed(model, ids[:, 100:], [50], other), tail)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


def test_load_refuses_another_config_and_a_cut_file(case, tmp_path):
    model, ids, _ = case
    cache, path = DKVCache(model), tmp_path / "cache.safetensors"
    feed(model, ids, [100], cache)
    cache.save(str(path))
    other = DKVCache(model, DKVConfig(block_size=16, rank=8))
    with pytest.raises(ValueError, match="rank of the file is 4, this cache has 8|num_residuals"):
        other.load(str(path))
    path.write_bytes(path.read_bytes()[:-100])
    fresh = DKVCache(model)
    with pytest.raises(ValueError, match="not a whole dkv cache file"):
        fresh.load(str(path))
    assert fresh.get_seq_length() == 0


def test_crop_restores_or_refuses_before_changing_anything():
    model, ids, dense = _llama()
    cache = DKVCache(model)
    feed(model, ids, [150], cache)  # 8 sink rows, 7 blocks, 30 window rows
    with pytest.raises(ValueError, match="closed block"):
        cache.crop(-31)
    assert cache.get_seq_length() == TOKENS
    cache.crop(-30)
    torch.testing.assert_close(feed(model, ids[:, 120:], [30], cache), dense[:, 120:], atol=TOLERANCE, rtol=0)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_select_repeat_reorder_and_reset():
    model, ids, dense = _llama()
    rows, mask = padded(ids, [150, 60])
    cache = DKVCache(model)
    feed(model, rows[:, :140], [140], cache, mask[:, :140])
    cache.batch_repeat_interleave(2)  # rows 0 0 1 1
    cache.reorder_cache(torch.tensor([2, 0, 1, 3]))  # rows 1 0 0 1
    cache.batch_select_indices(torch.tensor([0, 1]))  # rows 1 0
    order = torch.tensor([1, 0])
    positions = (mask.cumsum(1) - 1).clamp(min=0)[order, 140:]
    out = model(rows[order, 140:], attention_mask=mask[order], position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(out[0], dense[0, 50:60], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(out[1], dense[0, 140:], atol=TOLERANCE, rtol=0)
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    torch.testing.assert_close(feed(model, ids, [150], cache), dense, atol=TOLERANCE, rtol=0)


def test_causality_survives():
    model, ids, _ = _llama()
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 97
    first, second = feed(model, ids, [150], DKVCache(model)), feed(model, other, [150], DKVCache(model))
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_a_model_that_was_not_attached_is_refused_before_a_wrong_number():
    model, ids, _ = _llama()
    detach(model)
    cache = DKVCache(model, EXACT)
    with pytest.raises(RuntimeError, match="attach"):
        model(ids[:, :20], past_key_values=cache)
    attach(model, EXACT)
    model(ids[:, :20], past_key_values=cache)
    detach(model)
    for each in (cache, copy.deepcopy(cache)):
        with pytest.raises(RuntimeError, match="attach"):
            model(ids[:, 20:21], past_key_values=each)


def test_memory_shrinks_when_blocks_close():
    config = DKVConfig(window=64, sink_tokens=16)
    layer = LayerCache(config)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 2000, 64), torch.randn(1, 2, 2000, 64), torch.randn(1, 2, 2000, 64)
    layer.attend(q, k, v)
    assert layer.block_counts == [7]
    assert layer.k_rows.shape[2] == 256  # 208 rows are left, in whole blocks
    assert layer.nbytes == sum(tensor.nbytes for tensor in layer.tensors().values()) < layer.dense_nbytes / 2.5


def test_a_block_with_nan_is_refused_and_nothing_is_lost():
    layer = LayerCache(EXACT)
    torch.manual_seed(0)
    k, v = torch.randn(1, 2, 60, 8), torch.randn(1, 2, 60, 8)
    k[0, 1, 12, 3] = float("nan")
    with pytest.raises(ValueError, match="batch row 0, block 0"):
        layer.attend(torch.randn(1, 6, 60, 8), k, v)
    assert (layer.tokens, layer.rows, layer.block_counts) == ([60], [60], [0])


def _llama():
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 97, (1, TOKENS))
    dense = model(ids).logits
    return attach(model, EXACT), ids, dense
