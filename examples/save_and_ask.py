"""Read a document once, keep its compressed cache in a file, and ask it later, in another process.

    python examples/save_and_ask.py save report.txt report.safetensors
    python examples/save_and_ask.py ask report.safetensors "Who wrote it?"

The second command reads no document: tokens that the file holds are not computed again. Model and settings must be
those that the file was made with; the file says what differs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from conversation import asking, opening
from transformers import PreTrainedModel

import dkv
from dkv import models
from dkv.integrations.transformers import DKVCache, attach


def step(model: PreTrainedModel, ids: torch.Tensor, cache: DKVCache) -> torch.Tensor:
    """Logits ``[1, vocab]`` after ``ids [1, n]``, which go on where the cache ends."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def save(options: argparse.Namespace) -> None:
    model, tokenizer = models.load(options.model)
    cache = DKVCache(attach(model, settings(options)))
    ids = torch.tensor([opening(tokenizer, options.document.read_text(encoding="utf-8"))])
    for chunk in ids.split(512, dim=1):
        step(model, chunk, cache)
    cache.compress()
    cache.save(options.file)
    size = os.path.getsize(options.file)
    print(f"{ids.shape[1]:,} tokens in {size / 1e6:.1f} MB, where dense takes {cache.dense_nbytes / 1e6:.1f}")


def ask(options: argparse.Namespace) -> None:
    model, tokenizer = models.load(options.model)
    cache = DKVCache(attach(model, settings(options))).load(options.file)
    ids, made = torch.tensor([asking(tokenizer, options.question)]), []
    for _ in range(options.max_new_tokens):
        ids = step(model, ids, cache).argmax(-1, keepdim=True)
        made.append(int(ids))
        if made[-1] == tokenizer.eos_token_id:
            break
    print(tokenizer.decode(made, skip_special_tokens=True).strip())


def settings(options: argparse.Namespace) -> dkv.DKVConfig:
    return dkv.DKVConfig(window=options.window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", default="smollm2-135m", help="a known name, a folder, a .gguf file or a hub id")
    shared.add_argument("--window", type=int, default=256, help="newest tokens that stay exact, at least")
    commands = parser.add_subparsers(required=True)
    saving = commands.add_parser("save", parents=[shared], help="read a document and keep its cache")
    saving.add_argument("document", type=Path)
    saving.add_argument("file")
    saving.set_defaults(run=save)
    asking = commands.add_parser("ask", parents=[shared], help="ask a kept cache")
    asking.add_argument("file")
    asking.add_argument("question")
    asking.add_argument("--max-new-tokens", type=int, default=40)
    asking.set_defaults(run=ask)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
