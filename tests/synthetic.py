"""What tests of caches share: made-up profiles, small models of three kv heads, changed files, feeding a model."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from dkv import HeadProfile, _files

KEY_OPTIONS = ((8, 8, 7, 6, 5, 5, 5, 4), (6, 5, 4, 4, 3, 2, 2, 2), (4, 3, 2, 2, 2, 1, 1, 1), (3, 2, 1, 1, 1, 0, 0, 0))
VALUE_OPTIONS = (6, 4, 2, 1)
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def _llama() -> Any:
    import transformers

    return transformers.LlamaConfig(**SHAPE)


def _gemma2() -> Any:
    import transformers

    return transformers.Gemma2Config(**SHAPE, sliding_window=40, query_pre_attn_scalar=8)


MODELS = {"llama": _llama, "gemma2": _gemma2}  # transformers is needed only where one is made


def profile_of(scores: Any, head_dim: int = 8, model: str = "tiny", seed: int = 0, **fields: Any) -> HeadProfile:
    """Losses that grow with coarseness, some heads a hundred times those of others; ``fields`` replace any of it."""
    scores, rng = np.asarray(scores, float), np.random.default_rng(seed)
    layers, heads = scores.shape
    size = 10 ** rng.uniform(-6, -4, (2, layers, heads, 1))
    return HeadProfile(
        **{
            "model": model,
            "num_layers": layers,
            "num_kv_heads": heads,
            "head_dim": head_dim,
            "scores": scores,
            "key_options": KEY_OPTIONS,
            "value_options": VALUE_OPTIONS,
            "key_loss": size[0] * 6.0 ** np.arange(len(KEY_OPTIONS)),
            "value_loss": size[1] * 6.0 ** np.arange(len(VALUE_OPTIONS)),
            "drop_loss": 10 ** rng.uniform(-4, -1, (layers, heads)),
            "channel_weight": rng.uniform(0.1, 2, (layers, heads, head_dim)),
            "text": "none",
            **fields,
        }
    )


def rewritten(path, change):
    """The file with its header changed by ``change(metadata, entries)``, and sealed again."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    meta = json.loads(entries["__metadata__"]["dkv"])
    change(meta, entries)
    entries["__metadata__"]["dkv"] = json.dumps(meta)
    entries["__metadata__"]["sha256"] = _files.UNSEALED
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    _files.seal(str(path))


def feed(model: Any, ids: Any, chunks: Any, cache: Any, mask: Any = None) -> Any:
    """Logits of a text that a model of transformers reads in ``chunks``; padding is where ``mask`` is 0."""
    import torch

    outs, start = [], 0
    for length in chunks:
        stop, extra = start + length, {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            extra = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        outs.append(model(ids[:, start:stop], past_key_values=cache, **extra).logits)
        start = stop
    return torch.cat(outs, dim=1)
