"""Head profiles: files come back as they were or are refused by the field that is wrong; measuring is what it says."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from synthetic import profile_of

from dkv import HeadProfile
from dkv._json import digest
from dkv.profile import MAX_BYTES, shipped_names

SCORES = [[0.5, 0, 1], [0.25, 1 / 3, 1e-9]]
SETTINGS_OF_FILE = {"passages": 2, "distances": [300, 700], "seconds": 0.5}
FIELDS = profile_of(SCORES, text="a book", settings=SETTINGS_OF_FILE).to_dict()


def profile(**changes):
    return HeadProfile(**{**FIELDS, **changes})


def losses(*shape, last=0.5):
    """Nested lists of ``shape`` of 0.5; the last number is ``last``."""
    flat = [0.5] * (int(np.prod(shape)) - 1) + [last]
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]
    return flat


def written(path, **changes):
    """A file with fields changed; those that are None are left out."""
    values = {"format": "dkv-profile", "version": 2, **FIELDS, **changes}
    values = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps({**values, "sha256": digest(values)}))
    return path


def test_a_profile_comes_back_as_it_was(tmp_path):
    made = profile()
    made.save(tmp_path / "p.json")
    assert HeadProfile.load(tmp_path / "p.json") == made
    assert HeadProfile.load(str(tmp_path / "p.json")).scores == ((0.5, 0.0, 1.0), (0.25, 1 / 3, 1e-9))
    assert HeadProfile.from_dict(made.to_dict()) == made == profile(scores=np.array(FIELDS["scores"]))
    assert made.settings["distances"] == (300, 700)
    assert hash(made) == hash(profile()) and made != profile(text="another")
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["format"] == "dkv-profile" and values["version"] == 2
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    profile().save(tmp_path / "p.json")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        profile(text="new").save(tmp_path / "p.json")
    assert HeadProfile.load(tmp_path / "p.json") == profile() and os.listdir(tmp_path) == ["p.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format of .*p.json must be 'dkv-profile'"),
        ({"format": None}, "format of .*p.json must be 'dkv-profile'"),
        ({"version": 1}, "version of .*p.json is 1, this dkv reads 2"),
        ({"version": True}, "version of .*p.json is True, this dkv reads 2"),
        ({"version": None}, "version of .*p.json is None"),
        ({"model": 3}, "p.json: model of a profile must be a string, got 3"),
        ({"text": ["x"]}, "text of a profile must be a string"),
        ({"num_layers": 0}, r"num_layers of a profile must be an int in 1\.\.4096, got 0"),
        ({"num_layers": 3}, "scores of a profile must have num_layers=3 layers, got 2"),
        ({"num_layers": 10**9}, "num_layers of a profile must be"),
        ({"num_kv_heads": "3"}, "num_kv_heads of a profile must be an int in .*, got '3'"),
        ({"num_kv_heads": 2}, "scores of a profile must have num_kv_heads=2 numbers in layer 0, got 3"),
        ({"head_dim": 8.0}, "head_dim of a profile must be an int"),
        ({"head_dim": True}, "head_dim of a profile must be an int"),
        ({"scores": [[0.5, 0, 1]]}, "scores of a profile must have num_layers=2 layers, got 1 layers"),
        ({"scores": 0.5}, "scores of a profile must have num_layers=2 layers, got no list"),
        ({"scores": [[0.5, 0, 1], [0.5, 0]]}, "num_kv_heads=3 numbers in layer 1, got 2"),
        ({"scores": [[0.5, 0, 1], "0.5"]}, "num_kv_heads=3 numbers in layer 1, got no list"),
        ({"scores": [[0.5, 0, 1], [0.5, 0, 1.1]]}, r"numbers in 0\.\.1, got 1\.1 \(layer 1, head 2\)"),
        ({"scores": [[0.5, -1e-9, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got -1e-09 \(layer 0, head 1\)"),
        ({"scores": [[0.5, float("nan"), 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got nan \(layer 0, head 1\)"),
        ({"scores": [[0.5, float("inf"), 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got inf"),
        ({"scores": [[0.5, True, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got True"),
        ({"scores": [[0.5, "0.1", 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got '0\.1'"),
        ({"scores": [[0.5, 10**400, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got 1000"),
        ({"key_options": []}, "must be lists of widths, at least one of each"),
        ({"key_options": 8}, "must be lists of widths, at least one of each"),
        ({"key_options": [8]}, "options of a profile: .*int"),
        ({"key_options": [[8] * 7]}, r"options of a profile: key_bits must be 8 widths of 0\.\.8, never rising, got"),
        ({"key_options": [[2] * 7 + [3]]}, "options of a profile: key_bits must be 8 widths"),
        ({"key_options": [[9] * 8]}, "options of a profile: key_bits must be 8 widths"),
        ({"key_options": [[2.5] * 8]}, "options of a profile: key_bits must be 8 widths"),
        ({"key_options": ["87654321"]}, "options of a profile: key_bits must be 8 widths"),
        ({"value_options": []}, "must be lists of widths, at least one of each"),
        ({"value_options": [4, 9]}, r"options of a profile: value_bits must be 0\.\.8, got 9"),
        ({"value_options": [4, True]}, r"options of a profile: value_bits must be 0\.\.8, got True"),
        ({"value_options": [4, 2.0]}, r"options of a profile: value_bits must be 0\.\.8, got 2\.0"),
        ({"value_options": [None, 2]}, "options of a profile: widths must be numbers, got None"),
        ({"value_options": [4, 2]}, "value_loss of a profile must have 2 entries along an axis of its shape, got 4"),
        ({"key_loss": losses(2, 3, 3)}, "key_loss of a profile must have 4 entries .*, got 3"),
        ({"key_loss": losses(2, 3)}, "key_loss of a profile must have 4 entries .*, got no list"),
        ({"value_loss": losses(3, 3, 4)}, "value_loss of a profile must have 2 entries .*, got 3"),
        ({"value_loss": losses(2, 2, 4)}, "value_loss of a profile must have 3 entries .*, got 2"),
        ({"drop_loss": losses(2, 3, 1)}, r"drop_loss of a profile must hold finite numbers of 0 or more, got \[0\.5\]"),
        ({"drop_loss": losses(2, 3, last=-1e-9)}, "drop_loss of a profile must hold finite numbers .*, got -1e-09"),
        ({"key_loss": losses(2, 3, 4, last=float("nan"))}, "key_loss of a profile must hold finite .*, got nan"),
        ({"value_loss": losses(2, 3, 4, last=float("inf"))}, "value_loss of a profile must hold finite .*, got inf"),
        ({"drop_loss": losses(2, 3, last=10**400)}, "drop_loss of a profile must hold finite .*, got 1000"),
        ({"drop_loss": losses(2, 3, last="1")}, "drop_loss of a profile must hold finite .*, got '1'"),
        ({"drop_loss": losses(2, 3, last=False)}, "drop_loss of a profile must hold finite .*, got False"),
        ({"channel_weight": losses(2, 3, 7)}, "channel_weight of a profile must have 8 entries .*, got 7"),
        ({"channel_weight": losses(2, 3, 8, last=-1)}, "channel_weight of a profile must hold finite .*, got -1"),
        ({"key_loss": None, "drop_loss": None}, r"fields of a profile: missing \['drop_loss', 'key_loss'\]"),
        ({"settings": [1]}, r"settings of a profile must be a mapping, got \[1\]"),
        ({"settings": {"a": "b"}}, "settings of a profile must be named finite numbers, got 'a': 'b'"),
        ({"settings": {"a": [1, float("nan")]}}, "settings of a profile must be named finite numbers, got 'a'"),
        ({"settings": None}, r"fields of a profile: missing \['settings'\]"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        HeadProfile.load(written(tmp_path / "p.json", **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    profile().save(tmp_path / "whole.json")
    data = (tmp_path / "whole.json").read_bytes()
    for length in range(len(data) - 2):  # without its last line break it is whole
        (tmp_path / "cut.json").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut.json is not a whole profile"):
            HeadProfile.load(tmp_path / "cut.json")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000, b"[1]", b"3", b"null", b'{"a": 1} {}'])
def test_files_that_are_no_profile(tmp_path, data):
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(ValueError, match="p.json (is not a whole profile|must be 'dkv-profile')"):
        HeadProfile.load(tmp_path / "p.json")


def test_a_file_too_large_is_refused_before_it_is_read_whole(tmp_path):
    with open(tmp_path / "p.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match=r"p.json is larger than a profile can be \(16,777,216 bytes\)"):
        HeadProfile.load(tmp_path / "p.json")
    with pytest.raises(FileNotFoundError, match="no such file: .*none.json"):
        HeadProfile.load(tmp_path / "none.json")


def test_a_model_of_another_shape_is_refused():
    made = profile()
    made.check_model(2, 3, 8)
    for shape, message in (
        ((24, 3, 8), "profile is of a model with 2 layers, this one has 24"),
        ((2, 8, 8), "profile is of a model with 3 kv heads, this one has 8"),
        ((2, 3, 64), "profile is of a model with head dim 8, this one has 64"),
    ):
        with pytest.raises(ValueError, match=message):
            made.check_model(*shape)


def test_an_unknown_shipped_profile_names_those_that_ship():
    with pytest.raises(ValueError, match="no profile ships for 'nope'; there are: .*" + ", ".join(shipped_names())):
        HeadProfile.shipped("nope")
    with pytest.raises(ValueError, match="no profile ships for"):
        HeadProfile.shipped("../profile")


# measuring

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dkv import DKVConfig  # noqa: E402
from dkv.integrations.transformers import NAME, DKVCache, attach, detach  # noqa: E402
from dkv.profile import shipped_text  # noqa: E402
from dkv.profiling import copy_mass, measure_profile  # noqa: E402

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**SHAPE)),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        lambda: transformers.Gemma2Config(
            **SHAPE, sliding_window=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
        ),
    ),
}
SETTINGS = {"passages": 2, "passage_tokens": 60, "repeat_tokens": 20, "distances": (30, 60), "blocks": 2, "samples": 2}
PRICED = 8 + 2 * 16 + 16 + 24  # tokens of a passage that prices: the longer of the two
TEXT = "".join(chr(32 + (i * i * 7 + i // 3) % 90) for i in range(200))


@pytest.fixture(autouse=True)
def _small(small_prices):
    pass


class Bytes:
    """A tokenizer of one token per byte."""

    def __init__(self, bos=None):
        self.bos_token_id = bos

    def __call__(self, text, add_special_tokens=True, verbose=True):
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return type("Encoding", (), {"input_ids": start + list(text.encode())})


def tiny(kind):
    make, config = MODELS[kind]
    torch.manual_seed(0)
    return make(config()).eval()


@pytest.fixture(params=sorted(MODELS))
def model(request):
    return tiny(request.param)


@pytest.mark.parametrize("bos", [None, 1])
def test_a_score_is_what_the_models_own_weights_say(model, bos):
    made = measure_profile(model, Bytes(bos), TEXT, name="tiny", text_name="bytes", **SETTINGS)
    opening = [] if bos is None else [bos]
    ids = list(TEXT.encode())
    model.set_attn_implementation("eager")
    expected = np.zeros((4, 2))
    for first in (0, len(ids) - PRICED):
        for distance in (30, 60):
            passage = ids[first : first + 60]
            whole = opening + passage + passage[60 - distance : 80 - distance]
            with torch.no_grad():
                weights = model(torch.tensor([whole]), output_attentions=True).attentions
            copy = slice(len(opening) + 60 - distance, len(opening) + 80 - distance)
            for layer, weight in enumerate(weights):
                mass = weight[0, :, -20:, copy].sum(-1).mean(-1).view(2, 3)  # [Hkv, G]
                expected[layer] += mass.max(1).values.numpy() / 4
    sliding = [
        kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or ["full_attention"] * 4
    ]
    assert sum(sliding) in (0, 2)
    expected[sliding] = 0
    np.testing.assert_allclose(np.array(made.scores), expected, atol=2e-6)
    assert (np.array(made.scores)[[not each for each in sliding]] > 0.01).all()
    assert (made.model, made.text, made.num_layers, made.num_kv_heads, made.head_dim) == ("tiny", "bytes", 4, 2, 8)
    assert made.settings == {**SETTINGS, "seed": 0, "text_tokens": 200}
    for name in ("key_loss", "value_loss", "drop_loss", "channel_weight"):
        numbers = np.array(getattr(made, name))
        assert (numbers[sliding] == 0).all() and (numbers[[not each for each in sliding]] > 0).all(), name
        assert all(float(f"{x:.4g}") == x for x in numbers.ravel())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_copy_mass_of_a_dense_softmax(softcap, sunk):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((6, 5, 8)).astype(np.float32), rng.standard_normal((2, 30, 8)).astype(np.float32)
    sink = rng.standard_normal(6).astype(np.float32)
    got = copy_mass(
        torch.tensor(q), torch.tensor(k), slice(4, 9), 0.7, softcap, torch.tensor(sink) if sunk else None
    ).numpy()
    logits = np.einsum("hqd,hkd->hqk", q, np.repeat(k, 3, axis=0)).astype(float) * 0.7
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    weight = np.where(np.arange(30) <= 25 + np.arange(5)[:, None], np.exp(logits), 0)
    total = weight.sum(-1) + (np.exp(sink.astype(float))[:, None] if sunk else 0)
    mass = (weight[:, :, 4:9].sum(-1) / total).mean(-1)
    np.testing.assert_allclose(got, mass.reshape(2, 3).max(1), atol=1e-6)


def test_a_head_that_copies_scores_above_all_others():
    """Keys say which token stands before them: queries of that token find the row after its earlier copy."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(60, 16, generator=generator)
    tokens = torch.cat([tokens, tokens[20:40]])
    before = torch.cat([torch.zeros(1, 16), tokens[:-1]])
    k = torch.stack([before, torch.randn(80, 16, generator=generator)])
    q = torch.stack([tokens[60:], tokens[60:]])
    scores = copy_mass(q, k, slice(20, 40), 1.0)
    assert scores[0] > 0.8 and scores[1] < 0.5


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_measuring_is_deterministic_and_leaves_the_model_as_it_was(model):
    before = model.config._attn_implementation
    ids = torch.arange(50)[None]
    logits = model(ids).logits
    made = [measure_profile(model, Bytes(), TEXT, **SETTINGS) for _ in range(2)]
    other = measure_profile(model, Bytes(), TEXT, seed=1, **SETTINGS)
    assert other.scores == made[0].scores and other.channel_weight == made[0].channel_weight
    assert other.key_loss != made[0].key_loss and other.drop_loss != made[0].drop_loss
    assert made[0] == made[1] and made[0].model == type(model).__name__
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, logits)
    config = DKVConfig(block_size=16, window=16, sink_tokens=4)
    attach(model, config)
    assert measure_profile(model, Bytes(), TEXT, **SETTINGS) == made[0]
    assert model.config._attn_implementation == NAME
    cache = DKVCache(model)
    model(ids, past_key_values=cache)
    assert cache.dkv_layers[0].block_counts == [1]
    detach(model)
    assert model.config._attn_implementation == before


