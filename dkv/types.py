"""The values that pass between the ops. Plain containers: any array library's arrays may sit in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Array = Any  # numpy.ndarray, torch.Tensor or mlx.core.array

RESIDUAL_GROUP = 128  # kept rows that share one scale per channel
EIGHTHS = 8  # of a key's channels, each with a width of its own
MAX_BLOCK_SIZE = 256  # residual positions are uint8
MAX_RANK = 128
HALF_TOP = 14  # units put the largest stored number of a group near 2**14, well inside float16
# [bits]: parts of a group's range that its codes may cover; where the tails are few, a finer step pays for them.
CLIPS = (
    (1.0,),
    (1.0, 0.75, 0.6, 0.5, 0.42, 0.35, 0.3),
    (1.0, 0.85, 0.75, 0.65, 0.55, 0.47),
    (1.0, 0.9, 0.8, 0.7, 0.6),
    (1.0, 0.94, 0.87, 0.8, 0.72),
    (1.0, 0.95, 0.9),
    (1.0,),
    (1.0,),
    (1.0,),
)
FACTOR_BITS = (8, 16, 32)
MAX_CODE_BITS = 8
SHARED_PARTS = frozenset(  # by all heads of a block
    ("u", "u_unit", "u_scale", "basis_k_scale", "basis_v_scale", "v_gain", "residual_indices", "block_counts")
)
EXACT_BITS = 16  # the cache's own dtype


class AttentionState(NamedTuple):
    """Softmax-normalised attention over a set of keys, mergeable with the state of another set.

    Attributes
    ----------
    out : array [B, Hq, Sq, Dv]
        Attention output, zeros where the set is empty.
    lse : array [B, Hq, Sq], float32
        Natural-log log-sum-exp of the scaled, masked logits, ``-inf`` where the set is empty.
    """

    out: Array
    lse: Array


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How one block of tokens is stored.

    Parameters
    ----------
    block_size : int
        Tokens in a block, 1 to 256. Token 0 is the anchor.
    rank : int
        Columns of ``u``, 0 to 128; clipped to what the block's shape allows.
    num_residuals : int
        Rows kept beside the low-rank part, 0 to ``block_size - 1`` (more acts as all). The anchor is never among them.
    factor_bits : int
        8 (int8 with scales), 16 (bfloat16 for a bfloat16 cache, else float16) or 32.
    residual_bits : int
        Width of the stored numbers of residual rows: 1 to 8 (asymmetric codes, one scale per channel and 128 kept rows)
        or 16 (the cache's own dtype, exact).
    key_bits : tuple of 8 int, optional
        Width of keys for each eighth of the channels, the most important channels of a head first: 0 to 8, never
        rising. 0 stores a channel's mean alone. ``residual_bits`` for all where None.
    value_bits : int, optional
        Width of values, 0 to 8; ``residual_bits`` where None.
    minmax : bool
        Store ``k_min`` and ``k_max`` for the min/max router.
    """

    block_size: int = 256
    rank: int = 32
    num_residuals: int = 255
    factor_bits: int = 8
    residual_bits: int = 4
    key_bits: tuple[int, ...] | None = None
    value_bits: int | None = None
    minmax: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_size", 1, MAX_BLOCK_SIZE),
            ("rank", 0, MAX_RANK),
            ("num_residuals", 0, None),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r:.200}")
            if value < low or (high is not None and value > high):
                allowed = f"{low}..{high}" if high is not None else f"{low} or more"
                raise ValueError(f"{name} must be {allowed}, got {value}")
        if type(self.factor_bits) is not int or self.factor_bits not in FACTOR_BITS:
            raise ValueError(f"factor_bits must be one of {FACTOR_BITS}, got {self.factor_bits!r:.200}")
        self._check_widths()
        if not isinstance(self.minmax, bool):
            raise TypeError(f"minmax must be a bool, got {self.minmax!r:.200}")
        object.__setattr__(self, "num_residuals", min(self.num_residuals, self.block_size - 1))

    def _check_widths(self) -> None:
        bits = self.residual_bits
        if not _is_width(bits, 1) and (type(bits) is not int or bits != EXACT_BITS):
            raise ValueError(f"residual_bits must be 1..{MAX_CODE_BITS} or {EXACT_BITS}, got {bits!r:.200}")
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) is not None and bits == EXACT_BITS:
                raise ValueError(f"{name} must be None where rows are exact, got {getattr(self, name)!r:.200}")
        if self.value_bits is not None and not _is_width(self.value_bits, 0):
            raise ValueError(f"value_bits must be 0..{MAX_CODE_BITS}, got {self.value_bits!r:.200}")
        if self.key_bits is None:
            return
        if not isinstance(self.key_bits, (tuple, list)):
            raise TypeError(f"key_bits must be a tuple of {EIGHTHS} ints, got {self.key_bits!r:.200}")
        widths = tuple(self.key_bits)
        falling = all(a >= b for a, b in zip(widths, widths[1:]))
        if len(widths) != EIGHTHS or not all(_is_width(width, 0) for width in widths) or not falling:
            raise ValueError(f"key_bits must be {EIGHTHS} widths of 0..{MAX_CODE_BITS}, never rising, got {widths}")
        object.__setattr__(self, "key_bits", widths)

    @property
    def exact_rows(self) -> bool:
        """Whether residual rows are stored in the cache's own dtype."""
        return self.residual_bits == EXACT_BITS

    @property
    def orders_channels(self) -> bool:
        """Whether the channels of keys have different widths, so that their order is stored."""
        return self.key_bits is not None and len(set(self.key_bits)) > 1

    def key_segments(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """``(channels, bits)`` of each run of equally wide channels of a coded key, in stored order."""
        widths = self.key_bits or (self.residual_bits,) * EIGHTHS
        found: list[tuple[int, int]] = []
        for eighth, width in enumerate(widths):
            count = (eighth + 1) * head_dim // EIGHTHS - eighth * head_dim // EIGHTHS
            if found and found[-1][1] == width:
                found[-1] = (found[-1][0] + count, width)
            elif count:
                found.append((count, width))
        return tuple(found)

    def value_segments(self, head_dim_v: int) -> tuple[tuple[int, int], ...]:
        """``(channels, bits)`` of a coded value: one run of all channels."""
        return ((head_dim_v, self.residual_bits if self.value_bits is None else self.value_bits),)

    @property
    def keeps_every_row(self) -> bool:
        """Whether every row but the anchor is a residual: the low-rank part then serves routing only."""
        return self.num_residuals == self.block_size - 1

    def stored_rank(self, num_kv_heads: int, head_dim: int, head_dim_v: int) -> int:
        """Columns of ``u`` that are stored for blocks of this shape."""
        width = num_kv_heads * (head_dim if self.keeps_every_row else head_dim + head_dim_v)
        return min(self.rank, self.block_size - 1, width)


def _is_width(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= MAX_CODE_BITS


def code_parts(bits: int) -> tuple[int, ...]:
    """Widths 8, 4, 2, 1 that add up to ``bits``, the widest first: how a code is split into whole fields of a byte."""
    return tuple(part for part in (8, 4, 2, 1) if bits & part)


def code_bytes(segments: tuple[tuple[int, int], ...]) -> int:
    """Bytes of one row of codes."""
    return sum(-(-count * part // 8) for count, bits in segments for part in code_parts(bits))


@dataclasses.dataclass(frozen=True, eq=False)
class CompressedBlocks:
    """``N`` compressed blocks of ``S`` tokens for each of ``B`` sequences and ``H`` kv heads.

    Shapes use ``r`` stored rank, ``R`` residual rows, ``Q = ceil(R / 128)`` scale groups.
    A part that the format does not need is ``None``. The decoded values are defined in ``reference/README.md``.

    Attributes
    ----------
    format : BlockFormat
    anchor_k : array [B, N, H, D], cache dtype
    anchor_v : array [B, N, H, Dv], cache dtype
    u : array [B, N, S, r], int8, float16, bfloat16 or float32
        Row coefficients; the anchor's row is zero.
    u_scale : array [B, N, S], float16, or None
        Per-row scale of int8 ``u``.
    u_unit : array [B, N], float32
        Power of two that multiplies ``u``.
    basis_k : array [B, N, H, r, D], dtype of ``u``
    basis_k_scale : array [B, N, r], float32, or None
    basis_v : array [B, N, H, r, Dv], dtype of ``u``, or None
        Not stored where every row is a residual.
    basis_v_scale : array [B, N, r], float32, or None
    v_gain : array [B, N], float32, or None
        ``basis_v`` is divided by it.
    residual_indices : array [B, N, R], uint8, or None
        Positions in the block of the residual rows, ascending, never 0. Not stored where every row is one.
    residual_k : array [B, N, H, R, D], cache dtype, or uint8 codes [B, N, H, R, bytes]
    residual_k_scale, residual_k_min : array [B, N, H, Q, D], float16, or None
        Channels in stored order.
    residual_k_unit : array [B, N, H], float32, or None
    residual_k_order : array [B, N, H, D], uint8, or None
        The channel at each place of the stored order, where key channels have different widths.
    residual_v : array [B, N, H, R, Dv], cache dtype, or uint8 codes [B, N, H, R, bytes]
    residual_v_scale, residual_v_min : array [B, N, H, Q, Dv], float16, or None
    residual_v_unit : array [B, N, H], float32, or None
    k_min, k_max : array [B, N, H, D], cache dtype, or None
    block_counts : array [B], int32, or None
        Valid blocks of each sequence; all ``N`` where None. What lies beyond is never read.
    """

    format: BlockFormat
    anchor_k: Array
    anchor_v: Array
    u: Array
    u_unit: Array
    basis_k: Array
    residual_k: Array
    residual_v: Array
    residual_indices: Array = None
    u_scale: Array = None
    basis_k_scale: Array = None
    basis_v: Array = None
    basis_v_scale: Array = None
    v_gain: Array = None
    residual_k_scale: Array = None
    residual_k_min: Array = None
    residual_k_unit: Array = None
    residual_k_order: Array = None
    residual_v_scale: Array = None
    residual_v_min: Array = None
    residual_v_unit: Array = None
    k_min: Array = None
    k_max: Array = None
    block_counts: Array = None

    def parts(self) -> Iterator[tuple[str, Array]]:
        """Name and array of every stored part. Whatever walks a cache walks this."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "format" and value is not None:
                yield field.name, value

    def map(self, fn: Callable[[Array], Array]) -> CompressedBlocks:
        """The same blocks with ``fn`` applied to every stored array."""
        return dataclasses.replace(self, **{name: fn(part) for name, part in self.parts()})

    def map_heads(self, fn: Callable[[Array], Array]) -> CompressedBlocks:
        """The same blocks with ``fn`` applied to every stored array that has a kv-head axis, its axis 2."""
        own = {name: fn(part) for name, part in self.parts() if name not in SHARED_PARTS}
        return dataclasses.replace(self, **own)

    @property
    def batch_size(self) -> int:
        return int(self.anchor_k.shape[0])

    @property
    def num_blocks(self) -> int:
        return int(self.anchor_k.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.anchor_k.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.anchor_k.shape[3])

    @property
    def head_dim_v(self) -> int:
        return int(self.anchor_v.shape[3])

    @property
    def block_size(self) -> int:
        return self.format.block_size

    @property
    def rank(self) -> int:
        """Stored rank, at most ``format.rank``."""
        return int(self.u.shape[3])

    @property
    def num_residuals(self) -> int:
        return self.format.num_residuals

    @property
    def nbytes(self) -> int:
        """Bytes of every stored array."""
        return sum(int(part.nbytes) for _, part in self.parts())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the dense K and V rows that these blocks stand for, in the cache's dtype."""
        rows = self.block_size
        return rows * (int(self.anchor_k.nbytes) + int(self.anchor_v.nbytes))

    def save(self, path: str) -> None:
        """Write a versioned safetensors file with a checksum, through a temporary file and an atomic rename.

        Raises
        ------
        OSError
            As the system says; what was there is as before then.
        """
        from dkv import _files

        _files.save_blocks(self, path)

    @classmethod
    def load(cls, path: str, *, backend: str | None = None) -> CompressedBlocks:
        """Read what :meth:`save` wrote. ``backend`` picks the array library ("reference", "torch", "mlx").

        Raises
        ------
        ValueError
            When the file is not a whole dkv file as it was saved, is of another version, or its arrays do not fit its
            format. The message names the file.
        """
        from dkv import _files

        return _files.load_blocks(path, backend=backend)
