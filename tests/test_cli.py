"""The command line: what it prints, what it writes, and that bad input gets one line and exit code 2."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from synthetic import profile_of

pytest.importorskip("typer")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import dkv  # noqa: E402
from dkv.benches import decode, demo, needle, recall  # noqa: E402
from dkv.benches.results import read_rows  # noqa: E402
from dkv.cli import main  # noqa: E402
from dkv.config import PRESETS  # noqa: E402


@pytest.fixture
def halves(monkeypatch):
    """A preset with tiers: half of the heads keep every row, the others two."""
    tiers = (dkv.HeadTier(0.5, num_residuals=255), dkv.HeadTier(0.5, routed=False, rank=4, num_residuals=2))
    monkeypatch.setitem(PRESETS, "halves", {"tiers": tiers, "window": 64, "block_size": 64})


def _lines(text):
    return [line for line in text.splitlines() if line.strip()]


def drawn(folder):
    """Options that draw a picture where matplotlib is there to do it."""
    return ["--plot", str(folder / "plot.svg")] if importlib.util.find_spec("matplotlib") else []


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--rank", "-1"], "rank must be 0..128, got -1"),
        (["demo", "--block-size", "0"], "block_size must be 2..256, got 0"),
        (["demo", "--top-k", "0"], "top_k must be 1 or more"),
        (["demo", "--window", "0"], "window must be 1 or more"),
        (["demo", "--tokens", "0"], "--tokens must be 1 or more"),
        (["demo", "--tokens", "many"], "'--tokens'"),
        (["demo", "--model", "nope"], "unknown model 'nope'"),
        (["demo", "--model", "./nope"], "no such model file or folder: ./nope"),
        (["demo", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16"),
        (["demo", "--json", "no/such/folder/x.json"], "cannot write no/such/folder/x.json"),
        (["demo", "--nope"], "--nope"),
        (["demo", "stray"], "stray"),
        (["nope"], "nope"),
        (["generate"], "either --prompt or --prompt-file"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "either --prompt or --prompt-file"),
        (["generate", "--prompt-file", "no-such-file"], "cannot read no-such-file: No such file"),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be 1 or more"),
        (["generate", "--prompt", "a", "--block-size", "257"], "block_size must be 2..256"),
        (["recall", "--contexts", "1024,x"], "--contexts must be integers"),
        (["recall", "--contexts", "0"], "--contexts must be 1 or more"),
        (["recall", "--trials", "0"], "--trials must be 1 or more"),
        (["bench", "decode", "--contexts", "256"], "--contexts must be 1,536 or more"),
        (["bench", "decode", "--dtype", "int8"], "--dtype must be one of"),
        (["bench", "memory", "--json", "."], "cannot write ."),
        (["bench", "nope"], "nope"),
        (
            ["generate", "--prompt", "a", "--preset", "nope"],
            "unknown preset 'nope'; there are: default, quality, balanced, small, paper",
        ),
        (["generate", "--prompt", "a", "--profile", "nope"], "no such file: nope; those that ship are:"),
        (["generate", "--prompt", "a", "--profile", __file__], "test_cli.py is not a whole profile"),
        (["recall", "--profile", "smollm2-135m"], "--profile needs --preset"),
        (["recall", "--preset", "nope"], "unknown preset 'nope'"),
        (["profile"], "model"),
        (["profile", "smollm2-135m"], "--output"),
        (["profile", "nope", "-o", "x.json"], "unknown model 'nope'"),
        (["profile", "nope", "-o", "no/such/folder/x.json"], "cannot write no/such/folder/x.json"),
        (["profile", "nope", "-o", "x.json", "--text", "no-such-file"], "cannot read no-such-file"),
        (["profile", "nope", "-o", "x.json", "--passages", "0"], "--passages must be 1 or more"),
        (["profile", "nope", "-o", "x.json", "--distances", "300,x"], "--distances must be integers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and printed.err.startswith("dkv: ")
    assert message in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--tokens", "4090"], "more than the model's context of 4096 tokens"),
        (["demo", "--tokens", "30"], "--tokens: the buried passcode alone takes"),
        (["recall", "--contexts", "1024,5000"], "more than the model's context of 4096 tokens"),
        (["recall", "--contexts", "30"], "--contexts: the buried passcode alone takes"),
        (["generate", "--prompt", "x" * 4090], "more than the model's context of 4096 tokens"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "a", "--chat"], "no chat template"),
        (["generate", "--prompt", "a", "--device", "nonsense"], "cannot use device 'nonsense'"),
        (
            ["generate", "--prompt", "a", "--preset", "halves", "--profile", "smollm2-135m"],
            "--profile: profile is of a model with 30 layers, this one has 2",
        ),
        (
            ["recall", "--contexts", "800", "--preset", "halves", "--profile", "smollm2-135m"],
            "--profile: profile is of a model with 30 layers, this one has 2",
        ),
        (["generate", "--prompt", "a", "--preset", "halves"], "preset 'halves' needs --profile; `dkv profile MODEL"),
    ],
)
def test_input_that_does_not_fit_the_model(arguments, message, tiny, halves, capsys):
    assert main([*arguments, "--model", tiny]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_a_prompt_file_that_is_not_text(tmp_path, capsys):
    (tmp_path / "data").write_bytes(b"\xff\xfe\x00")
    assert main(["generate", "--prompt-file", str(tmp_path / "data")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["typer", "rich", "transformers", "torch"])
def test_a_missing_package_names_the_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from dkv.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert missing in done.stderr and 'pip install "dkv[demo]"' in done.stderr


# What works


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dkv {dkv.__version__}\n"


def test_info(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for name, reason in dkv.available_backends().items():
        (line,) = [line for line in _lines(text) if line.split()[0] == name]
        assert ("ready" in line) == (reason is None)
    assert main(["info", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"] == dkv.available_backends()
    if facts["backends"]["mlx"] is None:
        assert facts["mlx_runs"] in ("mlx-metal", "mlx-twin") and facts["backends"][facts["mlx_runs"]] is None
        (line,) = [line for line in _lines(text) if line.split()[0] == "mlx"]
        assert line.rstrip().endswith(f"runs {facts['mlx_runs']}")
    assert facts["packages"]["numpy"] == np.__version__


def test_bench_memory(tmp_path, capsys):
    file = tmp_path / "memory.json"
    assert main(["bench", "memory", "--json", str(file)]) == 0
    rows = read_rows(file)
    assert all(set(row) == {"model", "layout", "bytes_per_block_layer", "dense_bytes", "ratio"} for row in rows)
    found = {(row["model"], row["layout"]): row for row in rows}
    qwen = {layout: row for (model, layout), row in found.items() if model == "Qwen2.5-1.5B"}
    assert qwen["published R=128"]["bytes_per_block_layer"] == 182_216
    assert qwen["published R=64"]["bytes_per_block_layer"] == 116_680
    assert (round(qwen["published R=128"]["ratio"], 2), round(qwen["published R=64"]["ratio"], 2)) == (1.44, 2.25)
    assert qwen["compact R=64"]["bytes_per_block_layer"] <= 45_000
    assert qwen["compact R=64"]["ratio"] >= 5.8
    assert qwen["default"]["ratio"] >= 2.85
    for (model, _), row in found.items():
        heads, dim = {"Qwen2.5-1.5B": (2, 128), "Llama-3.2-3B": (8, 128), "SmolLM2-135M": (3, 64)}[model]
        assert row["dense_bytes"] == 2 * 256 * heads * dim * 2
        assert row["ratio"] == pytest.approx(row["dense_bytes"] / row["bytes_per_block_layer"], abs=1e-3)
    assert "182,216" in capsys.readouterr().out


def test_bench_decode(tmp_path, capsys):
    file = tmp_path / "decode.json"
    assert (
        main(["bench", "decode", "--contexts", "1600,6000", "--repeats", "1", "--json", str(file), *drawn(tmp_path)])
        == 0
    )
    rows = read_rows(file)
    assert [row["context"] for row in rows] == [1600, 6000]
    for row in rows:
        assert {"op", "context", "dtype", "ms", "dense_ms", "sdpa_ms", "ratio"} <= set(row)
        assert min(row["ms"], row["dense_ms"], row["sdpa_ms"]) > 0
    assert "6,000" in capsys.readouterr().out
    if drawn(tmp_path):
        picture = (tmp_path / "plot.svg").read_text()
        assert all(f"<!-- {text} -->" in picture for text in ("DKV", "best dense", "SDPA", "6,000"))


def test_the_dense_baseline_is_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 8, generator=generator) for heads, rows in ((6, 1), (2, 33), (2, 33)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(decode.dense_attention(q, k, v), expected, atol=1e-6, rtol=1e-5)


def test_demo(tiny, tmp_path, capsys):
    file = tmp_path / "demo.json"
    options = ["--tokens", "1500", "--window", "64", "--block-size", "64", "--rank", "4", "--dtype", "float32"]
    assert main(["demo", "--model", tiny, *options, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for label in ("answer", "right?", "KV cache", "ratio", "peak memory", "prefill", "decode"):
        assert label in text
    assert "this run says nothing about" in " ".join(text.split())  # random weights know no passcode
    result = json.loads(file.read_text())
    dense, every, routed = result["rows"]
    assert (dense["variant"], every["variant"], routed["variant"]) == ("dense", "DKV, all blocks", "DKV, top 4 blocks")
    assert dense["kv_bytes"] == 2 * 2 * 2 * 8 * 4 * 1500  # K and V, layers, heads, dims, bytes, tokens
    assert every["kv_bytes"] == routed["kv_bytes"] < dense["kv_bytes"]
    assert every["ratio"] == pytest.approx(dense["kv_bytes"] / every["kv_bytes"], abs=1e-3)
    assert every["compressed_ratio"] > every["ratio"] > 1
    assert len(result["code"]) == 5


def test_demo_without_routing(tiny, tmp_path):
    file = tmp_path / "demo.json"
    options = ["--tokens", "700", "--window", "64", "--block-size", "64", "--no-route", "--seed", "3"]
    assert main(["demo", "--model", tiny, *options, "--json", str(file)]) == 0
    assert len(read_rows(file)) == 2


def _row(variant, right, ratio=2.0, part=2.8):
    return demo.Row(variant, "x", right, int(1e8 / ratio), ratio, part, 0, "", 1.0, 1.0)


def test_the_demo_says_what_happened():
    dense, good, bad = _row("dense", True, 1.0, None), _row("DKV, all blocks", True), _row("DKV, top 4 blocks", False)
    assert "still knew the passcode 12345: 50.0 MB instead of 100.0 MB, 2.0 times smaller" in demo.sentence(
        [dense, good], "12345"
    )
    lost = demo.sentence([dense, good, bad], "12345")
    assert lost.startswith("WRONG") and "DKV, top 4 blocks lost it" in lost
    assert "all blocks lost" not in lost
    assert "says nothing about compression" in demo.sentence([dataclasses.replace(dense, right=False), bad], "12345")
    assert "no smaller" in demo.sentence([dense, _row("DKV, all blocks", True, 0.9)], "12345")
    assert "Nothing was compressed" in demo.sentence([dense, _row("DKV, all blocks", True, 0.9, None)], "12345")


def test_recall(tiny, tmp_path, capsys):
    file = tmp_path / "recall.json"
    options = ["--contexts", "800,1100", "--trials", "2", "--json", str(file)]
    assert main(["recall", "--model", tiny, *options]) == 0
    rows = read_rows(file)
    assert [(row["context"], row["variant"]) for row in rows] == [
        (context, variant) for context in (800, 1100) for variant in ("dense", "paper R=128", "paper R=64", "default")
    ]
    for row in rows:
        assert set(row) == {"context", "variant", "right", "trials", "ratio", "whole_cache_ratio", "answers"}
        assert 0 <= row["right"] <= row["trials"] == 2
        assert (row["ratio"] == 1) == (row["variant"] == "dense")
    assert "of 2" in capsys.readouterr().out


def test_recall_at_full_precision_answers_as_dense_does(tiny):
    from dkv import models

    model, tokenizer = models.load(tiny)
    before = model.config._attn_implementation
    hay = needle.bury(tokenizer, 900, seed=1)
    plain = needle.dense_cache(model)
    needle.feed(model, hay.ids, plain)
    expected = needle.ask(model, tokenizer, plain, hay.code)
    exact = dkv.DKVConfig(format="fp32", rank=8, block_size=64)
    rows = recall.run(model, tokenizer, [900], 1, variants={"exact": exact})
    assert [row["variant"] for row in rows] == ["dense", "exact"]
    assert model.config._attn_implementation == before
    from dkv.integrations.transformers import DKVCache, attach

    attach(model, dataclasses.replace(exact, window=64))
    cache = DKVCache(model)
    needle.feed(model, hay.ids, cache, chunk=100)
    assert cache.compressed_nbytes > 0
    assert needle.ask(model, tokenizer, cache, hay.code).text == expected.text


def test_generate_matches_transformers(tiny, capsys):
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(whole[0, ids.shape[1] :])
    capsys.readouterr()
    for extra in (["--dense"], []):  # the window holds the prompt: DKV is exact here
        assert main(["generate", "--model", tiny, "--prompt", prompt, "--max-new-tokens", "20", *extra]) == 0
        printed = capsys.readouterr()
        assert printed.out.rstrip("\n") == expected.rstrip("\n\ufffd")
        assert f"{ids.shape[1] + 20:,} tokens" in printed.err and "KV cache" in printed.err


def test_generate_reads_a_file_and_compresses(tiny, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("abc " * 400, encoding="utf-8")
    options = ["--prompt-file", str(file), "--max-new-tokens", "4", "--window", "64", "--block-size", "64"]
    assert main(["generate", "--model", tiny, *options]) == 0
    line = capsys.readouterr().err.strip()
    assert "where dense takes" in line
    assert float(line.rpartition("(")[2].rstrip("x)")) > 1


PROFILE_OPTIONS = ["--passages", "1", "--passage-tokens", "200", "--repeat-tokens", "50", "--distances", "60,150"]


def test_profile_writes_what_it_measured(tiny, small_prices, tmp_path, capsys):
    text, file, again = tmp_path / "book.txt", tmp_path / "p.json", tmp_path / "again.json"
    text.write_text("The quick brown fox jumps over the lazy dog, and again. " * 5, encoding="utf-8")
    assert main(["profile", tiny, "-o", str(file), "--text", str(text), *PROFILE_OPTIONS]) == 0
    printed = capsys.readouterr().out
    made = dkv.HeadProfile.load(file)
    best = max((score, layer, head) for layer, row in enumerate(made.scores) for head, score in enumerate(row))
    rows = [re.sub(r"[^\w.]", " ", line).split() for line in _lines(printed)]
    assert [str(best[1]), str(best[2]), f"{best[0]:.3f}"] in rows
    assert "scores of 4 kv heads (2 layers), measured in" in " ".join(printed.split())
    assert (made.model, made.text) == (os.path.basename(tiny), "book.txt")
    assert tiny not in file.read_text() and str(tmp_path) not in file.read_text()
    made.check_model(2, 2, 8)
    assert main(["profile", tiny, "-o", str(again), "--text", str(text), *PROFILE_OPTIONS, "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(again) and facts["seconds"] > 0
    assert dkv.HeadProfile.from_dict(facts["profile"]) == made == dkv.HeadProfile.load(again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--passage-tokens", "4000"], "passage_tokens + repeat_tokens must be below 4096"),
        (["--distances", "100"], "distances must be 200..1400 tokens, got [100]"),
        (["--text", "{}"], "text has 5 tokens, 5376 are needed: 2 passages of 2688"),
    ],
)
def test_what_cannot_be_profiled(tiny, tmp_path, capsys, options, message):
    (tmp_path / "short.txt").write_text("short")
    options = [str(tmp_path / "short.txt") if option == "{}" else option for option in options]
    assert main(["profile", tiny, "-o", str(tmp_path / "p.json"), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and message in printed.err
    assert not (tmp_path / "p.json").exists()


def test_presets_and_profiles_reach_the_cache(tiny, halves, tmp_path, capsys):
    profile, prompt = tmp_path / "p.json", tmp_path / "prompt.txt"
    profile_of([[0.1, 0.9], [0.8, 0.2]]).save(profile)
    prompt.write_text("abc " * 400, encoding="utf-8")
    options = ["generate", "--model", tiny, "--prompt-file", str(prompt), "--max-new-tokens", "4"]
    sizes = {}
    for name, extra in {
        "plain": ["--window", "64", "--block-size", "64"],
        "halves": ["--preset", "halves", "--profile", str(profile)],
        "wide": ["--preset", "halves", "--profile", str(profile), "--window", "512"],
        "idle": ["--window", "64", "--block-size", "64", "--profile", str(profile)],
        "paper": ["--preset", "paper", "--window", "64", "--block-size", "64", "--dtype", "bfloat16"],
    }.items():
        assert main([*options, *extra]) == 0
        lines = _lines(capsys.readouterr().err)
        assert ("preset 'default' treats all heads alike: --profile changes nothing" in lines) == (name == "idle")
        sizes[name] = float(lines[-1].rpartition("(")[2].rstrip("x)"))
    assert sizes["plain"] == sizes["idle"]
    assert sizes["halves"] > 1.1 * sizes["plain"] and sizes["halves"] > sizes["wide"]


def test_recall_of_a_preset(tiny, halves, tmp_path):
    profile, file = tmp_path / "p.json", tmp_path / "recall.json"
    profile_of([[0.1, 0.9], [0.8, 0.2]]).save(profile)
    options = ["--contexts", "1100", "--trials", "1", "--preset", "halves", "--profile", str(profile)]
    assert main(["recall", "--model", tiny, *options, "--json", str(file)]) == 0
    rows = {row["variant"]: row for row in read_rows(file)}
    assert list(rows) == ["dense", "paper R=128", "paper R=64", "default", "preset halves"]
    assert rows["preset halves"]["ratio"] > 1.1 * rows["default"]["ratio"]


# The haystack


def test_the_passcode_is_where_it_says(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    seen = set()
    for seed in range(6):
        hay = needle.bury(tokenizer, 1500, seed, first=256, last=300)
        assert len(hay.ids) == 1500
        sentence = f"The magic number of Paris is {hay.code}."
        text = f"\n\n{sentence} {sentence}\n\n"
        assert tokenizer.decode(hay.ids[hay.position : hay.position + len(text)]) == text
        assert hay.position >= 256 and hay.position + len(text) <= 1200
        assert needle.bury(tokenizer, 1500, seed, first=256, last=300) == hay
        seen.add((hay.code, hay.position))
    assert len(seen) == 6


def test_a_text_longer_than_the_prose_is_repeated(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    wanted = len(needle.prose().encode()) + 5000
    assert len(needle.bury(tokenizer, wanted, seed=0).ids) == wanted


def test_a_closed_pipe_is_no_error():
    code = "import sys; from dkv.cli import main; sys.exit(main(['bench', 'memory']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
