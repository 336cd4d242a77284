"""The contract of mlx-lm's caches: state and files, trimming, bytes, and one clear error for each misuse."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import base, llama  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from synthetic import profile_of  # noqa: E402

from dkv import DKVConfig, HeadTier  # noqa: E402
from dkv.integrations import _mlx_hook  # noqa: E402
from dkv.integrations.mlx_lm import BatchDKVCache, DKVCache, attach, make_prompt_cache  # noqa: E402

CONFIG = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=4, num_residuals=5, top_k=2)
TIERS = (HeadTier(0.5), HeadTier(0.5, routed=False, rank=2, num_residuals=2, key_bits=(8, 6, 4, 4, 2, 2, 1, 1)))
RATIO = DKVConfig(block_size=16, window=24, sink_tokens=8, rank=0, router="keys", ratio=4.0)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def build(dtype="float32", heads=2):
    mx.random.seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    args = llama.ModelArgs("llama", rms_norm_eps=1e-5, vocab_size=97, head_dim=8, num_key_value_heads=heads, **shape)
    model = llama.Model(args)
    model.set_dtype(DTYPES[dtype])
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def model():
    return build()


IDS = np.random.default_rng(0).integers(0, 97, 400).tolist()


def feed(model, start, length, cache):
    return model(mx.array([IDS[start : start + length]]), cache=cache)


def filled(model, tokens=100, config=CONFIG):
    cache = make_prompt_cache(model, config)
    feed(model, 0, tokens, cache)
    return cache


def profiled():
    return profile_of(np.random.default_rng(1).random((2, 2)), seed=3)


# what every cache is asked


def test_c03_a_fresh_cache_answers_everything():
    """VeloxQuant-MLX#92: members that were missing crashed only for prompts over one prefill step."""
    for cache in (DKVCache(CONFIG), BatchDKVCache(CONFIG, batch_size=2)):
        assert cache.empty() and cache.size() == 0 and cache.nbytes == cache.dense_nbytes == 0
        assert cache.meta_state == "" and cache.is_trimmable() and cache.trim(3) == 0
        assert not hasattr(cache, "bits")
        mx.eval([cache.state])
        assert type(cache).from_state(cache.state).empty()
    assert DKVCache(CONFIG).offset == 0 and DKVCache(CONFIG).make_mask(1) is None
    assert DKVCache(CONFIG).make_mask(5) == "causal"
    np.testing.assert_array_equal(DKVCache(CONFIG).make_mask(3, return_array=True), np.tril(np.ones((3, 3))))
    assert BatchDKVCache(CONFIG, batch_size=2).offset.tolist() == [0, 0]


def test_a_prompt_longer_than_a_prefill_step(model):
    cache = make_prompt_cache(model, CONFIG)
    steps = generate_step(mx.array(IDS[:130]), model, max_tokens=2, prompt_cache=cache, prefill_step_size=50)
    assert len(list(steps)) == 2 and cache[0].offset == 132
    assert all(not hasattr(layer, "bits") for layer in cache)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_bytes_are_those_of_the_arrays(dtype):
    model, seen = build(dtype), []
    cache = make_prompt_cache(model, CONFIG)
    for start in range(0, 120, 10):
        feed(model, start, 10, cache)
        layer = cache[0].layer
        arrays = [layer.k_rows, layer.v_rows] + [part for blocks in layer.blocks for _, part in blocks.parts()]
        assert all(array.dtype == DTYPES[dtype] for array in arrays[:2])
        assert cache[0].nbytes == sum(array.nbytes for array in arrays)
        seen.append((layer.block_counts[0], cache[0].nbytes))
        if len(seen) > 1 and seen[-1][0] == seen[-2][0]:
            assert seen[-1][1] >= seen[-2][1]
    assert cache[0].compressed_nbytes < cache[0].compressed_dense_nbytes
    dense = mlx_cache.make_prompt_cache(model)
    feed(model, 0, 120, dense)
    assert cache[0].dense_nbytes == sum(part[:, :, :120].nbytes for part in (dense[0].keys, dense[0].values))