def test_an_error_in_the_middle_leaves_the_model_as_it_was(model):
    before = model.config._attn_implementation

    def fail(*args):
        raise RuntimeError("in the middle")

    hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        measure_profile(model, Bytes(), TEXT, **SETTINGS)
    assert model.config._attn_implementation == before
    hook.remove()
    model.set_attn_implementation("eager")
    measure_profile(model, Bytes(), TEXT, **SETTINGS)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text": "short"}, ValueError, "text has 5 tokens, 160 are needed: 2 passages of 80"),
        (
            {"passage_tokens": 90, "distances": (30, 90), "text": TEXT[:179]},
            ValueError,
            "180 are needed: 2 passages of 90",
        ),
        ({"blocks": 0}, ValueError, "blocks must be 1 or more, got 0"),
        ({"samples": True}, TypeError, "samples must be an int, got True"),
        ({"blocks": 29}, ValueError, "blocks=29 take 512 tokens, they must be below 512, the model's context"),
        ({"passages": 0}, ValueError, "passages must be 1 or more, got 0"),
        ({"repeat_tokens": 2.0}, TypeError, r"repeat_tokens must be an int, got 2\.0"),
        ({"distances": ()}, ValueError, r"distances must be 20\.\.60 tokens, got \[\]"),
        ({"distances": (30, 19)}, ValueError, r"distances must be 20\.\.60 tokens, got \[30, 19\]"),
        ({"distances": (61,)}, ValueError, r"distances must be 20\.\.60 tokens, got \[61\]"),
        ({"passage_tokens": 492}, ValueError, "passage_tokens .* must be below 512, the model's context"),
        ({"model": "llama"}, TypeError, "model must be a transformers PreTrainedModel, got str"),
    ],
)
def test_what_cannot_be_measured(changes, error, message):
    arguments = {"model": tiny("llama"), "tokenizer": Bytes(), "text": TEXT, **SETTINGS, **changes}
    with pytest.raises(error, match=message):
        measure_profile(**arguments)


def test_attention_that_is_not_finite_is_refused():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="attention is not finite"):
        measure_profile(model, Bytes(), TEXT, **SETTINGS)


def test_the_shipped_text_is_measured_where_none_is_given():
    text = shipped_text()
    assert text.startswith("CHAPTER I\n") and 55_000 < len(text) < 65_000 and text.isascii()
    made = measure_profile(tiny("llama"), Bytes(), **SETTINGS)
    assert made.text.startswith("Alice's Adventures in Wonderland") and made.settings["text_tokens"] == len(text)


def test_shipped_profiles_are_whole():
    assert "smollm2-135m" in shipped_names()
    for name in shipped_names():
        made = HeadProfile.shipped(name)
        assert made.model == name and max(map(max, made.scores)) > 0.3
    made = HeadProfile.shipped("smollm2-135m")
    made.check_model(30, 3, 64)
