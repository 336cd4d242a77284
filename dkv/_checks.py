"""The one place where arguments are checked: what came, what is allowed, by the argument's name."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np

from dkv._dispatch import library_of
from dkv.config import DKVConfig
from dkv.types import BlockFormat, CompressedBlocks

LARGEST_INT = 2**31 - 1
DTYPES = ("float16", "bfloat16", "float32")
LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32 numbers


def dtype_name(array: Any) -> str:
    """ "float16", "torch.float16" and "mlx.core.float16" alike give "float16"."""
    return str(array.dtype).rpartition(".")[2]


def check_array(name: str, array: Any, axes: str, **sizes: int | None) -> None:
    """``axes`` such as "B Hkv N D"; ``sizes`` gives the axes whose length is known."""
    shape = getattr(array, "shape", None)
    if shape is None or not hasattr(array, "dtype"):
        raise TypeError(f"{name} must be an array [{axes.replace(' ', ', ')}], got {type(array).__qualname__}")
    names = axes.split()
    shape = tuple(shape)
    wrong = len(shape) != len(names) or any(
        sizes.get(axis) is not None and sizes[axis] != length for axis, length in zip(names, shape, strict=True)
    )
    if wrong:
        wanted = ", ".join(str(sizes[axis]) if sizes.get(axis) is not None else axis for axis in names)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(shape)}")


def check_float(name: str, array: Any) -> None:
    if dtype_name(array) not in DTYPES:
        raise TypeError(f"{name} must be one of {DTYPES}, got {dtype_name(array)}")


def check_real(name: str, array: Any) -> None:
    """Any width of floats or integers: what weighs or joins numbers of other dtypes."""
    if not dtype_name(array).startswith(("float", "bfloat", "int", "uint")):
        raise TypeError(f"{name} must hold real numbers, got {dtype_name(array)}")


def on_host(array: Any) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    return str(getattr(array, "device", "cpu")) == "cpu"


def check_device(**arrays: Any) -> None:
    """Torch arrays of one call sit on one device."""
    devices = {name: str(array.device) for name, array in arrays.items() if hasattr(array, "device")}
    if len(set(devices.values())) > 1:
        raise ValueError(f"arrays must be on one device, got {devices}")


def check_count(name: str, value: Any, low: int = 0, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r:.200}")
    if value < low:
        raise ValueError(f"{name} must be {low} or more, got {value}")


def whole_number(name: str, value: Any) -> int:
    """A number of any integer type as an int; bools are none, nor are floats."""
    if type(value) is bool or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {value!r}") from error


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r:.200}")


def check_window(window: Any, rows: int) -> int | None:
    """The window to use: one longer than the rows hides none of them, and kernels count it in 32 bits."""
    check_count("window", window, 1, optional=True)
    return None if window is None else min(window, max(rows, 1))


def check_positive(name: str, value: Any, optional: bool = True) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r:.200}")
    if isinstance(value, int) and value > LARGEST_INT:  # not every library takes one
        raise ValueError(f"{name} must be a float above {LARGEST_INT}, got an int of {value.bit_length()} bits")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive finite number, got {value}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r:.200}")


def check_config(config: Any, plain: bool = False) -> None:
    """``plain`` where one config stands for all heads that are given."""
    if not isinstance(config, DKVConfig):
        raise TypeError(f"config must be a DKVConfig, got {type(config).__qualname__}")
    if plain and config.splits_heads:
        raise ValueError(
            f"config has {'tiers' if config.tiers else 'a ratio'}: use cfg.head_groups(layer, num_kv_heads) "
            "and give each group's heads with its own config"
        )


def check_blocks(blocks: Any) -> None:
    if not isinstance(blocks, CompressedBlocks):
        raise TypeError(f"blocks must be CompressedBlocks, got {type(blocks).__qualname__}")
    if "_fits" in vars(blocks):
        return
    wrong = _misfit(blocks)
    if wrong is not None:  # kernels that walk memory by the format would leave the parts
        raise ValueError(f"blocks must fit their format: {wrong}")
    object.__setattr__(blocks, "_fits", True)  # the same object is given at every step


def _misfit(blocks: CompressedBlocks) -> str | None:
    """What does not fit of the parts' shapes and kinds of numbers."""
    for name in ("anchor_k", "anchor_v"):
        shape = getattr(getattr(blocks, name), "shape", None)
        if shape is None or len(shape) != 4:
            return f"{name} must be an array [B, N, H, channels], got {_described(getattr(blocks, name))}"
    lead, library = (blocks.batch_size, blocks.num_blocks), library_of(blocks.anchor_k)
    layout = _layout(blocks.format, blocks.num_kv_heads, blocks.head_dim, blocks.head_dim_v)
    wanted = {name: ((*lead, *shape), dtypes) for name, (shape, dtypes) in layout.items()}
    if blocks.block_counts is not None:
        wanted["block_counts"] = ((blocks.batch_size,), ("int32", "int64"))
    for name, (shape, dtypes) in wanted.items():
        part = getattr(blocks, name)
        array = hasattr(part, "shape") and hasattr(part, "dtype") and library_of(part) == library
        if not array or tuple(part.shape) != shape or dtype_name(part) not in dtypes:
            wanted_here = f"a {library} array of {' or '.join(dtypes)} [{', '.join(map(str, shape))}]"
            return f"{name} must be {wanted_here}, got {_described(part)}"
    return None


