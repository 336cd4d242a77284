"""Faults that users of other caches met, in transformers models. Each names its source."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from synthetic import feed, rewritten

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dkv import DKVConfig  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

BIG = DKVConfig(window=64, sink_tokens=16, format="fp32", rank=8, top_k=1000)  # blocks of 256, every row exact
SMALL = dataclasses.replace(BIG, block_size=16, window=24, sink_tokens=8, rank=4)
TINY = dataclasses.replace(BIG, block_size=4, window=5, sink_tokens=3, rank=2)
SHAPE = {"vocab_size": 64, "initializer_range": 0.2, "hidden_size": 32, "intermediate_size": 32}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
TOLERANCE = 1e-5
IDS = torch.randint(0, 64, (3, 1100), generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.usefixtures("quiet")


def build(kind: str = "llama", seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **fields)).eval()
    shape = SHAPE | {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7} | fields
    if kind == "gemma2":  # sliding and full layers in turns
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape)).eval()
    types = ["conv", "full_attention"] * 2
    del shape["head_dim"], shape["sliding_window"]
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**shape, layer_types=types)).eval()


@functools.cache
def dense(kind: str = "llama") -> Any:
    return build(kind)


def attached(config: DKVConfig = SMALL, kind: str = "llama") -> Any:
    return attach(build(kind), config)


def padded(lengths: Any, more: int = 0) -> tuple[Any, Any]:
    """Left-padded prompts of the first ``lengths`` tokens, and ``more`` after them."""
    rows = torch.zeros(len(lengths), max(lengths) + more, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        rows[row, max(lengths) - length :] = IDS[row, : length + more]
        mask[row, max(lengths) - length :] = 1
    return rows, mask


def same(a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def lengths_of(cache: Any) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]


def test_c01_the_length_is_that_of_the_tokens_not_of_the_rows_kept():
    """VeloxQuant-MLX#389, #171, #196, hipfire#391: the offset counted kept rows and turned later tokens wrongly."""
    model, seen = attached(BIG), []
    hook = model.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    cache = DKVCache(model)
    model(IDS[:1, :600], past_key_values=cache)
    assert cache.dkv_layers[0].block_counts == [2] and cache.dkv_layers[0].rows == [88]
    out = model(IDS[:1, 600:601], past_key_values=cache).logits
    assert seen[-1].flatten().tolist() == [600] and lengths_of(cache) == [601, 601]
    hook.remove()
    same(out, dense()(IDS[:1, :601]).logits[:, 600:])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lfm2"])
def test_c02_a_mask_made_before_the_layer_runs_fits_what_is_attended(kind):
    """VeloxQuant-MLX#370, #390, mlxcel#422, transformers#35168: the mask and the keys had other lengths."""
    model = attached(BIG, kind)
    cache = DKVCache(model)
    same(feed(model, IDS[:1], [512, 100], cache), dense(kind)(IDS[:1, :612]).logits)
    assert cache.dkv_layers[0].block_counts == [2]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("lengths", [[1, 2, 3], [4, 8, 12], [30, 29, 7], [31, 1, 13]], ids=str)
