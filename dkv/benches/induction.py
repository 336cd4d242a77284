"""A transformer whose weights are written down, not trained: it copies exactly, at any length, what attention finds.

Two attention layers and no MLP to speak of. The three query heads of the first look one, two and three tokens back (by
rotary positions alone) and write what stood there beside each token. The one of the second looks, without positions,
for the place whose three tokens before it are the three newest ones, and says the token that follows them. A passcode
buried anywhere is so recalled where attention reaches it, and not where it does not.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkv.benches import needle, peak
from dkv.config import DKVConfig

CODE = 64  # numbers, each 1 or -1, that stand for a token
FILLER = 256  # tokens of the text
MARKS = 2  # tokens that begin every passcode; a third names it
PASSCODES = 8
DIGITS = 5
BACK = (1, 2, 3)  # tokens that the heads of the first layer look back
SHARPNESS = (400.0, 64.0)  # logit of the right distance in the first layer, of one right token in the second
ROTARY_BASE = 10.0  # all channels turn fast, so that no two distances within reach look alike
CHUNK = 512
ROUTERS = ("keys", "lowrank")
READ = {"chunk_top_k": 1, "recent_blocks": 1}  # while reading: the sink, the newest block and the window


def model(dtype: torch.dtype = torch.float32) -> Any:
    """The transformer, for ``dkv.integrations.transformers`` as any other."""
    import transformers

    width, dim = CODE, len(BACK) * CODE
    hidden = 1 + (2 + len(BACK)) * width  # a constant, the token, those before it, the answer
    config = transformers.SmolLM3Config(
        vocab_size=FILLER + MARKS + PASSCODES,
        hidden_size=hidden,
        intermediate_size=1,
        num_hidden_layers=2,
        num_attention_heads=len(BACK),
        num_key_value_heads=1,
        head_dim=dim,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        no_rope_layers=[1, 0],
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = transformers.SmolLM3ForCausalLM(config).eval()
    weights = dict(made.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        codes = token_codes()
        constant = width**0.5  # as large as a token
        token, answer = slice(1, 1 + width), slice(hidden - width, hidden)
        before = [slice(1 + width * back, 1 + width * (back + 1)) for back in BACK]
        weights["model.embed_tokens.weight"][:, 0] = constant
        weights["model.embed_tokens.weight"][:, token] = codes
        weights["lm_head.weight"][:, answer] = codes
        for index, parts in enumerate((2, 2 + len(BACK))):  # norms leave the stream as it is
            weights[f"model.layers.{index}.input_layernorm.weight"][:] = (parts * width / hidden) ** 0.5
            weights[f"model.layers.{index}.post_attention_layernorm.weight"][:] = 1
            weights[f"model.layers.{index}.self_attn.v_proj.weight"][:width, token] = torch.eye(width)
        weights["model.norm.weight"][:] = 1
        first, second = (
            {name: weights[f"model.layers.{index}.self_attn.{name}_proj.weight"] for name in "qko"} for index in (0, 1)
        )
        turn = ROTARY_BASE ** (-torch.arange(0, dim, 2) / dim)  # radians a token, of each pair of channels
        first["k"][: dim // 2, 0] = 1 / constant
        sharp, sharp_token = (each * dim**0.5 for each in SHARPNESS)
        for head, (back, place) in enumerate(zip(BACK, before, strict=True)):
            query = torch.cat([(back * turn).cos(), -(back * turn).sin()]) / (dim // 2)
            first["q"][head * dim : (head + 1) * dim, 0] = query * sharp / constant
            first["o"][place, head * dim : head * dim + width] = torch.eye(width)
            second["k"][head * width : (head + 1) * width, place] = torch.eye(width)
            newest = token if head == 0 else before[head - 1]
            for same in range(len(BACK)):  # its query heads are alike
                rows = slice(same * dim + head * width, same * dim + (head + 1) * width)
                second["q"][rows, newest] = torch.eye(width) * sharp_token / width
        second["o"][answer, :width] = torch.eye(width)
    return made.to(dtype)


def token_codes() -> Tensor:
    """``[vocabulary, CODE]`` of 1 and -1, any two of which agree in less than nine tenths of their places."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (FILLER + MARKS + PASSCODES, CODE), generator=generator).float() * 2 - 1


def haystack(context: int, seed: int, first: int, last: int) -> tuple[list[int], list[list[int]]]:
    """Ids of a random text with the passcodes in it, and the passcodes, :data:`MARKS` and name included.

    None of them touches the ``first`` or the ``last`` tokens, which stay exact in a cache.
    """
    draw = random.Random(seed)
    ids = [draw.randrange(FILLER) for _ in range(context)]
    marks = list(range(FILLER, FILLER + MARKS))
    length = MARKS + 1 + DIGITS
    stretch = (context - first - last) // PASSCODES
    if stretch < length:
        raise ValueError(f"context must be {first + last + PASSCODES * length:,} or more, got {context:,}")
    passcodes = []
    for index in range(PASSCODES):
        name = FILLER + MARKS + index
        passcodes.append([*marks, name, *(draw.randrange(FILLER) for _ in range(DIGITS))])
        place = first + index * stretch + draw.randrange(stretch - length + 1)
        ids[place : place + length] = passcodes[-1]
    return ids, passcodes


