"""Does the compressed cache still know a passcode? Counted over contexts, settings and random passcodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dkv.benches import needle
from dkv.config import EVERY_POSITION, DKVConfig

WINDOW = 256  # newest tokens that stay exact


def default_variants() -> dict[str, DKVConfig]:
    """The settings that are compared with dense attention."""
    return {
        "paper R=128": DKVConfig.paper(num_residuals=128),
        "paper R=64": DKVConfig.paper(num_residuals=64),
        "default": DKVConfig(),
    }


def run(
    model: Any,
    tokenizer: Any,
    contexts: Sequence[int],
    trials: int = 5,
    seed: int = 0,
    variants: Mapping[str, DKVConfig] | None = None,
    depths: int = 0,
    advance: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Right answers per context and variant.

    The text is prefilled once per trial, in one chunk and with nothing compressed; that cache answers as "dense". Every
    variant then compresses a copy of it, all but the first 256 (``sink_tokens``) and the newest 256 to 511 tokens, and
    is asked afterwards: the codec alone differs. Factors of 16 bits follow the model's dtype. With ``depths`` there are
    ``trials`` passcodes at each of so many depths, evenly spread over the tokens that are compressed.

    Returns
    -------
    list of dict
        Keys ``context``, ``variant``, ``right``, ``trials`` (all of them), ``ratio`` (dense bytes over stored bytes of
        the compressed blocks; 1 where nothing is compressed), ``whole_cache_ratio`` (window and sink tokens included),
        ``answers``, of each trial the ``depth`` as a share of the text and whether it was ``right``.
    """
    from dkv.integrations.transformers import DKVCache, attach, detach

    variants = default_variants() if variants is None else variants
    first = max((config.sink_tokens for config in variants.values()), default=0)
    rows = []
    for context in contexts:
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ("dense", *variants)}
        ratios = {"dense": (1.0, 1.0)}
        exact = DKVConfig(window=context + needle.longest(tokenizer), prefill_dense_below=EVERY_POSITION)
        total = trials * max(depths, 1)
        for trial in range(total):
            label = f"{context:,} tokens, trial {trial + 1} of {total}: "
            depth = (trial % depths + 0.5) / depths if depths else None
            number = seed * 1_000_003 + trial
            hay = needle.bury(tokenizer, context, seed=number, first=first, last=WINDOW + 255, depth=depth)
            place = {"depth": round(hay.position / context, 4)}
            attach(model, exact)
            whole = DKVCache(model, exact)
            advance(label + "prefill")
            needle.feed(model, hay.ids, whole, chunk=context)
            advance(label + "dense")
            known = needle.ask(model, tokenizer, copy.deepcopy(whole), hay.code).right
            answers["dense"].append({**place, "right": known})
            for name, config in variants.items():
                advance(label + name)
                cache = needle.reconfigured(whole, dataclasses.replace(following_dtype(config, model), window=WINDOW))
                cache.compress()
                ratios[name] = (
                    cache.compressed_dense_nbytes / cache.compressed_nbytes if cache.compressed_nbytes else 1.0,
                    cache.dense_nbytes / cache.nbytes,
                )
                known = needle.ask(model, tokenizer, cache, hay.code).right
                answers[name].append({**place, "right": known})
        for name, given in answers.items():
            ratio, whole_ratio = ratios.get(name, (1.0, 1.0))
            rows.append(
                {
                    "context": context,
                    "variant": name,
                    "right": sum(answer["right"] for answer in given),
                    "trials": total,
                    "ratio": round(ratio, 3),
                    "whole_cache_ratio": round(whole_ratio, 3),
                    "answers": given,
                }
            )
    detach(model)
    return rows


def following_dtype(config: DKVConfig, model: Any) -> DKVConfig:
    """16-bit factors are stored in the cache's own 16-bit dtype, and as float16 in a float32 cache."""
    if config.format in ("fp16", "bf16"):
        name = "bf16" if str(model.dtype) == "torch.bfloat16" else "fp16"
        return dataclasses.replace(config, format=name)
    return config
