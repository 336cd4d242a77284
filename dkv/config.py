"""One frozen value that says how a cache is compressed, routed and prefilled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dkv.profile import HeadProfile
from dkv.types import BlockFormat

KEEPS = ("distinct", "error")
FORMATS = ("compact", "fp32", "fp16", "bf16")
ROUTERS = ("lowrank", "keys", "minmax", "residual")
SHARES = ("kv_head", "all")
WHEN_FULL = ("error", "drop_oldest")
EVERY_BLOCK = 2**31 - 1  # a top_k beyond any number of blocks
EVERY_POSITION = 2**63 - 1  # a prefill_dense_below that makes all of prefill dense
DEFAULT_PREFILL_KEYS = 2048  # that a query block attends where nothing else limits it
HOW_TO_PROFILE = "make a profile with `dkv profile MODEL -o FILE`, then cfg.with_profile(dkv.HeadProfile.load(FILE))"


@dataclasses.dataclass(frozen=True)
class HeadTier:
    """A share of a model's kv heads, by descending score of its profile, and how their blocks differ.

    Parameters
    ----------
    share : float
        Of all kv heads of the model, 0 to 1; the shares of a config's tiers sum to 1.
    routed : bool
        Whether a decode step routes these heads. False attends all their blocks, which is cheap where blocks are small.
    rank, num_residuals, residual_bits, key_bits, value_bits : optional
        Instead of the config's; None leaves it as it is.
    """

    share: float
    routed: bool = True
    # Every field below is a field of DKVConfig that a tier overrides; nothing else knows their names.
    rank: int | None = None
    num_residuals: int | None = None
    residual_bits: int | None = None
    key_bits: tuple[int, ...] | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)):
            raise TypeError(f"share of a tier must be a number, got {self.share!r:.200}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share of a tier must be 0..1, got {self.share}")
        if not isinstance(self.routed, bool):
            raise TypeError(f"routed of a tier must be a bool, got {self.routed!r:.200}")
        if isinstance(self.key_bits, list):  # as JSON has it
            object.__setattr__(self, "key_bits", tuple(self.key_bits))

    def applied(self, config: DKVConfig) -> DKVConfig:
        """The plain config, without tiers and profile, of a group of this tier's heads."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["share"]
        changes = {name: value for name, value in own.items() if value is not None}
        if not changes.pop("routed"):
            changes.update(top_k=EVERY_BLOCK, chunk_top_k=None)
        return dataclasses.replace(config, tiers=(), profile=None, **changes)


class HeadGroup(NamedTuple):
    """The kv heads of a layer that are compressed together, ascending, and the plain config that they have.

    ``config`` is None for heads that see sink and window alone: nothing of theirs is compressed, it is forgotten.
    ``channel_weight [heads][D]`` is what :func:`dkv.compress_blocks` takes by that name.
    """

    heads: tuple[int, ...]
    config: DKVConfig | None
    channel_weight: tuple[tuple[float, ...], ...] | None = None


# What DKVConfig.preset knows: name -> fields.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "quality": {"ratio": 4.0, "rank": 0, "router": "keys"},
    "balanced": {"ratio": 6.0, "rank": 0, "router": "keys"},
    "small": {"ratio": 8.0, "rank": 0, "router": "keys"},
    "paper": {"num_residuals": 128, "keep": "error", "format": "fp16", "router": "residual", "share": "all"},
}


