"""Faults that users of other caches met, in mlx-lm. Each names its source."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from mlx.utils import tree_map  # noqa: E402
from mlx_lm.generate import _extend_cache, _merge_caches, generate_step, speculative_generate_step  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from mlx_lm.models import llama  # noqa: E402

from dkv import DKVConfig  # noqa: E402
from dkv.integrations import _mlx_hook  # noqa: E402
from dkv.integrations.mlx_lm import BatchDKVCache, DKVCache, attach, make_prompt_cache  # noqa: E402

BIG = DKVConfig(window=64, sink_tokens=16, format="fp32", rank=8, top_k=1000)  # blocks of 256, every row exact
SMALL = dataclasses.replace(BIG, block_size=16, window=24, sink_tokens=8, rank=4)
TINY = dataclasses.replace(BIG, block_size=4, window=5, sink_tokens=3, rank=2)
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = np.random.default_rng(0).integers(0, 64, (3, 1100))
TOLERANCE = 1e-5


def build(noise: float = 0.0, heads: int = 2) -> Any:
    mx.random.seed(0)
    args = llama.ModelArgs("llama", rms_norm_eps=1e-5, vocab_size=64, head_dim=8, num_key_value_heads=heads, **SHAPE)
    model = llama.Model(args)
    model.update(
        tree_map(lambda p: (1.5 if p.ndim == 2 else 1) * p + noise * mx.random.normal(p.shape), model.parameters())
    )
    mx.eval(model.parameters())
    return model


@functools.cache
def shared() -> Any:
    return attach(build())


@pytest.fixture
def model() -> Any:
    return shared()


@functools.cache
def logits(row: int, length: int) -> np.ndarray:
    """Of the dense model, ``[length, V]``."""
    return np.array(shared()(mx.array(IDS[row : row + 1, :length])))[0]


def feed(model: Any, ids: Any, chunks: Any, cache: Any) -> np.ndarray:
    outs, start = [], 0
    for length in chunks:
        outs.append(model(mx.array(ids[:, start : start + length]), cache=cache))
        start += length
    return np.array(mx.concatenate(outs, axis=1))


def filled(model: Any, tokens: int, config: DKVConfig = SMALL, row: int = 0) -> Any:
    cache = make_prompt_cache(model, config)
    feed(model, IDS[row : row + 1], [tokens], cache)
    return cache


def greedy(model: Any, prompt: Any, count: int, cache: Any, **options: Any) -> list[int]:
    return [
        token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache, **options)
    ]


def merged(caches: Any) -> Any:
    return [layers[0].merge(layers) for layers in zip(*caches, strict=True)]


def same(a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.array(a), np.array(b), atol=tolerance, rtol=0)


def test_c01_the_offset_is_that_of_the_tokens_not_of_the_rows_kept(model):
    """VeloxQuant-MLX#389, #171, #196, hipfire#391: the offset counted kept rows and turned later tokens wrongly."""
    cache = filled(model, 600, BIG)
    assert [layer.layer.block_counts for layer in cache] == [[2], [2]] and cache[0].layer.rows == [88]
    assert [layer.offset for layer in cache] == [600, 600]  # the rotary position of the next token
    out = feed(model, IDS[:1, 600:], [1], cache)
    assert [layer.offset for layer in cache] == [601, 601]
    same(out[0, 0], logits(0, 601)[600])


def test_c02_a_mask_made_before_the_layer_runs_fits_what_is_attended(model):
    """VeloxQuant-MLX#370, #390, mlxcel#422: the mask and the keys had other lengths."""
    cache = make_prompt_cache(model, BIG)
    same(feed(model, IDS[:1], [512, 100], cache)[0], logits(0, 612))
    assert cache[0].layer.block_counts == [2]