# state and files


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("kind", ["plain", "exact", "tiers", "ratio", "share"])
def test_c12_a_saved_cache_goes_on_bit_equal(tmp_path, dtype, kind):
    """vmlx#7, #18: bfloat16 went through NumPy and came back as float16."""
    model = build(dtype)
    exact = dataclasses.replace(CONFIG, residual_bits=16, router="minmax")
    share = {"prefill_share": 0.5, "prefill_dense_below": 20, "prefill_ratio": 0.5, "prefill_window": 8}
    share = dataclasses.replace(CONFIG, prefill_key_block=8, prefill_block=16, prefill_tail=4, **share)
    split = {"tiers": dataclasses.replace(CONFIG, tiers=TIERS), "ratio": RATIO, "share": share}
    config = split[kind].with_profile(profiled()) if kind in split else {"plain": CONFIG, "exact": exact}[kind]
    path = str(tmp_path / "cache.safetensors")
    cache = filled(model, 101, config)
    mlx_cache.save_prompt_cache(path, cache, {"model": "tiny"})
    loaded, metadata = mlx_cache.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "tiny"} and [layer.offset for layer in loaded] == [101, 101]
    for one, other in zip(cache, loaded):
        assert type(other) is DKVCache and other.layer.config == one.layer.config
        assert other.layer.selects == one.layer.selects and (one.layer.selects is not None) == (kind == "share")
        assert [group[:2] for group in other.layer.groups or ()] == [group[:2] for group in one.layer.groups or ()]
        for (name, a), (_, b) in zip(tree_flatten(one.state), tree_flatten(other.state), strict=True):
            assert a.dtype == b.dtype and mx.array_equal(a, b), name
    for start, length in ((101, 1), (102, 40), (142, 1)):
        assert mx.array_equal(feed(model, start, length, cache), feed(model, start, length, loaded))


def test_an_empty_cache_and_a_batch_are_saved_too(model, tmp_path):
    path = str(tmp_path / "cache.safetensors")
    mlx_cache.save_prompt_cache(path, make_prompt_cache(model, CONFIG))
    loaded = mlx_cache.load_prompt_cache(path)
    assert mx.array_equal(feed(model, 0, 50, loaded), feed(model, 0, 50, make_prompt_cache(model, CONFIG)))
    batch = [layers[0].merge(layers) for layers in zip(filled(model, 100), filled(model, 9))]
    mlx_cache.save_prompt_cache(path, batch)
    loaded = mlx_cache.load_prompt_cache(path)
    assert type(loaded[0]) is BatchDKVCache and loaded[0].offset.tolist() == [100, 9]
    step = mx.array([[1], [2]])
    assert mx.array_equal(model(step, cache=loaded), model(step, cache=batch))


def test_c10_a_file_holds_what_is_stored_and_no_spare_room(model, tmp_path):
    """mlx-examples#977: the whole pre-allocated buffer was saved, and its zeros came back as tokens."""
    path = tmp_path / "cache.safetensors"
    config = dataclasses.replace(CONFIG, block_size=256, window=256)
    cache = filled(model, 5, config)
    mlx_cache.save_prompt_cache(str(path), cache)
    payload = sum(part.nbytes for layer in cache for part in layer.state.values())
    assert path.stat().st_size < 2 * payload and cache[0].state["k_rows"].shape[2] == 5
    loaded = mlx_cache.load_prompt_cache(str(path))
    assert loaded[0].offset == 5
    assert mx.array_equal(feed(model, 5, 1, loaded), feed(model, 5, 1, cache))


