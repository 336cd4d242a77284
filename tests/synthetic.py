"""Head profiles made up from scores and from what coarser storage is said to cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkv import HeadProfile

KEY_OPTIONS = ((8, 8, 7, 6, 5, 5, 5, 4), (6, 5, 4, 4, 3, 2, 2, 2), (4, 3, 2, 2, 2, 1, 1, 1), (3, 2, 1, 1, 1, 0, 0, 0))
VALUE_OPTIONS = (6, 4, 2, 1)


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
