"""A long document and a question in mlx-lm, its answer streamed from a compressed cache.

    python examples/mlx_lm_generate.py report.txt "Who wrote it?" --model mlx-community/Qwen2.5-1.5B-Instruct-4bit

The model is whatever ``mlx_lm.load`` takes. On a Mac the kernels are Metal's; elsewhere mlx computes on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx_lm
from conversation import asking, opening

import dkv
from dkv.integrations.mlx_lm import make_prompt_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", required=True, help="a folder or a hub id of an MLX model")
    parser.add_argument("--window", type=int, default=256, help="newest tokens that stay exact, at least")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--float32", action="store_true", help="compute in float32: faster where there is no Metal")
    options = parser.parse_args()

    model, tokenizer = mlx_lm.load(options.model)
    if options.float32:
        model.set_dtype(mx.float32)
    cache = make_prompt_cache(model, dkv.DKVConfig(window=options.window))

    document = opening(tokenizer, options.document.read_text(encoding="utf-8"))
    for start in range(0, len(document), 512):  # compress first, ask second
        mx.eval(model(mx.array([document[start : start + 512]]), cache=cache))
    held, dense = (sum(getattr(layer, name) for layer in cache) for name in ("nbytes", "dense_nbytes"))
    print(f"{len(document):,} tokens: {held / 1e6:.1f} MB, where dense takes {dense / 1e6:.1f}\nAnswer: ", end="")

    question = asking(tokenizer, options.question)
    for part in mlx_lm.stream_generate(model, tokenizer, question, prompt_cache=cache, max_tokens=options.max_tokens):
        print(part.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
