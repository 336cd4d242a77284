"""SmolLM2-135M as an int4 model of mlx-lm, with a compressed cache, beside the same weights in transformers.

``python -m bench.mlx_smollm2 --json bench/results/mlx_lm.json``. mlx-lm's converter quantises the model; its dense NLL
is checked against torch first, for mlx-lm computes nonsense from a config without ``rope_theta``. Then a passcode is
buried in prose, both engines read it in chunks, dense and DKV, and are asked afterwards. The transformers model has the
int4 weights, dequantised, so that the same function is computed and greedy answers can be compared token by token.
float32 activations: on MLX's CPU build a step of the int4 model takes about thirty times longer in float16.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from dkv import DKVConfig, models
from dkv.benches import mlx_lm as measure
from dkv.benches import mlx_model, needle

NAME = "smollm2-135m"


def nll(model: Any, tokenizer: Any) -> float:
    """As ``dkv.models.passage_nll``, of a model of mlx-lm."""
    ids = mx.array([tokenizer(models.GUARD_PASSAGE).input_ids])
    logits = model(ids[:, :-1]).astype(mx.float32)
    return float(nn.losses.cross_entropy(logits, ids[:, 1:]).mean())


def loaded(bits: int | None) -> tuple[Any, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        model, tokenizer, _ = mlx_model.load(str(mlx_model.converted(NAME, bits=bits)))
    model.set_dtype(mx.float32)
    return model, tokenizer


def dequantised() -> tuple[Any, Any]:
    """The int4 model in transformers, each weight as MLX decodes it."""
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()):
        plain = Path(work) / "plain"
        mlx_lm.convert(str(mlx_model.converted(NAME)), str(plain), dequantize=True, dtype="float32")
        return models.load(str(plain), dtype="float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    config = DKVConfig(window=32, sink_tokens=32)
    torch_model, torch_tokenizer = models.load(NAME, dtype="float32")
    beside = dequantised()
    found = {
        "torch, as it came": models.passage_nll(torch_model, torch_tokenizer),
        "mlx-lm, float16 weights": nll(*loaded(None)),
        "torch, int4 weights": models.passage_nll(*beside),
    }
    model, tokenizer = loaded(mlx_model.BITS)
    found["mlx-lm, int4 weights"] = nll(model, tokenizer)
    print("dense NLL per token:", {name: round(value, 4) for name, value in found.items()}, flush=True)
    pairs = [("torch, as it came", "mlx-lm, float16 weights"), ("torch, int4 weights", "mlx-lm, int4 weights")]
    for one, other in pairs:
        if not abs(found[one] - found[other]) < 0.01:
            raise SystemExit(f"mlx-lm computes another function than torch: NLL {found}")
    rows = measure.run(
        model,
        tokenizer,
        [options.tokens],
        config,
        seed=options.seed,
        chunk=options.chunk,
        tokens=needle.ANSWER_TOKENS,
        torch_model=beside,
        warm_up=False,
        advance=lambda label: print(f"{time.perf_counter() - start:6.0f} s {label}", flush=True),
    )
    by_engine = {row["engine"]: row for row in rows}
    same = {
        "DKV: mlx-lm and transformers": by_engine[measure.COMPRESSED]["answers"]
        == by_engine[measure.TORCH_COMPRESSED]["answers"],
        "dense: mlx-lm and transformers": by_engine[measure.DENSE]["answers"]
        == by_engine[measure.TORCH_DENSE]["answers"],
        "mlx-lm: DKV and dense": by_engine[measure.COMPRESSED]["answers"] == by_engine[measure.DENSE]["answers"],
    }
    for row in rows:
        print(row)
    print("same greedy answer:", same)
    if options.json:
        settings = {name: getattr(options, name) for name in ("tokens", "chunk", "seed")}
        value = {
            "what": "SmolLM2-135M, int4 by mlx_lm.convert, float32 activations; torch has the same weights",
            "where": measure.where(),
            "settings": settings,
            "config": config.to_dict(),
            "nll": {name: round(number, 4) for name, number in found.items()},
            "same_greedy_answer": same,
            "rows": rows,
        }
        options.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
