"""The eviction methods of kvpress on the texts of ``dkv fidelity``, in an environment of its own.

kvpress needs an older transformers than the DKV cache does. In a checkout:

    python -m venv .venv-kvpress
    .venv-kvpress/bin/pip install -e . kvpress==0.5.5 torch==2.13.0 gguf
    .venv-kvpress/bin/python -m dkv.benches.kvpress_peer --json kvpress.json
    dkv fidelity --add kvpress.json

Each method scores the rows as it does on its own; of the part that DKV compresses the best are kept, and the first and
the last 256 tokens always. What a method would drop is masked for each kv head, so positions stay true. KVzip reads
the text again to score it, which takes longer than the prefill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dkv import models
from dkv.benches import fidelity, needle

ATTENTION = "dkv_kept_rows"
METHODS = {  # how rows compete: within a head, within a layer, or within the model
    "SnapKV": "head",
    "ExpectedAttention": "head",
    "KVzip layerwise": "layer",
    "KVzip": "model",
}
ZIP_PROMPT = 64  # tokens that KVzip puts before what it repeats
LEAST_CHUNK = 128


def kept_rows(scores: Tensor, ratio: float, among: str) -> Tensor:
    """Which rows stay, bool ``[layers, Hkv, tokens]``, for scores of that shape; the exact ends always do.

    ``among`` is "head", "layer" or "model": what shares one budget of a ``ratio``-th of its middle rows.
    """
    layers, heads, tokens = scores.shape
    middle = scores[..., fidelity.SINK : tokens - fidelity.WINDOW]
    shape = {"head": (layers * heads, -1), "layer": (layers, -1), "model": (1, -1)}[among]
    flat = middle.reshape(shape)
    best = flat.topk(round(flat.shape[1] / ratio), dim=1).indices
    kept = torch.ones_like(scores, dtype=torch.bool)
    chosen = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True)
    kept[..., fidelity.SINK : tokens - fidelity.WINDOW] = chosen.view_as(middle)
    return kept


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows that ``module._dkv_kept [Hkv, tokens]`` keeps, and over all that came later."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    length, keys = query.shape[2], key.shape[2]
    kept = getattr(module, "_dkv_kept", None)
    mask = None
    if length < keys:
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)[None, None]
    if kept is not None:
        assert mask is not None
        visible = torch.nn.functional.pad(kept, (0, keys - kept.shape[1]), value=True)
        mask = mask & visible.repeat_interleave(query.shape[1] // kept.shape[0], dim=0)[None, :, None]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _scored_prefill(model: Any, ids: Sequence[int]) -> tuple[Any, dict[str, Tensor]]:
    """A dense cache of the text, and the scores ``[layers, Hkv, tokens]`` of every method."""
    from kvpress import ExpectedAttentionPress, KVzipPress, SnapKVPress
    from kvpress.presses.base_press import BasePress

    class Recorder(BasePress):  # type: ignore[misc]
        def __init__(self, press: Any) -> None:
            self.press = press
            self.scores: list[Tensor] = []

        def compress(
            self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> tuple[Any, Any]:
            self.scores.append(self.press.score(module, hidden_states, keys, values, attentions, kwargs)[0])
            return keys, values

    class ZipRecorder(KVzipPress):  # type: ignore[misc]
        def compress_post(self, model: Any) -> None:
            self.found = self.score_val[:, 0].clone()

    room = (models.max_context(model) or 2**20) - len(ids) - ZIP_PROMPT
    zipped = ZipRecorder(compression_ratio=0.5, chunk_size=min(2048, max(room, LEAST_CHUNK)))
    snap, expected = Recorder(SnapKVPress()), Recorder(ExpectedAttentionPress())
    cache = needle.dense_cache(model)
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        for press in (zipped, snap, expected):
            stack.enter_context(press(model))
        needle.feed(model, ids, cache, chunk=len(ids))
        stack.pop_all().close()  # KVzip reads the text again on the way out
    scores = [torch.stack(snap.scores), torch.stack(expected.scores), zipped.found, zipped.found]
    return cache, dict(zip(METHODS, scores, strict=True))


def _set_kept(model: Any, kept: Tensor | None) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.self_attn._dkv_kept = None if kept is None else kept[index]


def run(
    model: Any,
    tokenizer: Any,
    tokens: int,
    offsets: Sequence[int],
    trials: int,
    seed: int,
    ratios: Sequence[float],
    text: str | None = None,
) -> list[dict[str, Any]]:
    """Rows as :func:`dkv.benches.fidelity.run` makes them, one for each method and ratio."""
    from transformers import AttentionInterface

    cut = fidelity.passages(tokenizer, needle.prose() if text is None else text, tokens, offsets)
    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
    subjects = [(name, ratio) for name in METHODS for ratio in ratios]
    tallies = {subject: fidelity.Tally() for subject in subjects}
    for passage in cut:
        print(f"offset {passage.offset:,}", file=sys.stderr)
        cache, scores = _scored_prefill(model, passage.ids)
        dense = _outputs(model, cache, passage.continuations)
        per_row = sum(2 * part.shape[3] for part in (cache.layers[0].keys, cache.layers[0].values))
        for name, ratio in subjects:
            kept = kept_rows(scores[name], ratio, METHODS[name])
            _set_kept(model, kept)
            ends = kept.shape[0] * kept.shape[1] * (fidelity.SINK + fidelity.WINDOW)
            nbytes = per_row * (int(kept.sum()) - ends)
            other = _outputs(model, cache, passage.continuations)
            per_token = per_row * kept.shape[0] * kept.shape[1]
            tallies[name, ratio].add(fidelity.divergences(dense, other), nbytes, per_token)
            _set_kept(model, None)
    counted = 0
    for trial in range(trials):
        print(f"passcode {trial + 1} of {trials}", file=sys.stderr)
        hay = needle.bury(tokenizer, tokens, seed=seed * 1_000_003 + trial, first=fidelity.SINK, last=fidelity.WINDOW)
        cache, scores = _scored_prefill(model, hay.ids)
        if not _ask(model, tokenizer, cache, hay):
            continue
        counted += 1
        for name, ratio in subjects:
            _set_kept(model, kept_rows(scores[name], ratio, METHODS[name]))
            tallies[name, ratio].right += _ask(model, tokenizer, cache, hay)
            _set_kept(model, None)
    settings = {"trials": trials, "tokens": tokens, "offsets": list(offsets), "dtype": str(model.dtype).split(".")[-1]}
    return [
        {**tallies[name, ratio].row(f"{name} {ratio:g}x", "peer", tokens, counted), **settings}
        for name, ratio in subjects
    ]


def _outputs(model: Any, cache: Any, continuations: Sequence[Sequence[int]]) -> list[Tensor]:
    outputs = []
    for ids in continuations:
        outputs.append(needle.logits(model, torch.tensor([ids], device=model.device), cache)[0].float())
        cache.crop(-len(ids))
    return outputs


def _ask(model: Any, tokenizer: Any, cache: Any, hay: needle.Haystack) -> bool:
    right = needle.ask(model, tokenizer, cache, hay.code).right
    cache.crop(len(hay.ids) - cache.get_seq_length())
    return right


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the rows as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m dkv.benches.kvpress_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=fidelity.TOKENS)
    parser.add_argument("--offsets", type=_numbers, default=list(fidelity.OFFSETS))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ratios", type=_numbers, default=[4, 6], help="dense rows for each that is kept")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="a UTF-8 file instead of built-in prose")
    parser.add_argument("--json", type=Path, help="the file to write; standard output if unset")
    options = parser.parse_args(argv)
    try:
        import kvpress  # noqa: F401
    except ImportError as error:
        parser.error(f"kvpress cannot be imported ({error}); it needs an environment of its own, see --help")
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    model, tokenizer = models.load(options.model, dtype=options.dtype)
    limit = models.max_context(model)
    if limit is not None and options.tokens + fidelity.LENGTH > limit:
        parser.error(f"{options.tokens} tokens and {fidelity.LENGTH} after them are more than the model's {limit}")
    text = None if options.text is None else options.text.read_text(encoding="utf-8")
    try:
        rows = run(
            model, tokenizer, options.tokens, options.offsets, options.trials, options.seed, options.ratios, text
        )
    except ValueError as error:
        parser.error(str(error))
    content = json.dumps(rows, indent=2) + "\n"
    if options.json is None:
        print(content, end="")
    else:
        options.json.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