def dense(network: Any, ids: Sequence[int]) -> Any:
    """transformers' own cache of a text. The first layer reads near tokens alone, the second is asked nothing yet:
    so a window is all that has to be attended, and any length is read in linear time."""
    from dkv.integrations.transformers import attending

    cache = needle.dense_cache(network)
    with attending(network, "banded", _banded):
        needle.feed(network, ids, cache, chunk=CHUNK)
    return cache


def _banded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
    length = q.shape[2]
    k, v = k[:, :, -2 * CHUNK :], v[:, :, -2 * CHUNK :]
    seen = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def compressed(network: Any, ids: Sequence[int], config: DKVConfig) -> Any:
    """A ``DKVCache`` of a text, read in chunks, and then set to route as ``config`` says. The model is attached."""
    from dkv.integrations.transformers import DKVCache, attach

    reading = DKVConfig.from_dict(config.to_dict() | READ)
    attach(network, reading)
    cache = DKVCache(network, reading)
    needle.feed(network, ids, cache, chunk=CHUNK)
    cache.configure(config)
    return cache


def recalled(network: Any, cache: Any, passcodes: Sequence[Sequence[int]]) -> int:
    """How many passcodes come back, each asked for by its marks and name, a token at a time; the cache is as before."""
    right = 0
    for passcode in passcodes:
        asked, wanted = passcode[: MARKS + 1], list(passcode[MARKS + 1 :])
        said: list[int] = []
        for index in range(MARKS + DIGITS):
            token = asked[index] if index <= MARKS else said[-1]
            said.append(int(needle.step(network, torch.tensor([[token]]), cache)[0].argmax()))
        right += said[MARKS:] == wanted
        cache.crop(-len(said))
    return right


def run(
    contexts: Sequence[int],
    config: DKVConfig | None = None,
    routers: Sequence[str] = ROUTERS,
    with_dense: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    advance: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Passcodes recalled from the dense cache, and from one compressed cache by every router.

    Parameters
    ----------
    contexts : sequence of int
        Tokens of the text.
    config : DKVConfig, optional
        Of the compressed cache; the defaults when None.
    routers : sequence of str
        None leaves the compressed cache out.
    with_dense : bool
    dtype : torch.dtype
    seed : int
        Decides text, passcodes and where they are.
    advance : callable
        Told what is being done.

    Returns
    -------
    list of dict
        ``context``, ``variant`` ("dense" or the router), ``right`` of ``asked`` passcodes, ``blocks`` and ``top_k``,
        ``dtype``, ``cache_bytes``, ``table_bytes`` (what the byte table says of the closed blocks, and the room of the
        exact rows), ``start_bytes`` (resident memory before the text was read, model included), ``peak_bytes``,
        ``seconds``. What does not apply is None.
    """
    config = DKVConfig() if config is None else config
    network = model(dtype)
    rows = []
    for context in contexts:
        ids, passcodes = haystack(context, seed, config.sink_tokens, config.window + config.block_size)
        for kind in ("dense",) * with_dense + ("dkv",) * bool(routers):
            before, start = peak.resident(), time.perf_counter()
            right: dict[str, int] = {}
            with peak.watch("cpu") as memory:
                advance(f"{context:,} tokens, {kind}: reading")
                cache = dense(network, ids) if kind == "dense" else compressed(network, ids, config)
                for name in ("dense",) if kind == "dense" else routers:
                    advance(f"{context:,} tokens, {name}: asking")
                    if kind == "dkv":
                        cache.configure(dataclasses.replace(config, router=name))
                    right[name] = recalled(network, cache, passcodes)
            own = {} if kind == "dense" else {"blocks": cache.dkv_layers[0].block_counts[0], "top_k": config.top_k}
            own["cache_bytes"] = needle.dense_cache_nbytes(cache) if kind == "dense" else cache.nbytes
            own["table_bytes"] = None if kind == "dense" else table_bytes(cache)
            own |= {"start_bytes": before, "peak_bytes": memory.nbytes}
            own["seconds"] = round(time.perf_counter() - start, 1)
            rows += [
                {"context": context, "variant": name, "right": count, "asked": len(passcodes)}
                | {"blocks": None, "top_k": None, "dtype": str(dtype).removeprefix("torch.")}
                | own
                for name, count in right.items()
            ]
            del cache
    return rows


def table_bytes(cache: Any) -> int:
    """Bytes of one block by the table of ``reference/README.md``, times blocks, and of the room for exact rows."""
    total = 0
    for layer in cache.dkv_layers:
        one = sum(blocks.map(lambda part: part[:, :1]).nbytes for blocks in layer.blocks)
        total += one * layer.block_counts[0] + layer.k_rows.nbytes + layer.v_rows.nbytes
    return total
