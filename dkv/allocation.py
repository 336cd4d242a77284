"""Choose what is stored of every kv head, so that the estimated loss is least for the bytes that a ratio leaves."""

from __future__ import annotations

import functools

from dkv.profile import HeadProfile
from dkv.types import BlockFormat

DENSE_BYTES = 2  # of a number in a dense cache
FORGETTING = 3.0  # what a forgotten head's loss counts: such errors add up over heads, and grow with the context
CHEAPEST = 1e-30  # nats per byte
STEPS = 100  # halvings of the range of prices per byte

Widths = tuple[tuple[int, ...], int]  # key_bits, value_bits


def block_bytes(
    key_bits: tuple[int, ...], value_bits: int, block_size: int, rank: int, head_dim: int, minmax: bool = False
) -> int:
    """Bytes of one block of one kv head that keeps every row, in a 16-bit cache; in a group it takes no more.

    The basis has the rank that a group may have, however few channels the head has.
    """
    from dkv.reference.accounting import block_nbytes

    fmt = BlockFormat(block_size=block_size, rank=rank, key_bits=key_bits, value_bits=value_bits, minmax=minmax)
    beyond = min(rank, block_size - 1) - fmt.stored_rank(1, head_dim, head_dim)
    return sum(block_nbytes(fmt, 1, head_dim, head_dim, DENSE_BYTES).values()) + beyond * head_dim


@functools.lru_cache(maxsize=8)
def fit(
    profile: HeadProfile, ratio: float, block_size: int, rank: int, minmax: bool = False
) -> tuple[tuple[Widths | None, ...], ...]:
    """Widths of every head, ``[layers][kv heads]``; None where a head should see sink and window alone.

    The least sum of ``profile``'s losses at which dense bytes over stored bytes are ``ratio`` or more: every head takes
    the option of least ``loss + price * bytes``, and the price is the lowest that meets the ratio. Being forgotten
    costs ``FORGETTING`` times the loss that was measured. Layers that were not measured keep no blocks: their dense
    bytes do not count.
    """
    heads = [(layer, head) for layer in range(profile.num_layers) for head in range(profile.num_kv_heads)]
    options: list[Widths] = [(key, value) for key in profile.key_options for value in profile.value_options]
    sizes = [block_bytes(key, value, block_size, rank, profile.head_dim, minmax) for key, value in options]
    budget = len(measured_heads(profile)) * 2 * block_size * profile.head_dim * DENSE_BYTES / ratio
    losses = {}
    for layer, head in heads:
        keys, values = profile.key_loss[layer][head], profile.value_loss[layer][head]
        losses[layer, head] = [key + value for key in keys for value in values]

    def chosen(price: float) -> tuple[dict[tuple[int, int], int], int]:
        picks, total = {}, 0
        for at in heads:
            best = min(range(len(options)), key=lambda i: losses[at][i] + price * sizes[i])
            if FORGETTING * profile.drop_loss[at[0]][at[1]] <= losses[at][best] + price * sizes[best]:
                best = -1
            picks[at] = best
            total += sizes[best] if best >= 0 else 0
        return picks, total

    low, high = CHEAPEST, 1e6  # everything is forgotten at the high end
    for _ in range(STEPS):
        price = (low * high) ** 0.5
        low, high = (price, high) if chosen(price)[1] > budget else (low, price)
    picks, stored = chosen(high)
    if not stored and chosen(CHEAPEST)[1]:
        raise ValueError(f"ratio {ratio:g} is out of reach at block_size={block_size}: every head would be forgotten")
    return tuple(
        tuple(None if picks[layer, head] < 0 else options[picks[layer, head]] for head in range(profile.num_kv_heads))
        for layer in range(profile.num_layers)
    )


def measured_heads(profile: HeadProfile) -> list[tuple[int, int]]:
    """Layer and number of the heads of all layers but those that keep no full cache, whose numbers are all 0."""
    layers = [layer for layer in range(profile.num_layers) if any(map(any, profile.channel_weight[layer]))]
    return [(layer, head) for layer in layers for head in range(profile.num_kv_heads)]


def routed_heads(profile: HeadProfile, share: float) -> tuple[tuple[bool, ...], ...]:
    """Whether a measured head is among the ``share`` of the highest scores, ties to the lower layer, then head."""
    measured = set(measured_heads(profile))
    ranked = [at for at in profile.ranked_heads() if at in measured]
    chosen = set(ranked[: round(share * len(ranked))])
    return tuple(tuple((layer, head) in chosen for head in range(len(row))) for layer, row in enumerate(profile.scores))
