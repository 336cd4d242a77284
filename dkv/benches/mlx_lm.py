"""DKV beside dense mlx-lm with the same weights, and beside PyTorch where asked: time, bytes and recall."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache as dense_prompt_cache

from dkv._dispatch import which_mlx
from dkv.benches import needle, peak
from dkv.benches.recall import following_dtype
from dkv.config import DKVConfig

DENSE, COMPRESSED = "mlx-lm dense", "mlx-lm DKV"
TORCH_DENSE, TORCH_COMPRESSED = "torch dense", "torch DKV"

Advance = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One text read and one question answered by one engine."""

    prefill_seconds: float
    decode_tokens_per_second: float
    kv_bytes: int
    peak_bytes: int
    answer: str
    right: bool


def feed(model: Any, ids: Sequence[int], cache: list[Any], chunk: int) -> float:
    """Prefill ``cache`` in chunks, as mlx-lm's generate does; seconds that it took."""
    start = time.perf_counter()
    for low in range(0, len(ids), chunk):
        model(mx.array([list(ids[low : low + chunk])]), cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    return time.perf_counter() - start


def ask(model: Any, tokenizer: Any, cache: list[Any], tokens: int) -> tuple[list[int], float]:
    """Feed the question one token at a time, a decode step each, then go on greedily: the tokens, tokens a second."""
    question = needle.encode(tokenizer, needle.QUESTION)
    steps = generate_step(mx.array(question), model, max_tokens=tokens, prompt_cache=cache, prefill_step_size=1)
    made, times = [], []
    for token, _ in steps:
        made.append(token)
        times.append(time.perf_counter())
    return made, (len(made) - 1) / (times[-1] - times[0])


def trial(model: Any, tokenizer: Any, hay: needle.Haystack, cache: list[Any], chunk: int, tokens: int) -> Trial:
    """Read the text into ``cache``, then ask it."""
    mx.reset_peak_memory()
    seconds = feed(model, hay.ids, cache, chunk)
    nbytes = sum(layer.nbytes for layer in cache)
    made, speed = ask(model, tokenizer, cache, tokens)
    text = " ".join(tokenizer.decode(made, skip_special_tokens=True).split())
    return Trial(seconds, speed, nbytes, int(mx.get_peak_memory()), text, hay.code in text)


def torch_trials(
    model: Any, tokenizer: Any, hay: needle.Haystack, config: DKVConfig, chunk: int, tokens: int
) -> Iterator[tuple[str, Trial]]:
    """The same two in transformers."""
    from dkv.integrations.transformers import DKVCache, attach, detach

    config = following_dtype(config, model)
    for engine in (TORCH_DENSE, TORCH_COMPRESSED):
        compressed = engine == TORCH_COMPRESSED
        if compressed:
            attach(model, config)
        with peak.watch(model.device) as memory:
            cache = DKVCache(model, config) if compressed else needle.dense_cache(model)
            seconds = needle.feed(model, hay.ids, cache, chunk)
            nbytes = cache.nbytes if compressed else needle.dense_cache_nbytes(cache)
            answer = needle.ask(model, tokenizer, cache, hay.code, tokens)
        detach(model)
        speed = answer.decode_tokens / answer.decode_seconds
        yield engine, Trial(seconds, speed, nbytes, memory.nbytes, answer.text, answer.right)


def run(
    model: Any,
    tokenizer: Any,
    contexts: Sequence[int],
    config: DKVConfig,
    trials: int = 1,
    seed: int = 0,
    chunk: int = 2048,
    tokens: int = 32,
    torch_model: tuple[Any, Any] | None = None,
    warm_up: bool = True,
    advance: Advance = lambda label: None,
) -> list[dict[str, Any]]:
    """One row per context and engine.

    Every trial buries a passcode in another stretch of prose, reads all of it in chunks and is asked afterwards: the
    DKV cache was compressed while it read. Engines take turns in each trial.

    Parameters
    ----------
    model, tokenizer
        A model of mlx-lm and its tokenizer, as transformers has it.
    contexts : sequence of int
    config : DKVConfig
    trials, seed, chunk : int
    tokens : int
        Decode steps that are timed, the answer among them.
    torch_model : (model, tokenizer), optional
        Of transformers: two more rows per context.
    warm_up : bool
        Read a short text first, so that no row pays for kernels that are built at their first use.
    advance : callable
        Told what is done next.

    Returns
    -------
    list of dict
        Keys ``context``, ``engine``, ``prefill_seconds`` and ``decode_tokens_per_second`` (medians), ``kv_bytes``,
        ``ratio`` (dense bytes over these), ``peak_bytes`` (both the largest), ``right``, ``trials``, ``answers``.
    """
    from dkv.integrations.mlx_lm import make_prompt_cache

    last = config.window + config.block_size - 1

    def caches() -> Iterator[tuple[str, list[Any]]]:
        yield DENSE, dense_prompt_cache(model)
        yield COMPRESSED, make_prompt_cache(model, config)

    if warm_up:
        length = min(min(contexts), config.sink_tokens + config.window + 2 * config.block_size)
        hay = needle.bury(tokenizer, length, seed)
        for engine, cache in caches():
            advance(f"warm-up: {engine}")
            trial(model, tokenizer, hay, cache, chunk, 2)
    rows = []
    for context in contexts:
        found: dict[str, list[Trial]] = {}
        for index in range(trials):
            label = f"{context:,} tokens, trial {index + 1} of {trials}: "
            hay = needle.bury(tokenizer, context, seed * 1_000_003 + index, first=config.sink_tokens, last=last)
            for engine, cache in caches():
                advance(label + engine)
                found.setdefault(engine, []).append(trial(model, tokenizer, hay, cache, chunk, tokens))
                del cache
            if torch_model is not None:
                advance(label + "torch")
                for engine, one in torch_trials(*torch_model, hay, config, chunk, tokens):
                    found.setdefault(engine, []).append(one)
        for engine, done in found.items():
            dense = found[DENSE if engine in (DENSE, COMPRESSED) else TORCH_DENSE]
            rows.append({"context": context, "engine": engine, **_summary(done, dense)})
    return rows


def _summary(done: list[Trial], dense: list[Trial]) -> dict[str, Any]:
    kv_bytes = max(one.kv_bytes for one in done)
    return {
        "prefill_seconds": round(statistics.median(one.prefill_seconds for one in done), 3),
        "decode_tokens_per_second": round(statistics.median(one.decode_tokens_per_second for one in done), 3),
        "kv_bytes": kv_bytes,
        "ratio": round(max(one.kv_bytes for one in dense) / kv_bytes, 3),
        "peak_bytes": max(one.peak_bytes for one in done),
        "right": sum(one.right for one in done),
        "trials": len(done),
        "answers": [one.answer for one in done],
    }


def where() -> str:
    """What computes, in words."""
    return f"{mx.default_device()}, {which_mlx()}"