def _described(part: Any) -> str:
    if hasattr(part, "shape") and hasattr(part, "dtype"):
        return f"{library_of(part)} {dtype_name(part)} {list(part.shape)}"
    return type(part).__qualname__


@functools.lru_cache(maxsize=256)
def _layout(fmt: BlockFormat, heads: int, dim: int, dim_v: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape of every part of a block, and its dtypes: any of ours for one that holds floats."""
    from dkv.reference.storage import block_layout

    layout = block_layout(fmt, heads, dim, dim_v, "float32", "float32")
    return {
        name: (shape, (np.dtype(dtype).name,) if np.dtype(dtype).kind in "iu" else DTYPES)
        for name, (shape, dtype) in layout.items()
    }


def check_heads(q: Any, num_kv_heads: int) -> None:
    if q.shape[1] == 0 or num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(f"q must have a multiple of {num_kv_heads} heads (kv heads), got {q.shape[1]}")


def check_query(q: Any, blocks: CompressedBlocks) -> None:
    check_array("q", q, "B Hq Sq D", B=blocks.batch_size, D=blocks.head_dim)
    check_float("q", q)
    check_heads(q, blocks.num_kv_heads)


def check_integers(name: str, array: Any, axes: str, **sizes: int | None) -> None:
    check_array(name, array, axes, **sizes)
    if not dtype_name(array).startswith("int"):
        raise TypeError(f"{name} must hold signed integers, got {dtype_name(array)}")


def check_seq_lens(seq_lens: Any, batch: int, rows: int) -> None:
    """Shape and dtype; the values too where the array lives on the host (reading a device's would wait for it)."""
    if seq_lens is None:
        return
    check_integers("seq_lens", seq_lens, "B", B=batch)
    if on_host(seq_lens) and batch:
        low, high = int(seq_lens.min()), int(seq_lens.max())
        if low < 0 or high > rows:
            raise ValueError(f"seq_lens must be 0..{rows}, got {low}..{high}")


def check_channels(name: str, array: Any) -> None:
    if array.shape[3] == 0:
        raise ValueError(f"{name} must have at least one channel, got shape {tuple(array.shape)}")


def check_rows(q: Any, k: Any, v: Any) -> None:
    """Queries over plain rows."""
    check_array("q", q, "B Hq Sq D")
    check_float("q", q)
    check_array("k", k, "B Hkv Sk D", B=q.shape[0], D=q.shape[3])
    check_array("v", v, "B Hkv Sk Dv", B=q.shape[0], Hkv=k.shape[1], Sk=k.shape[2])
    check_float("k", k)
    check_float("v", v)
    check_heads(q, k.shape[1])
    check_channels("q", q)
    check_channels("v", v)


def check_logits(q: Any, sm_scale: Any, softcap: Any, sink: Any = None) -> float:
    """What shapes the logits; the scale to use."""
    for name, value in (("sm_scale", sm_scale), ("softcap", softcap)):
        check_positive(name, value)
        if value is not None and not LEAST <= value <= MOST:
            raise ValueError(
                f"{name} must be {LEAST:.2g}..{MOST:.2g}, as kernels multiply by it in float32, got {value}"
            )
    if sink is not None:
        check_array("sink", sink, "Hq", Hq=q.shape[1])
        check_real("sink", sink)
        if on_host(sink) and not bool((sink < float("inf")).all()):
            raise ValueError("sink must be finite, or -inf for none; got NaN or infinity")
    return float(q.shape[3] ** -0.5 if sm_scale is None else sm_scale)


def check_format(config: DKVConfig, dtype: str) -> None:
    """16-bit factors are stored in the cache's own 16-bit dtype, and as float16 in a float32 cache."""
    refused = {"fp16": ("bfloat16",), "bf16": ("float16", "float32")}.get(config.format, ())
    if dtype in refused:
        raise ValueError(f"format {config.format!r} cannot store factors of a {dtype} cache")