def test_c02_at_every_length_and_chunking(kind, lengths):
    """The same kind: chunks that end in every residue of the block size, ragged and with left padding."""
    model, (rows, mask) = attached(TINY, kind), padded(lengths, more=5)
    size = max(lengths)
    for chunks in ([size + 5], [size, 1, 1, 3], [7, 1] * ((size + 5) // 8) + [(size + 5) % 8 or 8][: (size + 5) % 8]):
        out = feed(model, rows, chunks, DKVCache(model), mask)
        for row, length in enumerate(lengths):
            alone = dense(kind)(IDS[row : row + 1, : length + 5][:, : out.shape[1] - size + length]).logits[0]
            same(out[row, size - length :], alone)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_c07_c09_every_part_is_cropped_alike(kind):
    """mlx-lm#1494, #1776, transformers#47433, #47720: fewer were cropped than asked, or parts by different rules."""
    model = attached(SMALL, kind)
    for amount, left in ((0, 3), (-1, 2), (-5, 0), (np.int64(-2), 1), (torch.tensor(-2), 1), (-99, 0)):
        cache = DKVCache(model)
        rows, mask = padded([3, 2])
        feed(model, rows, [3], cache, mask)
        cache.crop(amount)
        assert lengths_of(cache) == [left] * len(cache)
        for layer in cache.dkv_layers:
            tokens = [left, max(0, left - 1)] if left else []
            assert (layer.tokens, layer.rows, layer.block_counts) == (tokens, tokens, [0, 0][: len(tokens)])
            assert left == 0 or tuple(layer.real.shape) == (2, left)
        if not left:
            same(feed(model, IDS[:1], [40, 1], cache), dense(kind)(IDS[:1, :41]).logits)
    cache = DKVCache(model)
    model(IDS[:1, :6], past_key_values=cache)
    for amount in (2, 99, True, False, torch.tensor(True), 2.5, -2.0, torch.tensor(-2.0), None, "1"):
        with pytest.raises((TypeError, ValueError), match="tokens_to_remove must be"):
            cache.crop(amount)
        assert lengths_of(cache) == [6] * len(cache)
    cache.crop(-4)
    cache.crop(-100)
    same(feed(model, IDS[:1], [30], cache), dense(kind)(IDS[:1, :30]).logits)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", ["compact", "exact"])
def test_c12_files_keep_every_dtype_and_bit(tmp_path, dtype, format):
    """vmlx#7, #18: bfloat16 went through NumPy and came back as float16."""
    changes = {"format": "compact"} if format == "compact" else {"format": {"bfloat16": "bf16"}.get(dtype, "fp16")}
    if format == "exact" and dtype == "float32":
        changes = {"format": "fp32"}
    config = dataclasses.replace(SMALL, num_residuals=5, **changes)
    model = attach(build().to(getattr(torch, dtype)), config)
    rows, mask = padded([100, 60])
    cache = DKVCache(model)
    feed(model, rows, [100], cache, mask)
    cache.save(str(tmp_path / "cache"))
    loaded = DKVCache(model).load(str(tmp_path / "cache"))
    kinds = set()
    for one, other in zip(cache.dkv_layers, loaded.dkv_layers, strict=True):
        stored = max(one.rows)
        for (name, a), (also, b) in zip(one.tensors().items(), other.tensors().items(), strict=True):
            a = a[:, :, :stored] if name in ("k_rows", "v_rows") else a
            assert name == also and a.dtype == b.dtype and torch.equal(a, b)
            kinds.add(a.dtype)
    assert {torch.int32, torch.bool, torch.uint8, getattr(torch, dtype)} <= kinds
    step = {"attention_mask": torch.ones(2, 101).long(), "position_ids": torch.tensor([[100], [60]])}
    step["attention_mask"][1, :40] = 0
    assert torch.equal(*(model(IDS[:2, 5:6], past_key_values=each, **step).logits for each in (cache, loaded)))


def test_c13_a_file_of_other_settings_is_refused_by_the_field(tmp_path):
    """Rapid-MLX#198, #200: a cache written under other settings was loaded and then broke."""
    config, path = dataclasses.replace(BIG, rank=32, block_size=256), tmp_path / "cache"
    model = attached(config)
    cache = DKVCache(model)
    feed(model, IDS[:1], [400], cache)
    cache.save(str(path))
    wide = attach(build(head_dim=16), config)
    others = [
        (DKVCache(model, dataclasses.replace(config, rank=16)), "rank"),
        (DKVCache(model, dataclasses.replace(config, block_size=128)), "block_size"),
        (DKVCache(model, dataclasses.replace(config, format="compact")), "format"),
        (DKVCache(wide), "head dim"),
        (
            DKVCache(attach(build(num_hidden_layers=3), config)) if False else DKVCache(attached(config, "gemma2")),
            "layers",
        ),
    ]
    for other, field in others:
        with pytest.raises(ValueError, match=field):
            other.load(str(path))
        assert set(lengths_of(other)) == {0} and other.nbytes == 0
    feed(model, IDS[:1], [20], fresh := DKVCache(model))
    rewritten(path, lambda meta, entries: meta.update(version=999))
    with pytest.raises(ValueError, match="version"):
        fresh.load(str(path))
    assert lengths_of(fresh) == [20, 20]


@pytest.mark.parametrize("chunks", [[300], [150, 100, 48, 1, 1]], ids=str)
def test_c16_a_short_row_of_a_padded_batch_is_what_it_is_alone(chunks):
    """mlx-lm#1906, mlx-vlm#1946, #1542, unsloth#3699: it attended its padding, or a neighbour changed it."""
    model, (rows, mask) = attached(SMALL), padded([12, 300])
    out = feed(model, rows, chunks, DKVCache(model), mask)
    for row, length in enumerate([12, 300]):
        same(out[row, 300 - length :], dense()(IDS[row : row + 1, :length]).logits[0])
        alone = feed(model, IDS[row : row + 1], [length], DKVCache(model))[0]
        same(out[row, 300 - length :], alone)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_c17_rows_of_other_lengths_are_filtered_and_decode_as_alone(kind):
    """mlx-vlm#1248, #1109, mlx-lm#1736, #748: filters of caches of other lengths, and of empty ones, failed."""
    model, lengths = attached(BIG, kind), [5, 256, 700]
    cache = DKVCache(model)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.reorder_cache(torch.tensor([1]))
    assert lengths_of(cache) == [0] * len(cache)
    rows, mask = padded(lengths, more=1)
    feed(model, rows[:, :-1], [700], cache, mask[:, :-1])
    for index in (torch.tensor([0, 3]), [True, False], torch.tensor(1), torch.tensor([0.0]), [[0, 1]]):
        with pytest.raises((TypeError, ValueError, IndexError), match="index must"):
            cache.reorder_cache(index)
    with pytest.raises((TypeError, ValueError), match="repeats must be"):
        cache.batch_repeat_interleave(-1)
    assert lengths_of(cache) == [700] * len(cache) and cache.batch_size == 3
    cache.batch_select_indices([-1, 0])
    order = [2, 0]
    positions = (mask.cumsum(1) - 1)[order, -1:]
    out = model(rows[order, -1:], attention_mask=mask[order], position_ids=positions, past_key_values=cache).logits
    for place, row in enumerate(order):
        same(out[place, 0], dense(kind)(IDS[row : row + 1, : lengths[row] + 1]).logits[0, -1])
    cache.batch_select_indices(torch.tensor([False, False]))
    assert lengths_of(cache) == [0] * len(cache)
    same(feed(model, IDS[:1], [20, 1], cache), dense(kind)(IDS[:1, :21]).logits)


def spied(model: Any) -> list[int]:
    """How many tokens every call of the model is fed."""
    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].shape[1]))
    return fed


