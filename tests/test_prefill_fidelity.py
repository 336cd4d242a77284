"""Block-sparse prefill through a model: what the bench counts and divides, and the commands around it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import dkv  # noqa: E402
from dkv.benches import fidelity, needle, prefill_fidelity  # noqa: E402
from dkv.benches.results import read_rows  # noqa: E402
from dkv.config import EVERY_POSITION  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

TOKENS = fidelity.SHORTEST
LIMITS = {"prefill_window": 64, "prefill_block": 64, "prefill_key_block": 32, "prefill_tail": 0}
VARIANTS = {
    "all": dkv.DKVConfig(prefill_mass=1.0, prefill_tail=0),
    "window": dkv.DKVConfig(prefill_top_k=1, **LIMITS),
    "half": dkv.DKVConfig(prefill_ratio=0.5, **LIMITS),
}


@pytest.fixture(scope="module")
def loud(tiny: Any) -> Any:
    """The tiny model with weights so large that what is far back matters, and its tokenizer."""
    from dkv import models

    model, tokenizer = models.load(tiny)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(20 if "q_proj" in name or "k_proj" in name else 10)
    return model, tokenizer


def test_the_bench_on_a_tiny_model(loud: Any) -> None:
    before = loud[0].config._attn_implementation
    rows = prefill_fidelity.run(*loud, TOKENS, [0], trials=1, variants=VARIANTS)
    assert loud[0].config._attn_implementation == before
    every, window, half = rows
    assert [row["name"] for row in rows] == list(VARIANTS) and all(row["tokens"] == TOKENS for row in rows)
    assert every["visited"] == 1 and max(abs(every[name]) for name in ("std_kl", "copy_kl", "end_std_kl")) < 1e-4
    assert every["std_top1"] == every["end_copy_top1"] == 1
    # 20 query blocks of 64, two key blocks each: the first, two of the window, two of its own
    assert window["visited"] == pytest.approx(sum(min(5, 2 * t + 2) for t in range(20)) / (20 * 21), abs=1e-4)
    assert window["visited"] < half["visited"] < 0.6
    assert min(window["std_kl"], half["std_kl"], window["end_std_kl"]) > 1e-4
    assert all(row["std_kl_spread"] is None and row["n"] in (0, 1) for row in rows)


def test_chunks_over_a_cache_that_compresses(loud: Any) -> None:
    """A model reads a text in chunks, its past compressed: what all heads attend is what dense attention attends."""
    model, tokenizer = loud
    ids = needle.encode(tokenizer, needle.prose())[:700]
    small = {"block_size": 32, "window": 64, "sink_tokens": 32, "rank": 8, "num_residuals": 31, "format": "fp32"}
    logits = {}
    for name, limits in {
        "dense": {"prefill_dense_below": EVERY_POSITION},
        "all": {"prefill_dense_below": 0, "prefill_mass": 1.0},
        "some": {"prefill_dense_below": 200, "prefill_tail": 0, "prefill_top_k": 5, "prefill_window": 32},
    }.items():
        config = dkv.DKVConfig(**small, **limits)
        attach(model, config)
        cache = DKVCache(model, config)
        for low in range(0, 700, 250):
            logits[name] = needle.logits(model, torch.tensor([ids[low : low + 250]]), cache)
        assert cache.dkv_layers[0].block_counts == [(700 - 32 - 64) // 32]
    detach(model)
    scale = float(logits["dense"].abs().max())
    torch.testing.assert_close(logits["all"], logits["dense"], atol=1e-4 * scale, rtol=0)
    assert float((logits["some"] - logits["dense"]).abs().max()) > 1e-3 * scale


def test_the_commands(tiny: str, tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dkv.cli import main

    few = {"window": VARIANTS["window"]}
    monkeypatch.setattr(prefill_fidelity, "default_variants", lambda profile=None: few)
    file = tmp_path / "rows.json"
    options = ["--tokens", str(TOKENS), "--offsets", "0", "--trials", "0", "--dtype", "float32"]
    assert main(["fidelity", "--model", tiny, "--prefill", *options, "--json", str(file)]) == 0
    (row,) = read_rows(file)
    assert row["name"] == "window" and {"visited", "std_kl", "copy_kl", "end_copy_kl", "recall"} <= set(row)
    assert "visited" in capsys.readouterr().out
    assert main(["fidelity", "--model", tiny, "--prefill", "--routing"]) == 2
    assert "--prefill has a table of its own" in capsys.readouterr().err

    assert main(["bench", "prefill", "--contexts", "100,400", "--repeats", "1", "--json", str(file)]) == 0
    rows = read_rows(file)
    assert [row["context"] for row in rows] == [100, 400]
    for row in rows:
        assert {"op", "context", "dtype", "ms", "dense_ms", "sdpa_ms", "ratio"} <= set(row)
        assert min(row["ms"], row["dense_ms"], row["sdpa_ms"]) > 0
    assert rows[0]["exponent"] is None and isinstance(rows[1]["exponent"], float)
    assert main(["bench", "prefill", "--contexts", "0"]) == 2


def test_the_variants_that_are_compared() -> None:
    plain = prefill_fidelity.default_variants()
    assert set(plain) < set(prefill_fidelity.default_variants(dkv.HeadProfile.shipped("smollm2-135m")))
