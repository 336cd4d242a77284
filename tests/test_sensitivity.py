"""Estimated losses against what storing one head coarsely really does to a model's distributions."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

import dkv  # noqa: E402
from dkv import DKVConfig  # noqa: E402
from dkv.integrations.transformers import layer_kinds  # noqa: E402

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
QWEN = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"hidden_size": 96}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**QWEN),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=16, attn_logit_softcapping=3.0, query_pre_attn_scalar=16
    ),
    # with sinks; all experts count, as one that is chosen no longer is no small change
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, sliding_window=16, num_local_experts=2, num_experts_per_tok=2
    ),
}
TOKENS = 8 + 4 * 16 + 16  # of the passage; 24 follow
MIDDLE = slice(8, TOKENS - 16)
IDS = torch.randint(0, 97, (TOKENS + 24,), generator=torch.Generator().manual_seed(1)).tolist()
HIDDEN: dict[int, int] = {}  # layer: head that sees sink and window alone


def dense(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **options):
    """Plain attention in the dtype of the model, and without the middle rows for a hidden head."""
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits + mask[..., : key.shape[2]]
    if module.layer_idx in HIDDEN:
        head = HIDDEN[module.layer_idx]
        logits[:, head * group : (head + 1) * group, :, MIDDLE] = -torch.inf
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weight = logits.softmax(-1)[..., : key.shape[2]]
    return (weight @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weight


AttentionInterface.register("test_dense", dense)
AttentionMaskInterface.register("test_dense", eager_mask)


@pytest.fixture(autouse=True)
def _quiet(small_prices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def tiny(kind, quiet=1.0):
    """A random model; ``quiet`` scales what its attention adds, so that changes of it are small."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= quiet
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks.fill_(14.0)
    return model


@pytest.fixture(params=sorted(KINDS))
def model(request):
    return tiny(request.param)


class Truth:
    """KL divergences of the model in float64 when something is done to its cache after the passage."""

    def __init__(self, model, copy_weight=0.3):
        self.copy_weight = copy_weight
        self.model = copy.deepcopy(model).double()
        self.model.set_attn_implementation("test_dense")
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # others have no float64
        self.cache = DynamicCache(config=model.config)
        with torch.no_grad():
            self.model(torch.tensor([IDS[:TOKENS]]), past_key_values=self.cache)
        self.before = self.log_p(lambda cache: None)

    def log_p(self, change):
        found = []
        for start, first in ((TOKENS, 0), (int(0.27 * TOKENS), 4), (int(0.66 * TOKENS), 4)):
            cache = copy.deepcopy(self.cache)
            change(cache)
            with torch.no_grad():
                logits = self.model(torch.tensor([IDS[start : start + 24]]), past_key_values=cache).logits
            found.append(logits[0, first:].log_softmax(-1))
        return found

    def loss(self, change):
        """The text's own continuation, and two repeats that count less."""
        kl = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(self.before, self.log_p(change), strict=True)]
        return float(kl[0] + self.copy_weight / 2 * (kl[1] + kl[2]))

    def stored(self, layer, head, weight, **bits):
        """Loss where one head's middle is stored with these widths."""

        def change(cache):
            held = cache.layers[layer]
            k, v = (x[:, head : head + 1, MIDDLE].float() for x in (held.keys, held.values))
            config = DKVConfig(block_size=16, rank=0, **{"key_bits": (8,) * 8, "value_bits": 8, **bits})
            k2, v2 = dkv.reconstruct_blocks(
                dkv.compress_blocks(k, v, config=config, channel_weight=weight[head : head + 1])
            )
            if "key_bits" in bits:
                held.keys[:, head : head + 1, MIDDLE] = k2.double()
            else:
                held.values[:, head : head + 1, MIDDLE] = v2.double()

        return self.loss(change)

    def dropped(self, layer, head):
        HIDDEN[layer] = head
        try:
            return self.loss(lambda cache: None)
        finally:
            HIDDEN.clear()


