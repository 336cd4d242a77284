"""Faults that users met where a model calls attention. Each names its source."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dkv import DKVConfig  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach  # noqa: E402


def test_d16_a_models_soft_cap_is_used() -> None:
    """flashinfer#1193: a refactor dropped the logit soft-cap without an error; here one that changes every logit."""
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "query_pre_attn_scalar": 1}
    config = transformers.Gemma2Config(**shape, **heads, attn_logit_softcapping=0.01, attn_implementation="eager")
    ids = torch.randint(0, 97, (1, 120))
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        capped = model(ids).logits
        config.attn_logit_softcapping = None
        plain = transformers.AutoModelForCausalLM.from_config(config).eval()
        plain.load_state_dict(model.state_dict())
        assert (plain(ids).logits - capped).abs().max() > 1e-3
        exact = DKVConfig(block_size=16, window=24, sink_tokens=8, format="fp32", rank=4, num_residuals=15, top_k=99)
        attach(model, exact)
        cache = DKVCache(model, exact)
        steps = [ids[:, :100], *(ids[:, at : at + 1] for at in range(100, 120))]
        logits = torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)
    torch.testing.assert_close(logits, capped, rtol=0, atol=1e-5)
