"""The registered operators in a decoder that is nobody's framework: prompt, compress, then decode steps.

    python examples/plain_decoder.py
    python examples/plain_decoder.py --compile inductor     # the whole step as one graph, no break
    python examples/plain_decoder.py --exact                # exact rows, every block: equal to dense attention

Random weights; what comes out is compared with dense attention over the same tokens. Buffers keep their addresses and
shapes from step to step, and how many rows are valid is a tensor, so nothing is compiled twice.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dkv
from dkv.integrations import torch_ops

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 96, 6, 2, 16, 256


class LayerCache(NamedTuple):
    """Closed blocks, and the newest rows in buffers ``[B, Hkv, capacity, D]``."""

    blocks: dkv.CompressedBlocks
    k: Tensor
    v: Tensor


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``x [B, H, S, D]`` at ``positions [S]``."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 10000 ** (torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def rows(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, Hq, S, D]``, k and v ``[B, Hkv, S, D]``; keys are cached after the rotary embedding."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return rotated(q, positions), rotated(k, positions), v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def dense(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits ``[B, S, vocab]`` by dense attention, and every layer's keys and values."""
        x, kept = self.embed(ids), []
        for layer in self.layers:
            q, k, v = layer.rows(x, torch.arange(ids.shape[1]))
            kept.append((k, v))
            x = layer.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return self.head(x), kept

    def step(
        self, ids: Tensor, position: Tensor, row: Tensor, caches: list[LayerCache], config: dkv.DKVConfig
    ) -> Tensor:
        """Logits ``[B, vocab]`` after ``ids [B, 1]`` at ``position [1]``, stored as row ``row [1]`` of the buffers."""
        x, valid = self.embed(ids), (row + 1).expand(ids.shape[0])
        for layer, cache in zip(self.layers, caches):
            q, k, v = layer.rows(x, position)
            cache.k.index_copy_(2, row, k)
            cache.v.index_copy_(2, row, v)
            state = torch_ops.decode_attention(q, cache.blocks, cache.k, cache.v, seq_lens=valid, config=config)
            x = layer.rest(x, state.out)
        return self.head(x)[:, -1]


def compressed(k: Tensor, v: Tensor, closed: int, room: int, config: dkv.DKVConfig) -> LayerCache:
    """The first ``closed`` tokens in blocks, the others in buffers with ``room`` for more."""
    blocks = torch_ops.compress_blocks(k[:, :, :closed], v[:, :, :closed], config=config)
    return LayerCache(blocks, *(F.pad(x[:, :, closed:], (0, 0, 0, room)) for x in (k, v)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", metavar="BACKEND", help="compile the step whole, with a backend of torch.compile")
    parser.add_argument("--exact", action="store_true", help="keep rows exact and attend every block")
    options = parser.parse_args()

    settings = {"format": "fp32", "top_k": options.tokens} if options.exact else {"top_k": 4}
    config = dkv.DKVConfig(window=256, **settings)
    torch.manual_seed(0)
    model = Decoder().eval()
    ids = torch.randint(VOCAB, (1, options.tokens + options.steps))
    closed = max(0, options.tokens - config.window) // config.block_size * config.block_size
    with torch.inference_mode():
        rows = model.dense(ids[:, : options.tokens])[1]
        caches = [compressed(k, v, closed, options.steps, config) for k, v in rows]
        step = torch.compile(model.step, fullgraph=True, backend=options.compile) if options.compile else model.step
        places = range(options.tokens, options.tokens + options.steps)
        logits = [
            step(ids[:, at, None], torch.tensor([at]), torch.tensor([at - closed]), caches, config) for at in places
        ]
        got, want = torch.stack(logits, dim=1), model.dense(ids)[0][:, options.tokens :]

    stored, dense = (sum(getattr(cache.blocks, name) for cache in caches) for name in ("nbytes", "dense_nbytes"))
    print(f"{closed:,} of {options.tokens:,} tokens in blocks: {stored:,} bytes instead of {dense:,}")
    apart = float((got - want).abs().max())
    agreed = int((got.argmax(-1) == want.argmax(-1)).sum())
    print(f"logits within {apart:.1e} of dense attention, the likeliest token the same in {agreed} of {options.steps}")
    if options.exact and apart > 1e-4:
        raise SystemExit("exact rows must give what dense attention gives")


if __name__ == "__main__":
    main()