@pytest.mark.parametrize("length", [256, 512])
@pytest.mark.parametrize("batch", [1, 2])
def test_c20_a_prompt_that_is_cached_whole_has_its_last_token_computed(length, batch):
    """vllm#17999, #9972: nothing was left to compute; transformers then feeds the whole prompt again."""
    model = attached(dataclasses.replace(BIG, window=1, sink_tokens=0))
    fed, prompt = spied(model), IDS[:batch, :length]
    cache = DKVCache(model)
    feed(model, prompt, [length], cache)
    assert cache.dkv_layers[0].block_counts == [(length - 1) // 256] * batch
    twin, cut = copy.deepcopy(cache), copy.deepcopy(cache)
    del fed[:]
    options = {"max_new_tokens": 5, "do_sample": False}
    got = model.generate(prompt, past_key_values=cache, **options)
    assert fed == [1] * 5 and torch.equal(got, dense().generate(prompt, **options))
    got = model.generate(prompt, past_key_values=twin, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(got, dense().generate(prompt, **options))
    cut.crop(-1)
    same(model(prompt[:, -1:], past_key_values=cut).logits, dense()(prompt).logits[:, -1:])


def test_c20_a_prompt_shorter_than_the_cache_is_refused():
    """The same kind: transformers cuts such a prompt at a place of no meaning."""
    model = attached()
    cache = DKVCache(model)
    feed(model, IDS[:1], [100], cache)
    with pytest.raises(ValueError, match="the prompt has 90 tokens, the cache has seen 100"):
        model.generate(IDS[:1, :90], past_key_values=cache, max_new_tokens=2)
    mask = torch.ones(1, 104, dtype=torch.long)  # new tokens alone, with the mask of all
    options = {"max_new_tokens": 4, "do_sample": False}
    got = model.generate(IDS[:1, 100:104], attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(got[:, 4:], dense().generate(IDS[:1, :104], **options)[:, 104:])
    hybrid = attached(SMALL, "gemma2")
    cache = DKVCache(hybrid)
    feed(hybrid, IDS[:1], [100], cache)
    with pytest.raises(ValueError, match="has seen all of the prompt and cannot give its last token back"):
        hybrid.generate(IDS[:1, :100], past_key_values=cache, max_new_tokens=2)
    assert lengths_of(cache) == [100] * 4
    detach(model)
    assert torch.equal(model.generate(IDS[:1, :20], **options), dense().generate(IDS[:1, :20], **options))


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
def test_c21_blocks_and_tail_by_one_formula(length):
    """MinivLLM#77, nano-vllm#240: the last block's tokens were miscounted where it is full."""
    model = attached(dataclasses.replace(BIG, window=1, sink_tokens=0))
    cache = DKVCache(model)
    out = feed(model, IDS[:1], [length, 1], cache)
    blocks = length // 256  # a window of one row: a block closes when 257 rows are held
    for layer in cache.dkv_layers:
        assert (layer.block_counts, layer.rows) == ([blocks], [length + 1 - 256 * blocks])
    same(out, dense()(IDS[:1, : length + 1]).logits)


def test_c24_every_step_feeds_one_token_and_a_second_question_works():
    """KVCache-Factory#26, kvpress#27, #30: the counter held the kept size, and steps fed thousands of tokens."""
    model = attached(BIG)
    fed, cache, prompt = spied(model), DKVCache(model), IDS[:1, :1000]
    options = {"max_new_tokens": 4, "do_sample": False}
    first = model.generate(prompt, past_key_values=cache, **options)
    assert fed == [1000, 1, 1, 1] and lengths_of(cache) == [1003, 1003]
    assert torch.equal(first, dense().generate(prompt, **options))
    second = torch.cat([first, IDS[:1, 1000:1010]], dim=1)
    del fed[:]
    assert torch.equal(model.generate(second, past_key_values=cache, **options), dense().generate(second, **options))
    assert fed == [11, 1, 1, 1]


def test_c25_mask_sizes_count_the_new_tokens_whatever_a_layer_stores():
    """VibeVoice#303, transformers#48510, #48280: the query length was left out, or another layer's size was taken."""
    for kind in ("llama", "gemma2"):
        model = attached(SMALL, kind)
        cache = DKVCache(model)
        feed(model, IDS[:1], [300], cache)
        cache.dkv_layers[0].close(0)
        assert cache.dkv_layers[0].block_counts != cache.dkv_layers[1].block_counts
        for index, layer in enumerate(cache.layers):
            sizes = cache.get_mask_sizes(5, index)
            assert sizes == ((305, 0) if hasattr(layer, "state") else (11, 294))
        same(model(IDS[:1, 300:305], past_key_values=cache).logits, dense(kind)(IDS[:1, :305]).logits[:, 300:])
        assert lengths_of(cache) == [305] * len(cache)
        cache.reset()
        assert cache.get_mask_sizes(5, 1) == (5, 0)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_c26_causality_and_padding_survive_our_attention_name(kind):
    """transformers#45811, #46132, optimum-executorch#82: without a mask function attention saw the future."""
    model, (rows, mask) = attached(SMALL, kind), padded([60, 41])
    assert model.config._attn_implementation == "dkv"
    other = rows.clone()
    other[:, -1] = (other[:, -1] + 1) % 64
    for given in (None, mask):
        first, second = (feed(model, ids, [60], DKVCache(model), given) for ids in (rows, other))
        assert torch.equal(first[:, :-1], second[:, :-1]) and not torch.equal(first[:, -1], second[:, -1])
    plain = [model(ids, attention_mask=mask).logits for ids in (rows, other)]  # and without a cache
    assert torch.equal(plain[0][:, :-1], plain[1][:, :-1])


def masks(real: Any) -> dict[str, Any]:
    """The same causal mask with padding in every form that a host gives."""
    length = real.shape[1]
    keep = torch.ones(length, length, dtype=torch.bool).tril()[None, None] & real[:, None, None, :]
    forms = {"2d": real.long(), "2d float": real.float(), "bool": keep}
    for name, low in (("min", torch.finfo(torch.float32).min), ("inf", -torch.inf)):
        forms[name] = torch.zeros(keep.shape).masked_fill(~keep, low)
        forms[name + " strided"] = forms[name].mT.contiguous().mT
    forms["half"] = forms["min"].half()  # float32's minimum is -inf there
    return forms


def test_c28_c29_one_mask_in_every_form_and_no_nan_of_padding():
    """transformers#32390, pytorch#103749, unturtle#56: NaN of rows that see nothing, additive masks read inverted."""
    model = attach(build().half(), dataclasses.replace(SMALL, format="compact"))
    ids, real = torch.cat([torch.zeros(1, 300).long(), IDS[:1, :40]], 1), torch.ones(2, 340, dtype=torch.bool)
    ids, real[0, :300] = torch.cat([ids, IDS[1:2, :340]]), False
    positions, outs, attended = (real.long().cumsum(1) - 1).clamp(min=0), {}, []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: attended.append(args[0]))
    for name, mask in masks(real).items():
        outs[name] = model(ids, past_key_values=DKVCache(model), attention_mask=mask, position_ids=positions).logits
        assert outs[name].isfinite().all()
        assert all(bool((part[0, :300] == 0).all()) and bool(part[0, 300:].any()) for part in attended)
        del attended[:]
    assert all(torch.equal(out, outs["2d"]) for out in outs.values())
    alone = model(IDS[:1, :40], past_key_values=DKVCache(model)).logits
    torch.testing.assert_close(outs["2d"][:1, 300:], alone, atol=0.01, rtol=0)  # float16 sums in another order
    other = dict(masks(real))
    for wrong, kind in (
        (other["bool"].long(), "bools or floats"),
        (other["bool"].expand(2, 4, -1, -1), "must be"),
        (other["bool"][:, 0], "2 axes or 4"),
        (real.long()[:, :-1], "must cover 340 positions"),
        (other["inf"].where(other["bool"], torch.tensor(-3.0)), "adds a bias"),
        (other["bool"].mT, "another pattern"),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=kind):
            model(ids, past_key_values=DKVCache(model), attention_mask=wrong, position_ids=positions)


def test_c28_padding_between_turns_gives_nothing():
    """The same kind: padding behind and between real tokens, over closed blocks."""
    model, real = attached(), torch.ones(2, 150, dtype=torch.bool)
    real[0, 30:50] = real[1, 70:120] = False
    cache, outs, attended = DKVCache(model), [], []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: attended.append(args[0]))
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    for start, stop in ((0, 60), (60, 110), (110, 149), (149, 150)):
        given = {"attention_mask": real[:, :stop].long(), "position_ids": positions[:, start:stop]}
        outs.append(model(IDS[:2, start:stop], past_key_values=cache, **given).logits)
    assert bool((torch.cat(attended, 1)[~real] == 0).all())
    for row in range(2):
        alone = dense()(IDS[row : row + 1, :150][:, real[row]]).logits[0]
        same(torch.cat(outs, 1)[row, real[row]], alone)
    with pytest.raises(NotImplementedError, match="differs from the padding"):  # all are shown, after some were hidden
        model(IDS[:2, :1], past_key_values=cache, attention_mask=torch.ones(2, 151).long())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lfm2"])
def test_c31_a_cache_that_saw_nothing_answers_everything(kind, tmp_path):
    """transformers#47977, #48178: crops and reads of layers that never got a token failed."""
    model = attached(SMALL, kind)
    cache = DKVCache(model)
    for amount in (0, -3):
        cache.crop(amount)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.compress()
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == cache.dense_nbytes == cache.compressed_nbytes == 0
    assert cache.batch_size == -1 and cache.get_mask_sizes(5, 1) == (5, 0) and not cache.is_initialized
    assert all((state.tokens, state.rows, state.block_counts) == ([], [], []) for state in cache.dkv_layers)
    if kind == "lfm2":
        with pytest.raises(NotImplementedError, match="LinearAttentionLayer is not saved"):
            cache.save(str(tmp_path / "cache"))
    else:
        cache.save(str(tmp_path / "cache"))
        assert set(lengths_of(DKVCache(model).load(str(tmp_path / "cache")))) == {0}
    same(feed(model, IDS[:1], [40, 1], cache), dense(kind)(IDS[:1, :41]).logits)
    assert cache.nbytes > sum(state.nbytes for state in cache.dkv_layers) or kind == "llama"


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lfm2"])
@pytest.mark.parametrize("window", [1, 24])
def test_c32_drafts_that_are_rejected_leave_no_trace(kind, window):
    """mlx-vlm#1956, #1446: "not trimmable" was taken for "recurrent", or drafts stayed in the cache."""
    model, draft = attached(dataclasses.replace(TINY, window=window), kind), build(kind)
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    options = {"do_sample": False, "max_new_tokens": 12}
    for length, more in ((9, {"assistant_model": draft}), (30, {"assistant_model": dense(kind)}), (30, {})):
        if kind == "lfm2" and more:
            continue  # recurrent models take no other model's drafts
        more = more or {"prompt_lookup_num_tokens": 4}
        prompt = IDS[:1, :length].repeat(1, 1 if "assistant_model" in more else 2)
        cache = DKVCache(model)
        got = model.generate(prompt, past_key_values=cache, **options, **more)
        assert torch.equal(got, dense(kind).generate(prompt, **options))
        assert set(lengths_of(cache)) == {got.shape[1] - 1}
        again = torch.cat([got, IDS[:1, 50:53]], dim=1)  # the cache goes on, and closes what was due
        assert torch.equal(
            model.generate(again, past_key_values=cache, **options), dense(kind).generate(again, **options)
        )


def test_c32_without_a_host_that_drafts_a_crop_restores_or_refuses():
    """The same kind: whether the newest chunk can be taken back is asked for, and the host may stop asking."""
    model = attached(TINY)
    cache = DKVCache(model)
    cache.activate_past_recording()
    feed(model, IDS[:1], [20, 9], cache)
    assert cache.is_croppable and cache.dkv_layers[0].block_counts == [3] and cache.is_recording_past(0)
    cache.crop(-9)
    same(model(IDS[:1, 20:29], past_key_values=cache).logits, dense()(IDS[:1, :29]).logits[:, 20:])
    cache.layers[0].record_past = cache.layers[1].record_past = False
    model(IDS[:1, 29:30], past_key_values=cache)
    assert cache.dkv_layers[0].block_counts == [(30 - 8) // 4]
    with pytest.raises(ValueError, match="closed block"):
        cache.crop(-9)
    assert lengths_of(cache) == [30, 30]
