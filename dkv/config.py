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
EVERY_BLOCK = 2**31 - 1  # a top_k beyond any number of blocks
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
            raise TypeError(f"share of a tier must be a number, got {self.share!r}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share of a tier must be 0..1, got {self.share}")
        if not isinstance(self.routed, bool):
            raise TypeError(f"routed of a tier must be a bool, got {self.routed!r}")
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
    """The kv heads of a layer that are compressed together, ascending, and the plain config that they have."""

    heads: tuple[int, ...]
    config: DKVConfig


# What DKVConfig.preset knows: name -> fields.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
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
    chunk_top_k : int, optional
        Compressed blocks that a chunk of more than one query attends in the runtime; all of them when None.
    prefill_block : int
        Queries that share one selection in :func:`dkv.prefill_attention`.
    prefill_top_k : int, optional
        Key blocks per query block, sink, window and diagonal included; ``max(16, 2 * sqrt(blocks))`` when None.
    prefill_window : int
        Newest tokens before a query block that it always attends.
    tiers : tuple of HeadTier
        Splits the kv heads of the model by their scores in ``profile``; see :meth:`head_groups`. All heads of a layer
        are compressed together where there are none.
    profile : HeadProfile, optional
        The scores of the model's heads.
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
    router: str = "lowrank"
    share: str = "kv_head"
    sink_blocks: int = 1
    recent_blocks: int = 0
    window: int = 1024
    sink_tokens: int = 256
    chunk_top_k: int | None = None
    prefill_block: int = 128
    prefill_top_k: int | None = None
    prefill_window: int = 512
    tiers: tuple[HeadTier, ...] = ()
    profile: HeadProfile | None = None

    def __post_init__(self) -> None:
        self._check_int("block_size", 2, 256)
        self._check_int("rank", 0, 128)
        self._check_int("num_residuals", 0)
        self._check_int("top_k", 1)
        self._check_int("sink_blocks", 0)
        self._check_int("recent_blocks", 0)
        self._check_int("window", 1)
        self._check_int("sink_tokens", 0)
        self._check_int("chunk_top_k", 1, optional=True)
        self._check_int("prefill_block", 1)
        self._check_int("prefill_top_k", 1, optional=True)
        self._check_int("prefill_window", 0)
        for name, choices in (("keep", KEEPS), ("format", FORMATS), ("router", ROUTERS), ("share", SHARES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        object.__setattr__(self, "key_bits", self.block_format.key_bits)  # checks the widths; a list became a tuple
        if self.profile is not None and not isinstance(self.profile, HeadProfile):
            raise TypeError(f"profile must be a HeadProfile, got {type(self.profile).__qualname__}")
        self._check_tiers()

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
            raise TypeError(f"{name} must be an int, got {value!r}")
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

    # head groups

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
            In the order of the tiers, those without heads in this layer left out; one group of all heads without tiers.

        Raises
        ------
        ValueError
            When tiers have no profile, or the profile is of a model of another shape.
        """
        if not self.tiers:
            plain = self if self.profile is None else dataclasses.replace(self, profile=None)
            return (HeadGroup(tuple(range(num_kv_heads)), plain),)
        if self.profile is None:
            raise ValueError(f"tiers need the profile of a model: {HOW_TO_PROFILE}")
        self.profile.check_model(self.profile.num_layers, num_kv_heads, self.profile.head_dim)
        if not 0 <= layer < self.profile.num_layers:
            raise ValueError(f"layer must be 0..{self.profile.num_layers - 1}, as in the profile, got {layer}")
        tier_of = self._tiers_of(self.profile)[layer]
        groups = (
            HeadGroup(tuple(head for head, own in enumerate(tier_of) if own == index), tier.applied(self))
            for index, tier in enumerate(self.tiers)
        )
        return tuple(group for group in groups if group.heads)

    def _tiers_of(self, profile: HeadProfile) -> list[list[int]]:
        """The tier of each head of the model, ``[layers][kv heads]``."""
        ranked = [(-score, layer, head) for layer, row in enumerate(profile.scores) for head, score in enumerate(row)]
        tier_of = [[len(self.tiers) - 1] * profile.num_kv_heads for _ in range(profile.num_layers)]
        start, share = 0, 0.0
        ranked.sort()
        for index, tier in enumerate(self.tiers[:-1]):
            share += tier.share
            stop = min(round(share * len(ranked)), len(ranked))
            for _, layer, head in ranked[start:stop]:
                tier_of[layer][head] = index
            start = stop
        return tier_of

    # made from names and mappings

    @classmethod
    def preset(cls, name: str, profile: HeadProfile | None = None, **overrides: Any) -> DKVConfig:
        """Settings by name: "default", or "paper" (the published ones).

        Parameters
        ----------
        name : str
            A key of ``dkv.config.PRESETS``.
        profile : HeadProfile, optional
            The model's; presets with tiers need it.
        **overrides
            Fields that differ from the preset.
        """
        if name not in PRESETS:
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
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown {what} fields {unknown}; known are {sorted(known)}")
    return dict(values)