@dataclasses.dataclass(frozen=True)
class DKVConfig:
    """Settings of a compressed cache.

    Parameters
    ----------
    block_size : int
        Tokens in a block, 2 to 256.
    rank : int
        Rank of the low-rank part, 0 to 128. At 0 a row that is not kept is its block's anchor.
    num_residuals : int
        Rows of a block kept beside the low-rank part; ``block_size - 1`` or more keeps every row.
    keep : {"distinct", "error"}
        Which rows are kept when not all are: those whose values lie far from the block's mean value, or those that the
        low-rank part reconstructs worst.
    format : {"compact", "fp32", "fp16", "bf16"}
        "compact" stores int8 factors and 4-bit rows; the others store factors in that dtype and rows bit-exact.
    residual_bits : int, optional
        Overrides the format's row width: 1 to 8, or 16 for the cache's own dtype.
    key_bits : tuple of 8 int, optional
        Width of keys for each eighth of the channels, the most important ones first; see :class:`BlockFormat`.
    value_bits : int, optional
        Width of values, 0 to 8.
    top_k : int
        Blocks that a decode step attends, per kv head.
    route_every : int
        Decode steps of the torch runtime from one scan of every block to the next, once 16 steps after a chunk of
        several tokens have each scanned. A step in between selects among the candidates of the last scan, scored
        anew. A block that closes brings the next scan forward; the window is always exact.
    route_candidates : int
        The best so many blocks of a scan are its candidates, per kv head, ``top_k`` at least, and beside them those
        that follow the selected ones. At 0 the steps after a scan keep its selection as it is.
    router : {"lowrank", "keys", "minmax", "residual"}
        "keys" scores every stored row of a block; the others a cheaper picture of it.
    share : {"kv_head", "all"}
        Whether each kv head selects blocks of its own, or all heads of a layer (of a head group) share one set.
    sink_blocks : int
        Leading compressed blocks that are always selected by the ops.
    recent_blocks : int
        Trailing compressed blocks that are always selected.
    window : int
        Newest tokens that the runtime keeps exact, at least; at most ``window + block_size - 1``.
    sink_tokens : int
        First tokens of a sequence that the runtime keeps exact. They replace ``sink_blocks`` there.
    max_blocks : int, optional
        Closed blocks that the runtime holds of a sequence, in each layer, at most. No limit when None.
    when_full : {"error", "drop_oldest"}
        What happens to tokens that would close more blocks than ``max_blocks``: they are refused before anything has
        changed, or the sequence's oldest closed blocks leave for good. Sink tokens stay, and so do all positions.
    chunk_top_k : int, optional
        Compressed blocks that a chunk of more than one query attends in the runtime, by ``router``. When None, all of
        them below ``prefill_dense_below``, and key blocks by the fields that begin with ``prefill_`` from there on.
    prefill_block : int
        Queries that share one selection in :func:`dkv.prefill_attention`.
    prefill_key_block : int
        Keys that are selected together in prefill; ``block_size`` where that is less.
    prefill_stride : int
        One query in so many is scored for the selection.
    prefill_top_k : int, optional
        Key blocks per query block at most, sink, window and diagonal included. 2,048 keys' worth when it,
        ``prefill_ratio`` and ``prefill_mass`` are None.
    prefill_ratio : float, optional
        Share of the visible key blocks that a query block attends at most, above 0 and at most 1.
    prefill_mass : float, optional
        A query block's selection stops at this share of its attention, above 0 and at most 1; each head so takes what
        it needs.
    prefill_window : int
        Newest tokens before a query block that it always attends.
    prefill_share : float
        In the runtime: share of the model's kv heads, by descending score of ``profile``, that select key blocks in
        prefill. The others attend the first block, window and diagonal alone.
    prefill_dense_below : int
        In the runtime: queries at positions below this attend everything before them.
    prefill_tail : int
        In the runtime: so many of a chunk's last queries attend everything before them, which is what the first new
        tokens come from.
    tiers : tuple of HeadTier
        Splits the kv heads of the model by their scores in ``profile``; see :meth:`head_groups`. All heads of a layer
        are compressed together where there are none.
    profile : HeadProfile, optional
        What was measured of the model's heads.
    ratio : float, optional
        Dense bytes over stored bytes of what is compressed, at 16 bits a dense number: the profile then chooses widths
        for every head, at the least estimated loss, and which heads see sink and window alone. Instead of ``tiers``;
        every row is kept. 2 to 16.
    routed_share : float
        With ``ratio``: share of the model's kv heads, by descending score of the profile, that a decode step routes.
        The others attend all of their blocks, which are small.
    """

    block_size: int = 256
    rank: int = 32
    num_residuals: int = 255
    keep: str = "distinct"
    format: str = "compact"
    residual_bits: int | None = None
    key_bits: tuple[int, ...] | None = None
    value_bits: int | None = None
    top_k: int = 16
    route_every: int = 1
    route_candidates: int = 32
    router: str = "lowrank"
    share: str = "kv_head"
    sink_blocks: int = 1
    recent_blocks: int = 0
    window: int = 1024
    sink_tokens: int = 256
    max_blocks: int | None = None
    when_full: str = "error"
    chunk_top_k: int | None = None
    prefill_block: int = 128
    prefill_key_block: int = 64
    prefill_stride: int = 32
    prefill_top_k: int | None = None
    prefill_ratio: float | None = None
    prefill_mass: float | None = None
    prefill_window: int = 512
    prefill_share: float = 1.0
    prefill_dense_below: int = 8192
    prefill_tail: int = 128
    tiers: tuple[HeadTier, ...] = ()
    profile: HeadProfile | None = None
    ratio: float | None = None
    routed_share: float = 0.25

    def __post_init__(self) -> None:
        self._check_int("block_size", 2, 256)
        self._check_int("rank", 0, 128)
        self._check_int("num_residuals", 0)
        self._check_int("top_k", 1)
        self._check_int("route_every", 1)
        self._check_int("route_candidates", 0)
        self._check_int("sink_blocks", 0)
        self._check_int("recent_blocks", 0)
        self._check_int("window", 1)
        self._check_int("sink_tokens", 0)
        self._check_int("max_blocks", 1, optional=True)
        self._check_int("chunk_top_k", 1, optional=True)
        self._check_int("prefill_block", 1)
        self._check_int("prefill_top_k", 1, optional=True)
        self._check_int("prefill_window", 0)
        self._check_int("prefill_key_block", 1)
        self._check_int("prefill_stride", 1)
        self._check_int("prefill_dense_below", 0)
        self._check_int("prefill_tail", 0)
        named = (("keep", KEEPS), ("format", FORMATS), ("router", ROUTERS), ("share", SHARES), ("when_full", WHEN_FULL))
        for name, choices in named:
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r:.200}")
        object.__setattr__(self, "key_bits", self.block_format.key_bits)  # checks the widths; a list became a tuple
        if self.profile is not None and not isinstance(self.profile, HeadProfile):
            raise TypeError(f"profile must be a HeadProfile, got {type(self.profile).__qualname__}")
        self._check_tiers()
        self._check_prefill()
        self._check_ratio()

    def _check_prefill(self) -> None:
        self._check_number("prefill_share", 0, 1)
        for name in ("prefill_ratio", "prefill_mass"):
            self._check_number(name, 0, 1)
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0, got 0")

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r:.200}")
        if not low <= value <= high:  # NaN is not
            raise ValueError(f"{name} must be {low}..{high}, got {value}")

    def _check_ratio(self) -> None:
        self._check_number("ratio", 2, 16)
        self._check_number("routed_share", 0, 1)
        if self.ratio is None:
            return
        own = [name for name in ("residual_bits", "key_bits", "value_bits") if getattr(self, name) is not None]
        if own or self.tiers or self.format != "compact":
            given = own or (["tiers"] if self.tiers else ["format"])
            raise ValueError(f"ratio chooses the widths itself: {given[0]} must be left as it is")
        if not self.block_format.keeps_every_row:
            raise ValueError(f"ratio keeps every row: num_residuals must be {self.block_size - 1} or more")

    def _check_tiers(self) -> None:
        if not isinstance(self.tiers, (tuple, list)) or not all(isinstance(tier, HeadTier) for tier in self.tiers):
            raise TypeError(f"tiers must be a tuple of HeadTier, got {self.tiers!r:.120}")
        object.__setattr__(self, "tiers", tuple(self.tiers))
        total = math.fsum(tier.share for tier in self.tiers)
        if self.tiers and abs(total - 1) > 1e-6:
            raise ValueError(f"shares of the tiers must sum to 1, got {total:g}")
        for index, tier in enumerate(self.tiers):
            try:
                tier.applied(self)
            except (TypeError, ValueError) as error:
                raise type(error)(f"tier {index}: {error}") from error

    def _check_int(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r:.200}")
        if value < low or (high is not None and value > high):
            allowed = f"{low}..{high}" if high is not None else f"{low} or more"
            raise ValueError(f"{name} must be {allowed}, got {value}")

    @property
    def block_format(self) -> BlockFormat:
        """The storage format of every block."""
        compact = self.format == "compact"
        bits = self.residual_bits if self.residual_bits is not None else (4 if compact else 16)
        return BlockFormat(
            block_size=self.block_size,
            rank=self.rank,
            num_residuals=self.num_residuals,
            factor_bits=8 if compact else (32 if self.format == "fp32" else 16),
            residual_bits=bits,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            minmax=self.router == "minmax",
        )

    # prefill

    @property
    def prefill_keys(self) -> int:
        """Keys of a key block in prefill."""
        return min(self.prefill_key_block, self.block_size)

    def prefill_limits(self) -> tuple[int, float, float]:
        """A query block's key blocks at most, their share of the visible ones and of its attention; 1 is no limit."""
        ratio, mass = self.prefill_ratio or 1.0, self.prefill_mass or 1.0
        if self.prefill_top_k is not None:
            return self.prefill_top_k, ratio, mass
        limited = self.prefill_ratio is not None or self.prefill_mass is not None
        return EVERY_BLOCK if limited else math.ceil(DEFAULT_PREFILL_KEYS / self.prefill_keys), ratio, mass

    def within(self, queries: int, keys: int) -> DKVConfig:
        """These settings with query blocks and prefill window no longer than so many queries and keys."""
        block, window = min(self.prefill_block, queries), min(self.prefill_window, keys)
        return dataclasses.replace(self, prefill_block=block, prefill_window=window)

    def unlimited_prefill(self) -> DKVConfig:
        """These settings with key blocks that are all selected."""
        return dataclasses.replace(self, prefill_mass=1.0, prefill_ratio=None, prefill_top_k=None)

    def prefill_heads(self, layer: int, num_kv_heads: int) -> tuple[bool, ...]:
        """Which kv heads of a layer select key blocks in prefill: the model's ``prefill_share`` by score."""
        if self.prefill_share in (0, 1):
            return (self.prefill_share == 1,) * num_kv_heads
        if self.profile is None:
            raise ValueError(f"prefill_share needs the profile of a model: {HOW_TO_PROFILE}")
        ranked = self.profile.ranked_heads()
        chosen = set(ranked[: round(self.prefill_share * len(ranked))])
        return tuple((layer, head) in chosen for head in range(num_kv_heads))

    # head groups

    @property
    def splits_heads(self) -> bool:
        """Whether heads differ in what is stored, so that only ``head_groups`` says how."""
        return bool(self.tiers) or self.ratio is not None

    def with_profile(self, profile: HeadProfile) -> DKVConfig:
        """The same config with a profile, which tiers need."""
        if not isinstance(profile, HeadProfile):
            raise TypeError(f"profile must be a HeadProfile, got {type(profile).__qualname__}")
        return dataclasses.replace(self, profile=profile)

    def head_groups(self, layer: int, num_kv_heads: int) -> tuple[HeadGroup, ...]:
        """How the kv heads of a layer are grouped: each group is compressed alone, by a plain config of its own.

        ``compress_blocks(k[:, group.heads], v[:, group.heads], config=group.config)`` makes one group's blocks. The
        definition is in ``reference/README.md``; the tiers rank the heads of the whole model.

        Parameters
        ----------
        layer : int
            Index among all layers of the model.
        num_kv_heads : int
            kv heads of the layer.

        Returns
        -------
        tuple of HeadGroup
            By their first head; one group of all heads where there are neither tiers nor a ratio.

        Raises
        ------
        ValueError
            When tiers have no profile, or the profile is of a model of another shape.
        """
        if not self.splits_heads:
            plain = self if self.profile is None else dataclasses.replace(self, profile=None)
            return (HeadGroup(tuple(range(num_kv_heads)), plain),)
        if self.profile is None:
            what = "tiers need" if self.tiers else "ratio needs"
            raise ValueError(f"{what} the profile of a model: {HOW_TO_PROFILE}")
        self.profile.check_model(self.profile.num_layers, num_kv_heads, self.profile.head_dim)
        if not 0 <= layer < self.profile.num_layers:
            raise ValueError(f"layer must be 0..{self.profile.num_layers - 1}, as in the profile, got {layer}")
        configs = self._fitted(layer) if self.ratio is not None else self._tiered(layer)
        weight = self.profile.channel_weight[layer]
        groups: dict[DKVConfig | None, list[int]] = {}
        for head, config in enumerate(configs):
            groups.setdefault(config, []).append(head)
        return tuple(
            HeadGroup(tuple(heads), config, None if config is None else tuple(weight[head] for head in heads))
            for config, heads in groups.items()
        )

    def _tiered(self, layer: int) -> list[DKVConfig | None]:
        """The plain config of each head of a layer."""
        assert self.profile is not None
        return [self.tiers[index].applied(self) for index in self._tiers_of(self.profile)[layer]]

    def _fitted(self, layer: int) -> list[DKVConfig | None]:
        """As :meth:`_tiered`, from the widths that the profile chooses."""
        from dkv.allocation import fit, routed_heads

        assert self.profile is not None and self.ratio is not None
        routed = routed_heads(self.profile, self.routed_share)
        plain = dataclasses.replace(self, profile=None, ratio=None)
        still = dataclasses.replace(plain, top_k=EVERY_BLOCK, chunk_top_k=None)
        chosen = fit(self.profile, self.ratio, self.block_size, self.rank, self.router == "minmax")
        return [
            None
            if widths is None
            else dataclasses.replace(plain if routed[layer][head] else still, key_bits=widths[0], value_bits=widths[1])
            for head, widths in enumerate(chosen[layer])
        ]

    def _tiers_of(self, profile: HeadProfile) -> list[list[int]]:
        """The tier of each head of the model, ``[layers][kv heads]``."""
        ranked = profile.ranked_heads()
        tier_of = [[len(self.tiers) - 1] * profile.num_kv_heads for _ in range(profile.num_layers)]
        start, share = 0, 0.0
        for index, tier in enumerate(self.tiers[:-1]):
            share += tier.share
            stop = min(round(share * len(ranked)), len(ranked))
            for layer, head in ranked[start:stop]:
                tier_of[layer][head] = index
            start = stop
        return tier_of

    # made from names and mappings

    @classmethod
    def preset(cls, name: str, profile: HeadProfile | None = None, **overrides: Any) -> DKVConfig:
        """Settings by name: "quality", "balanced" and "small" (fitted by the profile), "default", "paper" (published).

        Parameters
        ----------
        name : str
            A key of ``dkv.config.PRESETS``.
        profile : HeadProfile, optional
            The model's; the fitted presets need it.
        **overrides
            Fields that differ from the preset.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r:.60}; there are: {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], "profile": profile, **overrides})

    @classmethod
    def paper(cls, num_residuals: int = 128) -> DKVConfig:
        """The published settings (Differential-KV, paper sections 4 and 6): rank 32, fp16, error-ranked residuals."""
        return cls.preset("paper", num_residuals=num_residuals)

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers, lists and mappings alone, as JSON has them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["tiers"] = [dataclasses.asdict(tier) for tier in self.tiers]
        values["profile"] = None if self.profile is None else self.profile.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DKVConfig:
        """The inverse of :meth:`to_dict`; an unknown field is a ``ValueError``."""
        values = _known("config", cls, values)
        if isinstance(values.get("tiers"), (list, tuple)):
            values["tiers"] = tuple(
                HeadTier(**_known("tier", HeadTier, tier)) if isinstance(tier, Mapping) else tier
                for tier in values["tiers"]
            )
        if isinstance(values.get("profile"), Mapping):
            values["profile"] = HeadProfile.from_dict(values["profile"])
        return cls(**values)


def _known(what: str, kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(values).__qualname__}")
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown {what} fields {unknown}; known are {sorted(known)}")
    return dict(values)


def sampled_queries(length: int, prefill_block: int, stride: int) -> list[int]:
    """The queries of a chunk that are scored: the last of every ``stride`` of a query block, and its last."""
    found = []
    for start in range(0, length, prefill_block):
        stop = min(start + prefill_block, length)
        found += [min(first + stride, stop) - 1 for first in range(start, stop, stride)]
    return found


def selection_width(
    count: int, block_size: int, prefill_block: int, top_k: int, prefill_window: int, ratio: float
) -> int:
    """Room for the most that a query block may choose, and for every block that its window can touch."""
    most = min(top_k, math.ceil(ratio * count))
    return min(count, max(most, 2 + (prefill_window + prefill_block + block_size - 2) // block_size))
