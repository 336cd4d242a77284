"""DKV in mlx-lm's own models and its own generation: at exact formats it is the dense model."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from mlx_lm.models import gemma2, gpt_oss, llama, qwen2  # noqa: E402
from synthetic import profile_of  # noqa: E402

from dkv import DKVConfig, HeadTier  # noqa: E402
from dkv.integrations.mlx_lm import BatchDKVCache, DKVCache, attach, make_prompt_cache  # noqa: E402

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
}
MODELS = {
    "llama": (llama, {}),
    "qwen2": (qwen2, {}),
    "gpt_oss": (  # a sink logit per head, and a layer with a sliding window
        gpt_oss,
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
EXACT = DKVConfig(block_size=16, window=24, sink_tokens=8, format="fp32", rank=4, num_residuals=15, top_k=1000)
LOSSY = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=4, num_residuals=5, top_k=2)
TOLERANCE = 5e-6  # float32 sums in another order; the largest difference seen is 2.2e-6
TOKENS = 150


def build(module, **fields):
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": "tiny", **SHAPE, **fields}))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    module, fields = MODELS[request.param]
    return build(module, **fields)


@pytest.fixture(scope="module")
def tiny_llama():
    return build(llama)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 256, 400).tolist()


def feed(model, ids, chunks, cache):
    outs, start = [], 0
    for length in chunks:
        outs.append(model(mx.array([ids[start : start + length]]), cache=cache))
        start += length
    return mx.concatenate(outs, axis=1)


def greedy(model, prompt, count, cache, step=37):
    """Tokens of mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_step_size=step)
    return [token for token, _ in steps]


def own(cache):
    return [layer for layer in cache if isinstance(layer, DKVCache)]


@pytest.mark.parametrize("chunks", [[150], [100, 1, 1, 48], [30] * 5], ids=["one", "mixed", "even"])
def test_logits_equal_the_dense_models(model, ids, chunks):
    dense = model(mx.array([ids[:TOKENS]]))
    cache = make_prompt_cache(model, EXACT)
    np.testing.assert_allclose(feed(model, ids, chunks, cache), dense, atol=TOLERANCE, rtol=0)
    for layer in own(cache):  # 150 - 8 sink - 24 window holds 7 blocks
        assert (layer.offset, layer.size(), layer.layer.block_counts, layer.layer.rows) == (150, 150, [7], [38])
    assert len(own(cache)) == len(cache) - sum(type(c) is mlx_cache.RotatingKVCache for c in cache) >= 2


def test_greedy_tokens_and_turns_equal_dense(model, ids):
    ours, dense = make_prompt_cache(model, EXACT), mlx_cache.make_prompt_cache(model)
    for start, stop in ((0, 90), (90, 92), (92, 140)):  # multi-turn: every turn goes on from the last one's cache
        turn = ids[start:stop]
        assert greedy(model, turn, 12, ours) == greedy(model, turn, 12, dense)
    assert all(layer.offset == 140 + 3 * 12 and layer.layer.block_counts[0] > 4 for layer in own(ours))


def test_prompts_that_select_every_key_block_are_dense_and_fewer_are_not(model, ids):
    dense = np.array(model(mx.array([ids[:TOKENS]])))
    for limits, same in (({"prefill_ratio": 1.0}, True), ({"prefill_top_k": 1, "prefill_window": 0}, False)):
        limits |= {"prefill_dense_below": 60, "prefill_key_block": 8, "prefill_block": 32, "prefill_tail": 5}
        config = dataclasses.replace(EXACT, **limits)
        got = np.array(feed(model, ids, [100, 1, 49], make_prompt_cache(model, config)))
        np.testing.assert_allclose(got[:, :60], dense[:, :60], atol=TOLERANCE, rtol=0)
        assert (np.abs(got - dense).max() < TOLERANCE) == same


def test_other_caches_are_mlx_lms_own(model, ids):
    """A hooked model with mlx-lm's cache, or none, computes what it did."""
    dense = feed(model, ids, [60, 1], mlx_cache.make_prompt_cache(model))
    attach(model)
    assert mx.array_equal(feed(model, ids, [60, 1], mlx_cache.make_prompt_cache(model)), dense)


def test_text_is_that_of_transformers(tiny):
    """The same weights, by mlx-lm's loader and generate and by transformers'."""
    torch = pytest.importorskip("torch")
    from dkv import models
    from dkv.integrations import transformers as other

    model, tokenizer = mlx_lm.load(tiny)
    prompt = "A lighthouse keeper on a small northern island kept a notebook for thirty years. " * 2
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=make_prompt_cache(model, EXACT))
    theirs, their_tokenizer = models.load(tiny)
    other.attach(theirs, EXACT)
    rows = their_tokenizer(prompt, return_tensors="pt").input_ids
    cache = other.DKVCache(theirs)
    made = theirs.generate(rows, past_key_values=cache, max_new_tokens=16, do_sample=False)[0, rows.shape[1] :]
    assert text == their_tokenizer.decode(made) and cache.compressed_nbytes > 0
    assert isinstance(made, torch.Tensor)