def test_the_state_that_was_handed_out_stays_as_it_was(model):
    cache = filled(model, 100)
    state = cache[0].state
    before = {name: np.array(part) for name, part in state.items()}
    twin = [DKVCache.from_state(layer.state) for layer in cache]
    for each in (cache, twin):
        each[0].trim(3)
        feed(model, 100, 1, [each[0], each[1]])
    for name, part in state.items():
        np.testing.assert_array_equal(part, before[name])


def test_c11_loading_needs_the_import(model, tmp_path):
    """mlx-lm#80: the loader finds classes in its own module alone."""
    path = str(tmp_path / "cache.safetensors")
    mlx_cache.save_prompt_cache(path, filled(model, 60))
    load = "import sys; from mlx_lm.models.cache import load_prompt_cache\n"
    load += f"print(load_prompt_cache({path!r})[0].offset)"
    code = [sys.executable, "-P", "-c"]
    done = subprocess.run([*code, "import dkv.integrations.mlx_lm\n" + load], capture_output=True, text=True)
    assert done.stdout == "60\n", done.stderr
    done = subprocess.run([*code, load], capture_output=True, text=True)
    assert done.returncode and done.stderr.splitlines()[-1] == "KeyError: 'DKVCache'"


def changed_header(state, **fields):
    header = json.loads(bytes(np.array(state["header"])))
    header.update(fields)
    return {**state, "header": mx.array(np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))}


def test_c13_a_state_that_does_not_fit_is_refused_whole(model):
    """Rapid-MLX#198, #200: a cache written under other settings was loaded and then broke."""
    cache = filled(model, 100)[0]
    state, untouched = cache.state, cache.layer
    config = CONFIG.to_dict()
    without = {name: part for name, part in state.items() if name != "blocks0_u"}
    wrong = [
        ((state["k_rows"], state["v_rows"]), "must be a mapping of arrays, got tuple"),
        ({"k_rows": state["k_rows"]}, "must have a header of bytes"),
        ({**state, "header": mx.array([1, 2], dtype=mx.uint8)}, "a header that is not JSON"),
        (changed_header(state, dkv=999), "version of the state of a DKV cache is 999, this dkv reads 2"),
        (changed_header(state, config={**config, "rank": 200}), "rank must be 0..128, got 200"),
        (changed_header(state, config={**config, "rank": 3}), "blocks do not fit|must have shape|format"),
        (changed_header(state, config={**config, "block_size": 32}), "lengths that do not fit: 100 tokens"),
        (changed_header(state, config={**config, "new": 1}), "unknown config fields"),
        (changed_header(state, tokens=[99]), "lengths that do not fit: 99 tokens"),
        (changed_header(state, tokens=[True]), "lengths that do not fit"),
        (changed_header(state, tokens=None), "has no lengths"),
        (changed_header(state, groups=7), "not this version's"),
        (changed_header(state, selects=7), "must be a list of bools, got 7"),
        (changed_header(state, selects=[True] * 3), "says of 3 heads whether they select, its rows have 2"),
        (changed_header(state, groups=[[[0, 1, 2], config]]), "groups 3 heads, its rows have 2"),
        (without, "parts of the file must be among"),
        ({**state, "more": mx.zeros(3)}, r"holds \['more'\]"),
        ({**state, "k_rows": state["k_rows"][:, :, :5]}, r"k_rows must be \[1, Hkv, "),
        ({**state, "k_rows": state["k_rows"].astype(mx.float16)}, "one float dtype"),
        ({**state, "blocks0_u": state["blocks0_u"].astype(mx.float32)}, "u of the file must be int8, got float32"),
    ]
    for each, message in wrong:
        with pytest.raises(ValueError, match=message):
            cache.state = each
        assert cache.layer is untouched
    with pytest.raises(ValueError, match="meta_state"):
        cache.meta_state = ("1", "2")


def test_c13_a_cache_of_another_model_is_refused(model):
    """Rapid-MLX#198, #200: as above, where the file alone cannot tell."""
    other = build(heads=3)
    with pytest.raises(ValueError, match="keys must be as the cache's: 2 heads of 8 channels"):
        feed(other, 100, 1, [DKVCache.from_state(layer.state) for layer in filled(model, 100)])