@pytest.mark.parametrize(("kind", "copy_weight"), [*((kind, 0.3) for kind in sorted(KINDS)), ("llama", 30.0)])
def test_estimates_are_the_true_divergences_of_small_changes(kind, copy_weight, small_prices, monkeypatch):
    monkeypatch.setattr(small_prices, "COPY_WEIGHT", copy_weight)
    model = tiny(kind, quiet=0.1)
    truth = Truth(model, copy_weight)
    found = small_prices.measure(model, IDS, 150, 0)
    full = [layer for layer, name in enumerate(layer_kinds(model.config)[0]) if name == "full_attention"]
    assert len(full) == (4 if kind in ("llama", "qwen2") else 2)
    got, want = [], []
    for layer in full:
        weight = found.channel_weight[layer]
        for head in range(2):
            for index in (1, 6):
                key_bits = small_prices.KEY_OPTIONS[index]
                got.append(found.key_loss[layer, head, index])
                want.append(truth.stored(layer, head, weight, key_bits=key_bits))
            for index in (1, 4):
                got.append(found.value_loss[layer, head, index])
                want.append(truth.stored(layer, head, weight, value_bits=small_prices.VALUE_OPTIONS[index]))
            got.append(found.drop_loss[layer, head])
            want.append(truth.dropped(layer, head))
    off = np.log(np.array(got) / np.array(want))
    assert (np.array(want) > 1e-12).all()
    assert abs(off).max() < np.log(3) and abs(off.mean()) < np.log(1.25)


def test_the_weight_of_a_channel_is_the_mean_square_of_its_queries(small_prices):
    model, seen = tiny("llama"), {}

    def spy(module, query, *args, **options):
        seen.setdefault(module.layer_idx, []).append(query[0].unflatten(0, (2, 3)).square().mean((1, 2)))
        return dense(module, query, *args, **options)

    AttentionInterface.register("test_dense", spy)
    try:
        Truth(model)
    finally:
        AttentionInterface.register("test_dense", dense)
    found = small_prices.measure(model, IDS, 1, 0)
    for layer, squares in seen.items():
        want = torch.stack(squares[1:4]).mean(0)  # the three continuations
        torch.testing.assert_close(found.channel_weight[layer], want, rtol=1e-4, atol=1e-6)


def test_losses_fall_with_finer_widths(model, small_prices):
    found = small_prices.measure(model, IDS, 4, 0)
    full = [layer for layer, name in enumerate(layer_kinds(model.config)[0]) if name == "full_attention"]
    for name, part in vars(found).items():
        numbers = part.numpy()
        assert np.isfinite(numbers).all() and (numbers[full] > 0).all(), name
        others = [layer for layer in range(4) if layer not in full]
        assert (numbers[others] == 0).all(), name
    keys, values = (x[full].mean((0, 1)).numpy() for x in (found.key_loss, found.value_loss))
    assert (np.diff(keys[[0, 2, 4, 6, 8]]) > 0).all() and (np.diff(values) > 0).all()
    assert (found.key_loss[full][..., 0] < found.key_loss[full][..., -1]).all()
    assert (found.value_loss[full][..., 0] < found.value_loss[full][..., -1]).all()
    again, other = small_prices.measure(model, IDS, 4, 0), small_prices.measure(model, IDS, 4, 7)
    for field in dataclasses.fields(found):
        mine = getattr(found, field.name)
        assert torch.equal(mine, getattr(again, field.name))
        assert torch.equal(mine, getattr(other, field.name)) == (field.name == "channel_weight")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_taken_whatever_the_caller_switched_off(context, small_prices):
    model = tiny("llama")
    want = small_prices.measure(model, IDS, 2, 0)
    with context():
        got = small_prices.measure(model, IDS, 2, 0)
    assert torch.equal(got.drop_loss, want.drop_loss) and torch.equal(got.key_loss, want.key_loss)


def test_half_precision_is_close_to_float32(small_prices):
    model = tiny("llama", quiet=0.3)
    want = small_prices.measure(model, IDS, 40, 0)
    got = small_prices.measure(model.bfloat16(), IDS, 40, 0)
    for field in ("key_loss", "value_loss", "drop_loss", "channel_weight"):
        off = np.log((getattr(got, field) / getattr(want, field)).numpy())
        assert abs(off).mean() < 0.5, field


@pytest.mark.parametrize("broken", [None, "reading", "continuation", "storing"])
def test_the_model_is_as_before_also_after_an_error(model, small_prices, monkeypatch, broken):
    before = model.config._attn_implementation
    frozen = [p for i, p in enumerate(model.parameters()) if i % 3 == 0]
    for p in frozen:
        p.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    ids = torch.tensor([IDS])
    with torch.no_grad():
        logits = model(ids).logits
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == {"reading": 1, "continuation": 3}.get(broken):
            raise RuntimeError("in the middle")

    hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    if broken == "storing":
        monkeypatch.setattr(small_prices, "compress_blocks", lambda *args, **options: 1 / 0)
    if broken is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            small_prices.measure(model, IDS, 2, 0)
    else:
        with pytest.raises(ZeroDivisionError if broken == "storing" else RuntimeError):
            small_prices.measure(model, IDS, 2, 0)
    hook.remove()
    assert model.config._attn_implementation == before and not model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