# batches


def run_batch(model, prompts, caches=None, step=40, count=12):
    generator = BatchGenerator(model, max_tokens=count, prefill_step_size=step)
    uids = generator.insert(prompts, caches=caches)
    made: dict[int, list[int]] = {uid: [] for uid in uids}
    left: dict[int, list] = {}
    while responses := generator.next_generated():
        for response in responses:
            made[response.uid].append(response.token)
            if response.finish_reason:
                left[response.uid] = response.prompt_cache
    return [made[uid] for uid in uids], [left[uid] for uid in uids]


@pytest.mark.parametrize("config", [EXACT, LOSSY], ids=["exact", "lossy"])
def test_a_batch_generates_what_each_prompt_does_alone(model, ids, config):
    prompts = [ids[:5], ids[:150], ids[7:70]]
    together, left = run_batch(model, prompts, [make_prompt_cache(model, config) for _ in prompts])
    alone = [greedy(model, prompt, 12, make_prompt_cache(model, config), step=40) for prompt in prompts]
    assert together == alone
    if config is EXACT:
        assert together == run_batch(model, prompts)[0]
    for prompt, caches in zip(prompts, left):
        for layer in own(caches):
            assert type(layer) is DKVCache and layer.offset == len(prompt) + 12
    # what comes out of a batch goes into the next one
    again, _ = run_batch(model, [ids[:3]] * 3, left, count=4)
    assert len(again) == 3 and all(len(tokens) == 4 for tokens in again)


def test_batch_generate_takes_our_caches(tiny, ids):
    model, tokenizer = mlx_lm.load(tiny)
    prompts = [ids[:40], ids[:9]]
    caches = [make_prompt_cache(model, EXACT) for _ in prompts]
    options = {"max_tokens": 6, "return_prompt_caches": True}
    ours = mlx_lm.batch_generate(model, tokenizer, prompts, prompt_caches=caches, **options)
    assert ours.texts == mlx_lm.batch_generate(model, tokenizer, prompts, **options).texts
    assert [layer.offset for layer in ours.caches[0]] == [46] * len(caches[0])
    assert caches[0][0].offset == 0  # as mlx-lm has it, the caches given stay as they were


@pytest.mark.parametrize("step", [400, 64])
def test_logits_of_a_padded_batch_are_those_of_its_rows(model, ids, step):
    """mlx-lm#1906: a shorter row attended its padding."""
    lengths = [12, 150, 1]
    rows = np.zeros((3, 150), int)
    for row, length in enumerate(lengths):
        rows[row, :length] = ids[:length]
    singles = [make_prompt_cache(model, EXACT) for _ in lengths]
    caches = [layers[0].merge(layers) for layers in zip(*singles)]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=[150 - length for length in lengths])
    outs = [model(mx.array(rows[:, low : low + step]), cache=caches) for low in range(0, 150, step)]
    out = np.array(mx.concatenate(outs, axis=1))
    for cache in caches:
        cache.finalize()
    dense = np.array(model(mx.array([ids[:150]])))[0]
    assert np.isfinite(out).all()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], dense[:length], atol=TOLERANCE)
    assert own(caches)[0].offset.tolist() == lengths


def test_left_padding(tiny_llama, ids):
    model = tiny_llama
    lengths = [12, 90]
    rows = np.zeros((2, 90), int)
    for row, length in enumerate(lengths):
        rows[row, 90 - length :] = ids[:length]
    caches = [BatchDKVCache(EXACT, batch_size=2) for _ in model.layers]
    attach(model)
    for cache in caches:
        cache.prepare(left_padding=[78, 0])
        assert cache.offset.tolist() == [-78, 0]
    out = np.array(mx.concatenate([model(mx.array(part), cache=caches) for part in np.split(rows, [50, 89], 1)], 1))
    dense = np.array(model(mx.array([ids[:90]])))[0]
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, 90 - length :], dense[:length], atol=TOLERANCE)
    assert caches[0].offset.tolist() == lengths and np.isfinite(out).all()


def test_rows_are_merged_filtered_extended_and_extracted(tiny_llama, ids):
    """mlx-vlm#1248, mlx-lm#1736: caches of other lengths, and empty ones."""
    model, lengths = tiny_llama, [5, 130, 200]
    singles = []
    for length in lengths:
        singles.append(make_prompt_cache(model, LOSSY))
        feed(model, ids, [length], singles[-1])
    batch = [layers[0].merge(layers) for layers in zip(*singles)]
    assert all(type(cache) is BatchDKVCache and cache.offset.tolist() == lengths for cache in batch)
    before = batch[0].offset
    empty = [BatchDKVCache(LOSSY) for _ in model.layers]
    for cache, other in zip(batch, empty):
        other.filter([0])
        assert other.empty() and other.offset.tolist() == [0]
        cache.filter(mx.array([2, 0]))
        cache.extend(other)
        assert cache.offset.tolist() == [200, 5, 0] and cache.size() == 200
    assert before.tolist() == lengths  # what was handed out stays as it was
    out = np.array(model(mx.array([[ids[300]], [ids[300]], [ids[300]]]), cache=batch))
    for place, single in enumerate((singles[2], singles[0], make_prompt_cache(model, LOSSY))):
        expected = np.array(model(mx.array([[ids[300]]]), cache=single))
        np.testing.assert_allclose(out[place], expected[0], atol=TOLERANCE)
    row = [cache.extract(0) for cache in batch]
    tail = feed(model, ids[301:], [1, 20], row)
    np.testing.assert_allclose(tail, feed(model, ids[301:], [1, 20], singles[2]), atol=TOLERANCE)
    assert batch[0].offset.tolist() == [201, 6, 1]