# trimming


def test_c07_trim_while_nothing_is_closed(model):
    """mlx-lm#1494, #1776: fewer tokens were trimmed than asked, and nobody noticed."""
    cache = filled(model, 10)
    assert mlx_cache.can_trim_prompt_cache(cache)
    assert mlx_cache.trim_prompt_cache(cache, 4) == 4 and [layer.offset for layer in cache] == [6, 6]
    again = filled(model, 6)
    assert mx.array_equal(feed(model, 6, 30, cache), feed(model, 6, 30, again))
    assert mlx_cache.trim_prompt_cache(cache, 100) == 36
    assert cache[0].offset == 0 and cache[0].empty()
    assert mx.array_equal(feed(model, 0, 50, cache), feed(model, 0, 50, make_prompt_cache(model, CONFIG)))


def test_c07_trim_into_a_closed_block_is_refused_before_anything_changes(model):
    """mlx-lm#1494, #1776: it was trimmed although that was not allowed, and nobody noticed."""
    cache = filled(model, 100)
    assert (cache[0].layer.rows, cache[0].layer.block_counts) == ([36], [4])  # 8 sink rows, a window of 28
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="trim of 29 tokens reaches into a closed block"):
        cache[0].trim(29)
    assert not mlx_cache.can_trim_prompt_cache(cache) and mlx_cache.trim_prompt_cache(cache, 29) == 0
    assert mx.array_equal(feed(model, 100, 1, cache), feed(model, 100, 1, twin))
    for layer in twin:  # inside the window it is exact
        assert layer.trim(21) == 21 and layer.offset == 80
    fresh = [DKVCache.from_state(layer.state) for layer in filled(model, 100)]
    for layer in fresh:
        layer.trim(20)
    assert mx.array_equal(feed(model, 80, 20, twin), feed(model, 80, 20, fresh))


@pytest.mark.parametrize("bad", [-5, True, 2.5, None])
def test_c06_trim_checks_its_argument(model, bad):
    """mlx-lm#1868: trim(-5) lengthened the cache."""
    cache = filled(model, 10)
    with pytest.raises((TypeError, ValueError), match="n must be"):
        cache[0].trim(bad)
    assert cache[0].trim(0) == 0 and cache[0].offset == 10


# misuse


def test_quantising_it_again_is_refused(model):
    """Rapid-MLX#1197: the flag was accepted and the cache stayed as it was."""
    cache = make_prompt_cache(model, CONFIG)
    steps = generate_step(mx.array(IDS[:20]), model, prompt_cache=cache, kv_bits=4, quantized_kv_start=0)
    with pytest.raises(NotImplementedError, match="leave kv_bits unset"):
        next(steps)


def test_masks_of_other_patterns_are_refused(model):
    queries, rows = mx.zeros((1, 6, 4, 8)), mx.zeros((1, 2, 4, 8))
    attach(model)
    causal = base.create_causal_mask(4)
    for mask in (causal & base.create_causal_mask(4, window_size=2), mx.zeros((4, 4)), None, causal[:, :3]):
        cache = DKVCache(CONFIG)
        keys, values = cache.update_and_fetch(rows, rows)
        with pytest.raises(NotImplementedError, match="attends causally"):
            _mlx_hook.attention(queries, keys, values, cache, 1.0, mask)
    cache = DKVCache(CONFIG)
    keys, values = cache.update_and_fetch(rows, rows)
    assert (keys.shape, keys.dtype) == ((1, 2, 4, 8), mx.float32)
    assert _mlx_hook.attention(queries, keys, values, cache, 1.0, causal).shape == (1, 6, 4, 8)
    with pytest.raises(NotImplementedError, match="sliding window of 4 tokens"):
        cache.make_mask(3, window_size=4)
    with pytest.raises(NotImplementedError, match="sliding window of 4 tokens"):
        BatchDKVCache(CONFIG).make_mask(3, window_size=4)


