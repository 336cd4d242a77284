"""Caches through their lives: any order of operations, a limit of blocks. ``HYPOTHESIS_PROFILE=deep`` tries more."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from synthetic import MODELS, rewritten

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from dkv import DKVConfig  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach  # noqa: E402

EXACT = DKVConfig(block_size=16, window=24, sink_tokens=8, format="fp32", rank=4, top_k=1000)
REFUSING = dataclasses.replace(EXACT, max_blocks=2)
DROPPING = dataclasses.replace(REFUSING, when_full="drop_oldest")
FULL = 8 + 24 + 3 * 16 - 1  # tokens that two closed blocks and the exact rows hold at most
OPERATIONS = settings(max_examples=4 * settings().max_examples, stateful_step_count=30)

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    torch.manual_seed(0)
    return attach(AutoModelForCausalLM.from_config(MODELS[request.param]()).eval(), EXACT)


IDS = torch.randint(0, 97, (1, 400), generator=torch.Generator().manual_seed(1))


def feed(model, cache, *lengths):
    """Logits of the last of the chunks that follow what the cache has seen."""
    for length in lengths:
        start = cache.get_seq_length()
        out = model(IDS[:, start : start + length], past_key_values=cache).logits
    return out


def everything(cache):
    """Every tensor of every layer, bounded ones too, and the lengths."""
    held = []
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        if state is None:
            held += [layer.keys.clone(), layer.values.clone()]
        else:
            held += [part.clone() for part in state.tensors().values()]
            held += [state.offset, state.tokens, state.rows, state.block_counts, state.dropped]
    return held


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other)
    )


def test_any_order_of_operations_equals_plain_rows():
    from lifecycle_machine import CacheMachine

    run_state_machine_as_test(CacheMachine, settings=OPERATIONS)


def test_any_order_of_operations_of_mlx_lm_equals_plain_rows():
    pytest.importorskip("mlx_lm")
    import lifecycle_mlx_machine as machine

    machine.hook()
    run_state_machine_as_test(machine.MlxCacheMachine, settings=OPERATIONS)


def test_a_loaded_prompt_cache_of_mlx_lm_outlives_its_file(tmp_path):
    """A cache that was loaded is saved under the same name, and another process may replace or remove the file."""
    mx = pytest.importorskip("mlx.core")
    mlx_cache = pytest.importorskip("mlx_lm.models.cache")
    import lifecycle_mlx_machine as machine
    from lifecycle_dense import drawn
    from numpy.random import default_rng

    machine.hook()
    path, cache = tmp_path / "cache.safetensors", machine.DKVCache(EXACT)
    pair = machine.Pair(cache, machine.Dense(EXACT, 1).start(1))
    pair.attend(*drawn(default_rng(0), 1, 1, 100))
    mlx_cache.save_prompt_cache(str(path), [cache])
    loaded = mlx_cache.load_prompt_cache(str(path))
    path.write_bytes(b"")
    mlx_cache.save_prompt_cache(str(path), loaded)
    again = mlx_cache.load_prompt_cache(str(path))[0]
    assert all(mx.array_equal(part, again.state[name]) for name, part in cache.state.items())


# the limit


def test_tokens_beyond_the_limit_are_refused_before_anything_changes(model):
    cache, free = DKVCache(model, REFUSING), DKVCache(model, EXACT)
    feed(model, cache, 50, FULL - 50)
    feed(model, free, 50, FULL - 50)
    before = everything(cache)
    with pytest.raises(ValueError, match="max_blocks is 2 and these tokens would make it 3 in sequence 0"):
        feed(model, cache, 1)
    with pytest.raises(ValueError, match="would make it 5"):
        feed(model, cache, 33)
    with pytest.raises(ValueError, match="would make it 4"):
        cache.compress(0)
    assert same(everything(cache), before)
    if not any(cache.is_sliding):
        cache.crop(-3)
        free.crop(-3)
        assert torch.equal(feed(model, cache, 3), feed(model, free, 3))
    assert cache.dropped_tokens == [0]


def test_what_is_left_at_the_limit_depends_on_the_tokens_alone(model):
    caches = [DKVCache(model, DROPPING) for _ in range(3)]
    for cache, lengths in zip(caches, ([300], [100, 1, 150, 49], [20] * 15)):
        feed(model, cache, *lengths)
        assert cache.dropped_tokens == [(300 - 8 - 24) // 16 * 16 - 32] and cache.get_seq_length() == 300
        assert [layer.block_counts for layer in cache.dkv_layers] == [[2]] * len(cache.dkv_layers)
        assert [layer.rows for layer in cache.dkv_layers] == [[8 + 24 + (300 - 32) % 16]] * len(cache.dkv_layers)
    shapes = [[part.shape for layer in cache.dkv_layers for part in layer.tensors().values()] for cache in caches]
    assert shapes[0] == shapes[1] == shapes[2]
    first = caches[0].dkv_layers[0].tensors()  # the first layer sees embeddings alone, whatever was attended
    for cache in caches[1:]:
        for name, part in cache.dkv_layers[0].tensors().items():
            torch.testing.assert_close(part, first[name], atol=1e-5, rtol=1e-5)


def test_a_saved_cache_that_dropped_blocks_goes_on_bit_equal(model, tmp_path):
    cache, path = DKVCache(model, DROPPING), tmp_path / "cache.safetensors"
    feed(model, cache, 200)
    cache.save(str(path))
    loaded, twin = DKVCache(model, DROPPING).load(str(path)), copy.deepcopy(cache)
    out = feed(model, cache, 60)
    for other in (loaded, twin):
        assert torch.equal(feed(model, other, 60), out) and other.dropped_tokens == cache.dropped_tokens


@pytest.mark.parametrize("dropped", [[0], [7], [-8], ["8"], None])
def test_a_file_whose_dropped_blocks_do_not_add_up_is_refused(model, tmp_path, dropped):
    cache, path = DKVCache(model, DROPPING), tmp_path / "cache.safetensors"
    feed(model, cache, 200)
    cache.save(str(path))

    def change(meta, entries):
        for layer in meta["layers"]:
            if layer["kind"] == "DKVLayer":
                assert layer["dropped"] == [8]
                layer["dropped"] = dropped

    rewritten(path, change)
    with pytest.raises(ValueError, match="lengths"):
        DKVCache(model, DROPPING).load(str(path))


def test_a_limit_below_what_is_held_is_refused(model):
    cache = DKVCache(model, EXACT)
    feed(model, cache, 100)
    with pytest.raises(ValueError, match="max_blocks of 2, a sequence holds 4 closed blocks"):
        cache.configure(DROPPING)
    cache.configure(dataclasses.replace(DROPPING, max_blocks=4))
    feed(model, cache, 100)
    assert cache.dropped_tokens == [6 * 16]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_blocks": 0}, ValueError, "max_blocks must be 1 or more, got 0"),
        ({"max_blocks": 2.0}, TypeError, "max_blocks must be an int, got 2.0"),
        ({"when_full": "drop"}, ValueError, "when_full must be one of .*'error', 'drop_oldest'.*, got 'drop'"),
    ],
)
def test_the_limit_is_checked(fields, error, message):
    with pytest.raises(error, match=message):
        DKVConfig(**fields)


def test_a_short_soak_keeps_its_bounds():
    pytest.importorskip("rich")
    import lifecycle_machine  # noqa: F401  it finds bench

    from bench import soak

    rows = soak.run(6000, intervals=4)
    assert soak.broken(rows, soak.most_bytes()) == []
    assert rows[-1]["dropped"] > 2000
    assert soak.broken([{**row, "lse_error": 2e-5} for row in rows], 1) == ["lse within 1e-05", "1 bytes of cache"]
