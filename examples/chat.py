"""Several questions to one long document, answered from one compressed cache as they are written.

    python examples/chat.py report.txt
    python examples/chat.py report.txt --question "Who wrote it?" --question "And when?"

The document is read once. Each turn adds its question and its answer to the same cache. Without ``--question`` the
questions come from the terminal, until an empty one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from conversation import asking, opening
from transformers import PreTrainedModel, TextStreamer

import dkv
from dkv import models
from dkv.integrations.transformers import DKVCache, attach


def read(model: PreTrainedModel, ids: torch.Tensor, cache: DKVCache, chunk: int = 512) -> None:
    """Put the document ``ids [1, N]`` into the cache, a chunk at a time, so that memory does not grow with ``N``."""
    with torch.no_grad():
        for start in range(0, ids.shape[1], chunk):
            model(ids[:, start : start + chunk], past_key_values=cache, logits_to_keep=1)


def asked() -> Iterator[str]:
    while question := input("\n? ").strip():
        yield question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a folder, a .gguf file or a hub id")
    parser.add_argument("--question", action="append", help="asked in turn; may be given more than once")
    parser.add_argument("--window", type=int, default=256, help="newest tokens that stay exact, at least")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    options = parser.parse_args()

    model, tokenizer = models.load(options.model)
    attach(model, dkv.DKVConfig(window=options.window))
    cache = DKVCache(model)
    ids = torch.tensor([opening(tokenizer, options.document.read_text(encoding="utf-8"))])
    read(model, ids, cache)
    print(f"{ids.shape[1]:,} tokens: {cache.nbytes / 1e6:.1f} MB, where dense takes {cache.dense_nbytes / 1e6:.1f}")

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    turns: list[tuple[str, str]] = []
    for question in options.question or asked():
        print(f"\nQuestion: {question}\nAnswer: ", end="", flush=True)
        ids = torch.cat([ids, torch.tensor([asking(tokenizer, question, turns)])], dim=1)
        start = ids.shape[1]
        ids = model.generate(  # all tokens so far: what the cache holds of them is not computed again
            ids, past_key_values=cache, max_new_tokens=options.max_new_tokens, do_sample=False, streamer=streamer
        )
        if ids[0, -1] == tokenizer.eos_token_id:  # the next turn begins with it
            ids = ids[:, :-1]
        turns.append((question, tokenizer.decode(ids[0, start:], skip_special_tokens=True)))


if __name__ == "__main__":
    main()
