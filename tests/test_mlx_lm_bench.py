"""``dkv bench mlx`` end to end on a tiny model, its refusals, and known models written for mlx-lm."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")
pytest.importorskip("typer")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mlx.nn as nn  # noqa: E402

from dkv import models  # noqa: E402
from dkv.benches import mlx_model  # noqa: E402
from dkv.cli import main  # noqa: E402

SHORT = ["--contexts", "300,420", "--block-size", "64", "--window", "32", "--sink-tokens", "16", "--chunk", "100"]
SHORT += ["--decode-tokens", "3"]
ENGINES = ["mlx-lm dense", "mlx-lm DKV", "torch dense", "torch DKV"]


def test_bench_mlx_beside_torch(tiny, tmp_path, capsys):
    file = tmp_path / "mlx.json"
    drawn = ["--plot", str(tmp_path / "mlx.svg")] if importlib.util.find_spec("matplotlib") else []
    beside = ["--torch-model", tiny, "--torch-dtype", "float32", "--torch-device", "cpu"]
    assert main(["bench", "mlx", "--model", tiny, *SHORT, *beside, "--top-k", "2", "--json", str(file), *drawn]) == 0
    printed = capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert kept["command"].startswith("dkv bench mlx") and "mlx" in kept["versions"]
    assert not drawn or all((tmp_path / "mlx.svg").read_text().count(f"<!-- {engine} -->") == 3 for engine in ENGINES)
    assert [(row["context"], row["engine"]) for row in kept["rows"]] == [(c, e) for c in (300, 420) for e in ENGINES]
    for row in kept["rows"]:
        assert row["engine"] in printed and f"{row['context']:,}" in printed
        assert (
            row["prefill_seconds"] > 0 and row["decode_tokens_per_second"] > 0 and row["peak_bytes"] > row["kv_bytes"]
        )
        assert row["trials"] == len(row["answers"]) == 1 and row["right"] in (0, 1)
        if row["engine"].endswith("dense"):
            assert row["ratio"] == 1
    sizes = {(row["context"], row["engine"]): row["kv_bytes"] for row in kept["rows"]}
    for context in (300, 420):
        assert sizes[context, "mlx-lm DKV"] < sizes[context, "mlx-lm dense"]
        assert sizes[context, "mlx-lm DKV"] == sizes[context, "torch DKV"]
    assert kept["config"]["top_k"] == 2 and kept["config"]["block_size"] == 64
    assert "keeps the first 16 and the newest 32 to 95 tokens exact" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nope"], "unknown model 'nope': give a known name (smollm2-135m), a folder or a hub id"),
        (["--model", "./nope"], "unknown model './nope'"),
        (["--contexts", "30"], "--contexts: the buried passcode alone takes"),
        (["--contexts", "4090"], "are more than the model's context of 4096 tokens"),
        (["--contexts", "x"], "--contexts must be integers"),
        (["--trials", "0"], "--trials must be 1 or more"),
        (["--chunk", "0"], "--chunk must be 1 or more"),
        (["--decode-tokens", "1"], "--decode-tokens must be 2 or more"),
        (["--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16"),
        (["--torch-dtype", "int8"], "--dtype must be one of"),
        (["--window", "0"], "window must be 1 or more"),
        (["--json", "no/such/folder/x.json"], "cannot write no/such/folder/x.json"),
        (["--preset", "small"], "preset 'small' needs --profile"),
        (["--preset", "small", "--profile", "smollm2-135m"], "these settings do not fit"),
        (["--contexts", "300", "--torch-model", "nope"], "unknown model 'nope'"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tiny, capsys):
    given = [] if "--model" in arguments else ["--model", tiny]
    assert main(["bench", "mlx", *given, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_help_and_a_missing_package(capsys, monkeypatch):
    assert main(["bench", "mlx", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: dkv bench mlx")
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert main(["bench", "mlx"]) == 2
    assert 'pip install "dkv[cli,mlx-lm]"' in capsys.readouterr().err


def test_a_folder_that_mlx_lm_cannot_load(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["bench", "mlx", "--model", str(tmp_path)]) == 2
    assert "mlx-lm cannot load" in capsys.readouterr().err


@pytest.fixture
def known(tiny, tmp_path, monkeypatch):
    """A known model of a base for RoPE that is not the usual one, wide enough to be quantised."""
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = transformers.LlamaConfig(**shape, **heads, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    folder = tmp_path / "made"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    spec = models.MODELS["smollm2-135m"]
    monkeypatch.setitem(models.MODELS, "wide", spec)
    monkeypatch.setattr(models, "transformers_folder", lambda name, cache_dir, progress: folder)
    return folder


def nll(model, tokenizer):
    ids = mx.array([tokenizer(models.GUARD_PASSAGE).input_ids])
    return float(nn.losses.cross_entropy(model(ids)[:, :-1].astype(mx.float32), ids[:, 1:]).mean())


def test_a_known_model_computes_what_torch_does(known, capsys):
    """mlx-lm does not read transformers 5's rope_parameters: the base of RoPE would be another."""
    plain = mlx_model.converted("wide", bits=None, progress=False)
    expected = models.passage_nll(*models.load(str(known)))
    model, tokenizer, _ = mlx_model.load(str(plain))
    assert abs(nll(model, tokenizer) - expected) < 2e-3
    other, tokenizer, _ = mlx_model.load(str(known))
    assert abs(nll(other, tokenizer) - expected) > 0.05  # what happens without that
    model, tokenizer, config = mlx_model.load("wide")
    assert config["quantization"]["bits"] == 4 and config["quantization"]["group_size"] == 64
    assert abs(nll(model, tokenizer) - expected) < 1
    assert mlx_model.converted("wide", progress=False).parent == known.parent
    assert not list(known.parent.glob(".*")) and capsys.readouterr().out == ""