@pytest.mark.parametrize("lengths", [[1, 2, 3], [4, 8, 12], [30, 29, 7], [31, 1, 13]], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_c02_at_every_length_and_chunking(model, lengths, side):
    """The same kind: chunks that end in every residue of the block size, ragged and padded on either side."""
    size, rows = max(lengths), np.zeros((3, max(lengths)), int)
    for row, length in enumerate(lengths):
        rows[row, size - length : size] = IDS[row, :length]
        if side == "right":
            rows[row] = np.roll(rows[row], length - size)
    for step in (size, 7, 3):
        caches = [BatchDKVCache(TINY, batch_size=3) for _ in model.layers]
        for cache in caches:
            pads = [size - length for length in lengths]
            cache.prepare(**({"left_padding": pads} if side == "left" else {"lengths": lengths, "right_padding": pads}))
        outs = feed(model, rows, [min(step, size - start) for start in range(0, size, step)], caches)
        for cache in caches:
            cache.finalize()
        after = feed(
            model, np.stack([IDS[row, length : length + 5] for row, length in enumerate(lengths)]), [1, 4], caches
        )
        for row, length in enumerate(lengths):
            first = size - length if side == "left" else 0
            same(np.concatenate([outs[row, first : first + length], after[row]]), logits(row, length + 5))
        assert caches[0].offset.tolist() == [length + 5 for length in lengths] and caches[0].size() == len(caches[0])


def test_c03_a_prompt_longer_than_a_prefill_step(model):
    """VeloxQuant-MLX#92, #27: members that hosts read on every cache were missing, which long prompts alone showed."""
    cache = make_prompt_cache(model, BIG)
    mx.eval([layer.state for layer in cache])
    for layer in cache:
        assert layer.empty() and layer.nbytes == 0 and layer.is_trimmable() and layer.size() == len(layer) == 0
        assert layer and layer.meta_state == "" and layer.offset == 0 and layer.make_mask(1) is None
    tokens = greedy(model, IDS[0, :513], 3, cache, prefill_step_size=512)
    assert tokens == greedy(model, IDS[0, :513], 3, mlx_cache.make_prompt_cache(model))
    assert [layer.offset for layer in cache] == [516, 516] and not any(layer.empty() for layer in cache)


def test_c06_c07_trim_takes_what_is_asked_or_says_so(model):
    """mlx-lm#1868, #1494, #1776: a negative trim lengthened the cache, a large one was cut short unnoticed."""
    cache = filled(model, 10)
    for bad in (-5, True, False, 2.5, None, "1", mx.array(True), mx.array(2.0)):
        with pytest.raises((TypeError, ValueError), match="n must be"):
            cache[0].trim(bad)
    assert [layer.trim(0) for layer in cache] == [0, 0] and [layer.offset for layer in cache] == [10, 10]
    assert [layer.trim(amount) for layer, amount in zip(cache, (4, np.int64(4)), strict=True)] == [4, 4]
    assert [layer.offset for layer in cache] == [6, 6]
    assert [layer.trim(100) for layer in cache] == [6, 6] and [layer.offset for layer in cache] == [0, 0]
    same(feed(model, IDS[:1], [60, 1], cache)[0], logits(0, 61))
    with pytest.raises(ValueError, match="trim of 50 tokens reaches into a closed block"):
        cache[0].trim(50)
    assert not mlx_cache.can_trim_prompt_cache(copy.deepcopy(cache)) and cache[0].offset == 61


def test_c15_an_offset_that_was_handed_out_stays_as_it_was(model):
    """mlx-lm#1100: it was changed in place, and a model that held it turned keys at the new value."""
    single, batch = filled(model, 7), merged([filled(model, 7), filled(model, 20)])
    before = [single[0].offset, batch[0].offset]
    ids = np.repeat(IDS[:1, :3], 2, axis=0)
    feed(model, ids[:1], [3], single), feed(model, ids, [3], batch)
    assert before[0] == 7 and before[1].tolist() == [7, 20]
    assert single[0].offset == 10 and batch[0].offset.tolist() == [10, 23]
    for cache in (single, batch):
        held = cache[0].offset
        cache[0].trim(2)
        assert np.array(held).tolist() in (10, [10, 23])


@pytest.mark.parametrize("step", [300, 128])
def test_c16_a_short_row_of_a_padded_batch_is_what_it_is_alone(model, step):
    """mlx-lm#1906, mlx-vlm#1946, #1542: it attended its padding, or a neighbour changed it."""
    rows = np.zeros((2, 300), int)
    rows[0, 288:], rows[1] = IDS[0, :12], IDS[1, :300]
    caches = [BatchDKVCache(SMALL, batch_size=2) for _ in model.layers]
    for cache in caches:
        cache.prepare(left_padding=[288, 0])
    out = feed(model, rows, [min(step, 300 - start) for start in range(0, 300, step)], caches)
    same(out[0, 288:], logits(0, 12))
    same(out[1], logits(1, 300))


def test_c17_rows_of_other_lengths_are_merged_filtered_extended_and_extracted(model):
    """mlx-vlm#1248, #1109, mlx-lm#1736, #748: caches of other lengths failed, and an empty one had a negative index."""
    lengths = [5, 256, 700]
    batch = merged([filled(model, length, BIG, row) for row, length in enumerate(lengths)])
    assert batch[0].offset.tolist() == lengths and batch[0].layer.block_counts == [0, 0, 2]
    for index in ([True, False, True], mx.array([True, False, True]), [0.0], [-1], [3]):
        with pytest.raises((TypeError, IndexError), match="ind"):
            batch[0].filter(index)
    with pytest.raises(ValueError, match="one or more"):
        DKVCache.merge([])
    row = [cache.extract(1) for cache in batch]
    for cache in batch:
        empty = BatchDKVCache(BIG)
        empty.filter([0])
        cache.filter(np.array([2, 0]))
        cache.extend(empty)
    assert batch[0].offset.tolist() == [700, 5, 0]
    out = feed(model, np.array([[IDS[2, 700]], [IDS[0, 5]], [IDS[1, 0]]]), [1], batch)
    same(out[:, 0], np.stack([logits(2, 701)[700], logits(0, 6)[5], logits(1, 1)[0]]))
    same(feed(model, IDS[1:2, 256:], [1, 3], row)[0], logits(1, 260)[256:])
    nothing = BatchDKVCache(BIG)
    nothing.filter([])
    assert nothing.empty() and nothing.layer.batch_size == 0 and nothing.size() == 0
    nothing.extend(batch[0])
    assert nothing.offset.tolist() == [701, 6, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_c17_a_batch_is_saved_in_the_midst_of_its_padding(model, side):
    """The same kind: padding that is still to come is part of the state, and a chunk of padding alone holds no rows."""
    length, pads = 30, [25, 0]
    ids = np.stack([np.roll(IDS[0, :length], 25), IDS[1, :length]])
    caches = [BatchDKVCache(TINY, batch_size=2) for _ in model.layers]
    for cache in caches:
        cache.prepare(**({"left_padding": pads} if side == "left" else {"lengths": [5, 30], "right_padding": pads}))
    outs, start = [], 0
    for size in (10, 10, 10):
        part = ids if side == "left" else IDS[:2]
        outs.append(feed(model, part[:, start : start + size], [size], caches))
        caches, start = [BatchDKVCache.from_state(cache.state) for cache in caches], start + size
    out, first = np.concatenate(outs, 1), 25 if side == "left" else 0
    same(out[0, first : first + 5], logits(0, 5))
    same(out[1], logits(1, 30))
    assert caches[0].offset.tolist() == [5, 30]
    empty = BatchDKVCache(TINY, batch_size=2)
    empty.prepare(left_padding=[40, 40])
    attended(empty, *(mx.zeros((2, heads, 5, 8)) for heads in (4, 2, 2)), "causal")
    again = BatchDKVCache.from_state(empty.state)
    assert again.offset.tolist() == empty.offset.tolist() == [-35, -35]
    with pytest.raises(ValueError, match="padding in the state must be int32"):
        again.state = empty.state | {"left_padding": mx.array([1, 2, 3])}


def test_c18_the_hosts_batches_are_ours(model):
    """VeloxQuant-MLX#372: an inherited merge put a plain cache in its place, and nothing was compressed."""
    both = _merge_caches([filled(model, 100), filled(model, 9)])
    assert [type(cache) for cache in both] == [BatchDKVCache] * 2 and both[0].compressed_nbytes > 0
    fresh = _merge_caches([make_prompt_cache(model, SMALL)])
    assert [type(cache) for cache in _extend_cache(both, fresh)] == [BatchDKVCache] * 2
    assert [type(cache.extract(0)) for cache in both] == [DKVCache] * 2
    with pytest.raises(ValueError, match="must be DKV caches of one sequence"):
        _merge_caches([make_prompt_cache(model, SMALL), mlx_cache.make_prompt_cache(model)])


@pytest.mark.parametrize("length", [256, 512])
def test_c20_a_stored_prompt_is_gone_on_from_with_its_last_token(model, length):
    """vllm#17999, #9972: nothing was left to compute where the prompt is cached whole and fills its blocks."""
    cache = filled(model, length, dataclasses.replace(BIG, window=1, sink_tokens=0))
    assert cache[0].layer.block_counts == [(length - 1) // 256]
    assert [layer.trim(1) for layer in cache] == [1, 1]
    same(feed(model, IDS[:1, length - 1 :], [1], cache)[0, 0], logits(0, length)[-1])
    for layer in cache:
        layer.trim(1)
    cold = greedy(model, IDS[0, :length], 4, mlx_cache.make_prompt_cache(model))
    assert greedy(model, IDS[0, length - 1 : length], 4, cache) == cold


def test_c20_the_hosts_store_of_prompts_never_gives_a_cache_too_long(model):
    """The same kind, through mlx-lm's own store of caches: what cannot be trimmed is not given for a shorter prompt."""
    for config, trimmed in ((dataclasses.replace(BIG, window=512), True), (SMALL, False)):
        store = mlx_cache.LRUPromptCache()
        cache = filled(model, 100, config)
        made = greedy(model, IDS[0, 100:120], 2, cache)  # then stored, as the server does
        tokens = [*IDS[0, :120].tolist(), *made]
        store.insert_cache("model", tokens, cache)
        found, rest = store.fetch_nearest_cache("model", IDS[0, :80].tolist())
        assert (found is not None) == trimmed
        if trimmed:
            assert found[0].offset == 79 and len(rest) == 1
            same(feed(model, np.array([rest]), [1], found)[0, 0], logits(0, 80)[-1])
        if trimmed:  # a copy of a cache that was asked, which then closes blocks
            grown, rest = store.fetch_nearest_cache("model", [*tokens, *IDS[1, :1024]])
            feed(model, np.array([rest]), [1000, 24], grown)
            store.insert_cache("model", [*tokens, *IDS[1, :1024]], grown)
            assert grown[0].layer.block_counts == [(1146 - 16 - 512) // 256]
            nearest, rest = store.fetch_nearest_cache("model", [*tokens, *IDS[1, :900]])
            assert nearest[0].offset == 122 and len(rest) == 900
        longer, rest = store.fetch_nearest_cache("model", [*tokens, 1, 2, 3])
        assert longer[0].offset == 122 and rest == [1, 2, 3]


def test_c27_length_offset_and_size_agree(model):
    """claude-code-local#46, #47: the allocation step was read as the length."""
    cache = filled(model, 1000, BIG)[0]
    assert len(cache) == cache.offset == cache.size() == 1000 and not hasattr(cache, "step")
    batch = cache.merge([cache, cache])
    assert len(batch) == batch.size() == 1000 and batch.offset.tolist() == [1000, 1000]


def rows(seed: int, batch: int, heads: int, length: int, dim: int = 8) -> Any:
    return mx.array(np.random.default_rng(seed).standard_normal((batch, heads, length, dim), dtype=np.float32))


def attended(cache: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    keys, values = cache.update_and_fetch(k, v)
    return _mlx_hook.attention(q, keys, values, cache, 8**-0.5, mask)


def forms(keep: Any) -> list[Any]:
    """One mask as bools and added to the logits, of several dtypes and strides."""
    found = [keep, mx.contiguous(keep.swapaxes(-1, -2)).swapaxes(-1, -2)]
    for dtype, low in ((mx.float32, mx.finfo(mx.float32).min), (mx.float32, -np.inf), (mx.float16, -np.inf)):
        found.append(mx.where(keep, mx.array(0.0), mx.array(low)).astype(dtype))
    return [*found, mx.where(keep, mx.array(0.0), mx.array(mx.finfo(mx.float32).min)).astype(mx.bfloat16)]


def test_c28_c29_one_mask_in_every_form_and_no_nan_of_padding(model):
    """transformers#32390, mlx#2395, #2608, unturtle#56: NaN of rows that see nothing, additive masks read inverted."""
    length, real = 340, np.arange(340) >= np.array([300, 0])[:, None]
    q, k, v = (rows(seed, 2, heads, length).astype(mx.float16) for seed, heads in ((0, 4), (1, 2), (2, 2)))
    keep = mlx_cache.create_causal_mask(length, left_padding=mx.array([300, 0]))
    outs = []
    for mask in ["causal", *forms(keep)]:
        cache = BatchDKVCache(dataclasses.replace(SMALL, format="compact"), batch_size=2)
        cache.prepare(left_padding=[300, 0])
        assert bool(mx.all(cache.make_mask(length, return_array=True) == keep))
        outs.append(np.array(attended(cache, q, k, v, mask)))
        assert np.isfinite(outs[-1]).all() and (outs[-1].swapaxes(1, 2)[~real] == 0).all()
        step = attended(cache, q[:, :, :1], k[:, :, :1], v[:, :, :1], None)
        assert np.isfinite(np.array(step)).all()
    assert all(np.array_equal(out, outs[0]) for out in outs)
    alone = attended(DKVCache(SMALL), *(x[:1, :, 300:] for x in (q, k, v)), "causal")
    same(outs[0][0, :, 300:], np.array(alone)[0], 2e-3)  # float16
    future = mx.array(np.triu(np.ones((length, length), bool)))
    bias = mx.where(keep, mx.array(-2.0), mx.array(-np.inf))
    wrong = [~keep, keep | future, keep[:, :, :, 1:], keep[:, 0], bias, forms(~keep)[2], keep[:, :, :5], None]
    for mask in wrong:
        cache = BatchDKVCache(SMALL, batch_size=2)
        cache.prepare(left_padding=[300, 0])
        with pytest.raises(NotImplementedError, match="attends causally"):
            attended(cache, q, k, v, mask)


def test_c28_padding_on_a_warm_cache_gives_nothing():
    """The same kind: padding behind the real tokens, over closed blocks."""
    cache = BatchDKVCache(TINY, batch_size=2)
    q, k, v = rows(0, 2, 4, 60), rows(1, 2, 2, 60), rows(2, 2, 2, 60)
    attended(cache, *(x[:, :, :40] for x in (q, k, v)), "causal")
    cache.prepare(lengths=[3, 20], right_padding=[17, 0])
    out = np.array(attended(cache, *(x[:, :, 40:] for x in (q, k, v)), "causal"))
    assert (out[0, :, 3:] == 0).all() and (np.abs(out[0, :, :3]).max((0, 2)) > 0).all() and (out[1] != 0).any()


def test_c30_a_batched_mask_goes_over_grouped_heads():
    """mlx-lm#1322: a mask of a batch did not broadcast over the query heads of a kv head."""
    q, k, v = rows(0, 2, 16, 66), rows(1, 2, 8, 66), rows(2, 2, 8, 66)
    keep = mx.arange(66)[None, None, None] >= mx.array([10, 0])[:, None, None, None]
    assert keep.shape == (2, 1, 1, 66)
    cache = BatchDKVCache(SMALL, batch_size=2)
    cache.prepare(left_padding=[10, 0])
    attended(cache, q[:, :, :65], k[:, :, :65], v[:, :, :65], "causal")
    out = attended(cache, q[:, :, 65:], k[:, :, 65:], v[:, :, 65:], keep)
    for row, left in enumerate((10, 0)):
        one = DKVCache(SMALL)
        parts = [x[row : row + 1, :, left:] for x in (q, k, v)]
        attended(one, *(x[:, :, :-1] for x in parts), "causal")
        same(out[row], attended(one, *(x[:, :, -1:] for x in parts), None)[0])
    with pytest.raises(NotImplementedError, match="attends causally"):
        attended(cache, q[:, :, :1], k[:, :, :1], v[:, :, :1], keep)  # a column short: it hides a token


def test_c31_a_cache_that_saw_nothing_answers_everything(model, tmp_path):
    """transformers#47977, #48178: crops and reads of layers that never got a token failed."""
    for cache in (DKVCache(SMALL), BatchDKVCache(SMALL, batch_size=2)):
        assert cache.trim(3) == cache.nbytes == cache.size() == 0 and cache.empty()
        assert type(cache).from_state(cache.state).empty() and copy.deepcopy(cache).empty()
    batch = BatchDKVCache(SMALL, batch_size=2)
    batch.filter([1, 0])
    batch.extend(BatchDKVCache(SMALL))
    assert batch.offset.tolist() == [0, 0, 0] and batch.extract(2).empty()
    path, cache = str(tmp_path / "cache.safetensors"), make_prompt_cache(model, SMALL)
    mlx_cache.save_prompt_cache(path, cache)
    loaded = mlx_cache.load_prompt_cache(path)
    same(feed(model, IDS[:1], [50, 1], loaded)[0], logits(0, 51))


@pytest.mark.parametrize("window", [1, 24])
@pytest.mark.parametrize("drafts", [2, 5])
def test_c32_drafts_that_are_rejected_leave_no_trace(model, window, drafts):
    """mlx-vlm#1956, #1446: the host skips a trim where the answer is no, and goes on with the rejected drafts."""
    config, small = dataclasses.replace(TINY, window=window), build(noise=0.1)
    for length, seen in ((1, 0), (30, 5)):
        prompt = IDS[0, :length]
        want = greedy(model, prompt, 16, mlx_cache.make_prompt_cache(model))
        for other in (small, model):
            caches, accepted = (make_prompt_cache(model, config), mlx_cache.make_prompt_cache(model)), []
            for cache in caches:
                theirs = mlx_cache.make_prompt_cache(other)
                if seen:
                    feed(model, prompt[None], [seen], cache), feed(other, prompt[None], [seen], theirs)
                steps = speculative_generate_step(
                    mx.array(prompt[seen:]),
                    model,
                    other,
                    prompt_cache=cache + theirs,
                    max_tokens=16,
                    num_draft_tokens=drafts,
                )
                made = list(steps)
                assert [token for token, _, _ in made] == want
                accepted.append(sum(drafted for _, _, drafted in made))
            assert accepted[0] == accepted[1] and (other is model) == (accepted[0] >= 16 * drafts // (drafts + 1))
            ours, dense = caches
            assert ours[0].offset == dense[0].offset and bool(ours[0].layer.block_counts[0]) == (
                window < 24 or length > 1
            )
            if any(ours[0].layer.block_counts):  # asked again, as a store of caches does
                assert not mlx_cache.can_trim_prompt_cache(ours)
            assert greedy(model, want[-1:], 3, ours) == greedy(model, want[-1:], 3, dense)


def test_c32_a_state_taken_in_the_midst_of_drafts_goes_on_alike(model):
    """The same kind: the newest chunk has not closed what it made due."""
    cache = make_prompt_cache(model, TINY)
    assert mlx_cache.can_trim_prompt_cache(cache)
    feed(model, IDS[:1], [30], cache)
    twin = [DKVCache.from_state(layer.state) for layer in cache]
    assert cache[0].layer.block_counts == [0] and twin[0].layer.block_counts == [5]
    np.testing.assert_array_equal(*(feed(model, IDS[:1, 30:], [7], each) for each in (cache, twin)))


def test_c32_a_cache_with_closed_blocks_is_refused_at_the_start(model):
    """The same kind: the one clear refusal."""
    cache = filled(model, 60, TINY) + mlx_cache.make_prompt_cache(model)
    steps = speculative_generate_step(mx.array(IDS[0, 60:70]), model, model, prompt_cache=cache, max_tokens=4)
    with pytest.raises(ValueError, match="trimmable prompt cache .*DKVCache"):
        next(steps)
    assert cache[0].offset == 60