# what a cache is made with


def tiered():
    profile = profile_of(np.random.default_rng(1).random((3, 2)))
    tiers = (HeadTier(0.5), HeadTier(0.5, routed=False, rank=2, num_residuals=2, residual_bits=8))
    return profile, dataclasses.replace(LOSSY, tiers=tiers)


@pytest.mark.parametrize("kind", ["tiers", "ratio"])
def test_head_groups_are_the_profiles(tiny_llama, ids, kind):
    profile, config = tiered()
    if kind == "ratio":
        config = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=0, router="keys", ratio=4.0)
    with pytest.raises(ValueError, match="the profile of a model"):
        make_prompt_cache(tiny_llama, config)
    config = config.with_profile(profile)
    cache = make_prompt_cache(tiny_llama, config)
    for index, layer in enumerate(cache):
        for ours, group in zip(layer.layer.groups, config.head_groups(index, 2), strict=True):
            assert ours[:2] == group[:2]
            np.testing.assert_allclose(ours.channel_weight or 0, group.channel_weight or 0, rtol=1e-7)
    feed(tiny_llama, ids, [150, 1], cache)
    assert sum(layer.compressed_nbytes for layer in cache) < sum(layer.compressed_dense_nbytes for layer in cache)
    with pytest.raises(ValueError, match="profile is of a model with 4 layers"):
        make_prompt_cache(tiny_llama, config.with_profile(profile_of(np.ones((4, 2)))))


def test_a_model_that_cannot_be_hooked_is_refused():
    """gemma2 computes its attention itself, with a soft-cap."""
    with pytest.raises(NotImplementedError, match="models.gemma2 cannot be hooked: no layer calls mlx-lm's"):
        make_prompt_cache(build(gemma2))
    from mlx_lm.models import deepseek_v3, mamba2, phi3small

    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    deepseek = build(deepseek_v3, **latent, n_routed_experts=None, moe_intermediate_size=16, num_key_value_heads=6)
    with pytest.raises(NotImplementedError, match=r"deepseek_v3 cannot be hooked: .*DKVRows"):
        make_prompt_cache(deepseek)
    blocks = {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 64, "gegelu_limit": 20.0}
    with pytest.raises(NotImplementedError, match="phi3small cannot be hooked"):
        make_prompt_cache(build(phi3small, **blocks, layer_norm_epsilon=1e-5))
    ssm = {"num_heads": 4, "state_size": 8, "conv_kernel": 4, "n_groups": 1, "time_step_limit": [0.0, 1.0]}
    rest = {"layer_norm_epsilon": 1e-5, "use_bias": True, "use_conv_bias": True, "time_step_rank": "auto"}
    with pytest.raises(ValueError, match=r"no full-attention layer to compress; its caches are \['ArraysCache'\]"):
        make_prompt_cache(build(mamba2, **ssm, **rest, tie_word_embeddings=True))


def test_arguments(tiny_llama):
    with pytest.raises(TypeError, match="model must be a model of mlx-lm, got str"):
        make_prompt_cache("llama")
    with pytest.raises(TypeError, match="config must be a DKVConfig, got dict"):
        make_prompt_cache(tiny_llama, {})
    with pytest.raises(ValueError, match="format 'bf16' cannot store factors of a float32 cache"):
        make_prompt_cache(tiny_llama, DKVConfig(format="bf16"))


def test_importing_hooks_nothing_and_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import dkv.integrations.mlx_lm\n"
    code += "from mlx_lm.models import base, llama\n"
    code += "assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_deepcopies_go_on_alike(model, ids):
    cache = make_prompt_cache(model, LOSSY)
    feed(model, ids, [100], cache)
    twin = copy.deepcopy(cache)
    first = feed(model, ids[100:], [30, 1, 1], cache)
    assert mx.array_equal(feed(model, ids[100:], [30, 1, 1], twin), first)


def test_the_blocks_of_the_documentation_run(tiny, tmp_path, monkeypatch):
    text = (Path(__file__).resolve().parent.parent / "docs" / "mlx-lm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    loaded = mlx_lm.load(tiny)
    monkeypatch.setattr(mlx_lm, "load", lambda name: loaded)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, "docs/mlx-lm.md", "exec"), namespace)
    assert [type(layer) for layer in namespace["cache"]] == [DKVCache, DKVCache]
    assert namespace["text"] and namespace["more"] and len(namespace["done"].caches) == 2