def test_keys_are_attended_once(model):
    attach(model)
    queries, rows = mx.zeros((1, 6, 4, 8)), mx.zeros((1, 2, 4, 8))
    cache = DKVCache(CONFIG)
    keys, values = cache.update_and_fetch(rows, rows)
    with pytest.raises(RuntimeError, match="never attended, as after an interrupted step"):
        cache.update_and_fetch(rows, rows)
    with pytest.raises(RuntimeError, match="once, with as many queries"):
        _mlx_hook.attention(queries[:, :, :1], keys, values, cache, 1.0, None)
    _mlx_hook.attention(queries, keys, values, cache, 1.0, "causal")
    with pytest.raises(RuntimeError, match="once, with as many queries"):
        _mlx_hook.attention(queries, keys, values, cache, 1.0, "causal")
    with pytest.raises(TypeError, match="DKVRows"):  # a model that was not attached
        base.scaled_dot_product_attention(queries, keys, values, cache=cache, scale=1.0, mask=None)


def test_a_process_without_an_attached_model_says_so():
    code = "import mlx.core as mx, dkv; from dkv.integrations.mlx_lm import DKVCache\n"
    code += "DKVCache(dkv.DKVConfig()).update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "RuntimeError: no model attends through dkv: call dkv.integrations.mlx_lm.attach(model)" in done.stderr


def test_batches_check_their_arguments(model):
    one, other = filled(model, 30)[0], DKVCache(dataclasses.replace(CONFIG, rank=3))
    with pytest.raises(ValueError, match="same config and head groups"):
        one.merge([one, filled(model, 20, dataclasses.replace(CONFIG, rank=3))[0]])
    with pytest.raises(ValueError, match="must be DKV caches of one sequence"):
        other.merge([other, mlx_cache.KVCache()])
    batch = one.merge([one, one])
    for arguments, message in (
        ({"left_padding": [1, 0]}, "left_padding can only come before the first token"),
        ({"lengths": [1], "right_padding": [0, 1]}, "lengths must be 2 numbers of 0 or more"),
        ({"right_padding": [0, 1]}, "right_padding needs lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.prepare(**arguments)
    with pytest.raises(TypeError, match="other must be a BatchDKVCache, got DKVCache"):
        batch.extend(one)
    with pytest.raises(IndexError, match=r"0\.\.1"):
        batch.filter([2])
    with pytest.raises(ValueError, match="batch_size must be 1 or more"):
        BatchDKVCache(CONFIG, batch_size=0)
    batch.prepare(lengths=[1, 2], right_padding=[1, 0])
    with pytest.raises(RuntimeError, match="finalize"):
        batch.extend(one.merge([one]))


def test_an_interrupted_step_is_not_saved_merged_or_extracted(tmp_path):
    cache = BatchDKVCache(CONFIG, batch_size=2)
    attach(build())
    cache.update_and_fetch(mx.zeros((2, 2, 3, 8)), mx.zeros((2, 2, 3, 8)))
    for step in (lambda: cache.state, lambda: cache.extract(0)):
        with pytest.raises(RuntimeError, match="never attended"):
            step()
    single = DKVCache(CONFIG)
    single.update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))
    with pytest.raises(RuntimeError, match="never attended"):
        DKVCache.merge([single])


def test_what_a_cache_refuses():
    attach(build())
    k = mx.zeros((1, 2, 3, 8))
    for values in (mx.zeros((1, 1, 3, 8)), mx.zeros((1, 2, 4, 8)), k.astype(mx.float16)):
        with pytest.raises(ValueError, match="values must be as the keys"):
            DKVCache(CONFIG).update_and_fetch(k, values)
    with pytest.raises(ValueError, match="route_every must be 1 in mlx"):
        DKVCache(dataclasses.replace(CONFIG, route_every=4))
