"""A passcode buried in real prose, and the two steps around it: feed tokens into a cache, ask what it remembers.

Compress first, ask second: a question that is part of the prompt is answered from exact attention, and proves nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SENTENCE = "The magic number of Paris is {code}."
QUESTION = "\n\nThe magic number of Paris is"
ANSWER_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Token ids of a long text with the passcode inside.

    Attributes
    ----------
    ids : list of int
        The text, passcode included.
    code : str
        Five digits.
    position : int
        Index in ``ids`` of the first token of the buried sentence.
    """

    ids: list[int]
    code: str
    position: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a cache answered. ``decode_seconds`` covers ``decode_tokens`` greedy steps."""

    text: str
    right: bool
    decode_tokens: int
    decode_seconds: float


@functools.cache
def prose() -> str:
    """About 400,000 characters of the Python language reference, from the standard library."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def longest(tokenizer: Any) -> int:
    """Tokens that a question and its answer need after the context."""
    return len(encode(tokenizer, QUESTION)) + ANSWER_TOKENS


def bury(
    tokenizer: Any,
    tokens: int,
    seed: int,
    first: int = 0,
    last: int = 0,
    low: float = 0.10,
    high: float = 0.85,
    depth: float | None = None,
) -> Haystack:
    """A haystack of exactly ``tokens`` tokens.

    Parameters
    ----------
    tokenizer
    tokens : int
    seed : int
        Decides the digits, the stretch of text and the depth.
    first, last : int
        Tokens at either end that stay exact in the cache; the passcode is kept out of them where the text allows.
    low, high : float
        Range of the depth, as a share of the text.
    depth : float, optional
        Where, 0 to 1, between ``first`` and ``last``; the seed does not decide it, nor is it kept in a range.

    Raises
    ------
    ValueError
        When the passcode does not fit into ``tokens`` tokens.
    """
    rng = random.Random(seed)
    code = str(rng.randrange(10_000, 100_000))
    sentence = SENTENCE.format(code=code)
    needle = encode(tokenizer, f"\n\n{sentence} {sentence}\n\n")
    start = first_tokens(tokenizer)
    length = tokens - len(needle) - len(start)
    if length < 1:
        raise ValueError(f"the buried passcode alone takes {len(needle)} tokens, more than {tokens}")
    low_at, high_at = (int(low * tokens), int(high * tokens)) if depth is None else (0, tokens)
    if first + len(needle) < tokens - last:
        low_at = max(low_at, first)
        high_at = max(low_at, min(high_at, tokens - last - len(needle)))
    drawn = rng.randint(low_at, high_at)
    place = drawn if depth is None else low_at + round(depth * (high_at - low_at))
    position = min(max(place, len(start)), len(start) + length)
    text = prose()
    offset = rng.randrange(len(text))
    doubled = text[offset:] + text[:offset]
    hay: list[int] = []
    characters = 8 * length
    while len(hay) < length:
        hay = encode(tokenizer, doubled[:characters])
        if characters >= len(doubled) and len(hay) < length:
            hay = (hay * (length // len(hay) + 1))[:length]
        characters *= 2
    cut = position - len(start)
    return Haystack(start + hay[:cut] + needle + hay[cut:length], code, position)


def first_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: its BOS token, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("x", verbose=False).input_ids)[:1] == [bos] else []


def step(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run ``ids [B, Sq]`` through the model on top of ``cache``; logits ``[B, vocab]`` of the last token."""
    return logits(model, ids, cache, keep=1)[:, -1]


def logits(model: Any, ids: torch.Tensor, cache: Any, keep: int = 0) -> torch.Tensor:
    """As :func:`step`, logits ``[B, keep, vocab]`` of the last ``keep`` tokens; of all where ``keep`` is 0."""
    import torch

    with torch.inference_mode():
        output = model(ids, **{_cache_argument(type(model).forward): cache}, use_cache=True, logits_to_keep=keep)
    return output.logits


@functools.cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def feed(
    model: Any, ids: Sequence[int], cache: Any, chunk: int = 512, advance: Callable[[int], None] = lambda count: None
) -> float:
    """Prefill ``cache`` with ``ids`` in chunks; seconds that it took."""
    import torch

    row = torch.tensor([list(ids)], device=model.device)
    start = time.perf_counter()
    for low in range(0, row.shape[1], chunk):
        part = row[:, low : low + chunk]
        step(model, part, cache)
        advance(part.shape[1])
    return time.perf_counter() - start


def ask(model: Any, tokenizer: Any, cache: Any, code: str, tokens: int = ANSWER_TOKENS) -> Answer:
    """Feed the question one token at a time, as a decode step each, then continue greedily."""
    import torch

    for token in encode(tokenizer, QUESTION):
        last = step(model, torch.tensor([[token]], device=model.device), cache)
    made: list[int] = []
    start = time.perf_counter()
    for _ in range(tokens):
        token = int(last[0].argmax())
        made.append(token)
        last = step(model, torch.tensor([[token]], device=model.device), cache)
    seconds = time.perf_counter() - start
    text = tokenizer.decode(made, skip_special_tokens=True)
    return Answer(" ".join(text.split()), code in text, tokens, seconds)


def reconfigured(cache: Any, config: Any) -> Any:
    """A copy of a ``DKVCache`` with another configuration. The block format may differ while no block is closed."""
    twin = copy.deepcopy(cache)
    twin.configure(config)
    return twin


def dense_cache(model: Any) -> Any:
    """The cache that transformers itself uses."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def dense_cache_nbytes(cache: Any) -> int:
    """Bytes of the K and V arrays of :func:`dense_cache`."""
    return sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in cache.layers)
