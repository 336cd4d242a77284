"""What a kernel is held to: seeded inputs, conversions, tolerances with their reasons, and one comparison.

Ten lines test a new kernel::

    from dkv import testing
    from dkv.types import BlockFormat

    inputs = testing.make_inputs(0, dtype="float16", config=BlockFormat(16, 4, 5), library="torch")
    testing.assert_matches_reference("triton", "decode_attention", inputs)

    def my_kernel(q, blocks, block_indices, *, sm_scale=None, softcap=None):  # as dkv.lowrank_attention
        return out, lse

    testing.assert_matches_reference(my_kernel, "lowrank_attention", inputs, softcap=20.0)

Importing this needs NumPy; torch, mlx and ml_dtypes are imported when arrays of theirs are asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dkv._dispatch import library_of, op_module
from dkv.config import DKVConfig
from dkv.types import AttentionState, BlockFormat, CompressedBlocks

LIBRARIES = ("numpy", "torch", "mlx")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place of 1
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


class Tolerance(NamedTuple):
    """How far a result may lie from the reference.

    ``value`` counts relative to the largest number of the exact result, ``lse`` relative to the largest of 1 and the
    magnitudes in the exact lse. A result in low precision gets, beyond this, the error of the exact result rounded to
    its dtype and one more rounding.
    """

    value: float
    lse: float
    reason: str


_ATTENTION = {
    "float32": Tolerance(1e-5, 2e-6, "float32 accumulation: a logit of 30 carries 2e-6, and so does its weight"),
    "float16": Tolerance(1e-5, 2e-6, "float32 accumulation of float16 inputs; out is rounded once"),
    "bfloat16": Tolerance(1e-5, 2e-6, "float32 accumulation of bfloat16 inputs; out is rounded once"),
}
_BLOCKS = {
    "float32": Tolerance(1e-5, 4e-6, "float32 sums of codes up to 255 times their scale, in place of rows"),
    "float16": Tolerance(1e-5, 4e-6, "float32 sums over float16 or coded rows; out is rounded once"),
    "bfloat16": Tolerance(1e-5, 4e-6, "float32 sums over bfloat16 or coded rows; out is rounded once"),
}
# op -> dtype of the result -> tolerance. "compress_blocks" goes by the dtype of the stored factors.
TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "lowrank_attention": _BLOCKS,
    "residual_attention": _BLOCKS,
    "decode_attention": _BLOCKS,
    "exact_attention": _ATTENTION,
    "prefill_attention": _ATTENTION,
    "merge_states": {
        "float32": Tolerance(1e-6, 1e-6, "a weighted mean of a few numbers in float32"),
        "float16": Tolerance(1e-6, 1e-6, "merged in float32, rounded once"),
        "bfloat16": Tolerance(1e-6, 1e-6, "merged in float32, rounded once"),
    },
    "route_blocks": {
        dtype: Tolerance(2e-5, 0.0, "blocks whose probabilities differ by less tie in float32") for dtype in ROUNDING
    },
    "reconstruct_blocks": {
        dtype: Tolerance(1e-6, 0.0, "one float32 product of rank at most 128, rounded once") for dtype in ROUNDING
    },
    # relative excess of the squared low-rank error over the reference's, beside the rounding of the block's energy
    "compress_blocks": {
        "float32": Tolerance(1e-3, 0.0, "the best squared error by definition, times 1.001"),
        "float16": Tolerance(2e-2, 0.0, "rounding of float16 factors depends on the basis that the solver picks"),
        "bfloat16": Tolerance(2e-2, 0.0, "rounding of bfloat16 factors depends on the basis that the solver picks"),
        "int8": Tolerance(1.5e-1, 0.0, "rounding of int8 factors depends on the basis that the solver picks"),
    },
}
_FACTOR_ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-14, "bfloat16": 2.0**-11, "int8": 2.0**-10}


class Inputs(NamedTuple):
    """Arguments of every op, of one library.

    Attributes
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, N * S, D]
        The rows that ``blocks`` stand for.
    v : array [B, Hkv, N * S, Dv]
    k_window : array [B, Hkv, Sw, D]
    v_window : array [B, Hkv, Sw, Dv]
    blocks : CompressedBlocks
        Made by the reference from ``k`` and ``v``.
    config : DKVConfig
    """

    q: Any
    k: Any
    v: Any
    k_window: Any
    v_window: Any
    blocks: CompressedBlocks
    config: DKVConfig


def make_inputs(
    seed: int,
    *,
    batch: int = 2,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 24,
    head_dim_v: int = 20,
    num_blocks: int = 3,
    window: int = 13,
    q_len: int = 1,
    dtype: str = "float32",
    config: DKVConfig | BlockFormat | None = None,
    library: str = "numpy",
) -> Inputs:
    """Seeded inputs that look like a cache: biased channels, a low-rank part, noise, and no two axes of one size.

    Parameters
    ----------
    seed : int
    batch, num_q_heads, num_kv_heads, head_dim, head_dim_v, num_blocks, window, q_len : int
        Each may be 0 where the ops allow it.
    dtype : {"float32", "float16", "bfloat16"}
    config : DKVConfig or BlockFormat, optional
        Small blocks of 16 tokens with some residual rows when None. A format stands for itself, with the other
        settings at their defaults.
    library : {"numpy", "torch", "mlx"}
    """
    if config is None:
        config = DKVConfig(block_size=16, rank=5, num_residuals=6, top_k=2)
    fmt = config if isinstance(config, BlockFormat) else config.block_format
    if isinstance(config, BlockFormat):
        config = DKVConfig(block_size=max(2, fmt.block_size), router="minmax" if fmt.minmax else "lowrank")
    rng, kind = np.random.default_rng(seed), _numpy_dtype(dtype)
    tokens = num_blocks * fmt.block_size

    def rows(dim: int, spread: float, bias: float) -> np.ndarray:
        hidden, length = 3, tokens + window
        smooth = rng.standard_normal((batch, num_kv_heads, length, hidden))
        smooth = smooth @ rng.standard_normal((num_kv_heads, hidden, dim))
        noise = rng.standard_normal((batch, num_kv_heads, length, dim))
        return (spread * (0.7 * smooth + 0.5 * noise) + bias * rng.standard_normal((num_kv_heads, 1, dim))).astype(kind)

    k, v = rows(head_dim, 1.0, 2.0), rows(head_dim_v, 0.6, 0.3)
    q = rng.standard_normal((batch, num_q_heads, q_len, head_dim)).astype(kind)
    k, k_window = k[:, :, :tokens], k[:, :, tokens:]
    v, v_window = v[:, :, :tokens], v[:, :, tokens:]
    parts = op_module("reference", "compress").compress_blocks(k, v, fmt, config.keep)
    made = Inputs(q, k, v, k_window, v_window, CompressedBlocks(format=fmt, **parts), config)
    return to_library(made, library)


def to_library(x: Any, library: str, device: Any = None) -> Any:
    """A copy of NumPy arrays in another library.

    Parameters
    ----------
    x : array, AttentionState, CompressedBlocks, Inputs, list, tuple or None
    library : {"numpy", "torch", "mlx"}
    device : optional
        Of torch tensors.

    Raises
    ------
    ImportError
        For bfloat16 arrays when ml_dtypes is missing, and when the library is.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {LIBRARIES}, got {library!r}")
    if library == "numpy":
        return to_numpy(x)
    if library == "mlx":
        return _walk(x, _to_mlx)
    import torch

    def convert(array: np.ndarray) -> Any:
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    return _walk(x, convert)


def to_numpy(x: Any) -> Any:
    """The inverse of :func:`to_library`; bfloat16 tensors become ``ml_dtypes.bfloat16`` arrays. Always a copy."""

    def convert(array: Any) -> np.ndarray:
        library = library_of(array)
        if library == "torch":
            array = array.detach().cpu()
            if str(array.dtype) == "torch.bfloat16":
                bits = array.contiguous().view(_torch().int16).numpy()
                return bits.view(_numpy_dtype("bfloat16")).copy()
            return array.numpy().copy()
        if library == "mlx":
            if str(array.dtype) == "mlx.core.bfloat16":
                return np.array(array.view(_mlx().uint16)).view(_numpy_dtype("bfloat16"))
            return np.array(array)
        if library in ("numpy", "ml_dtypes"):
            return np.array(array)
        raise TypeError(f"x must hold NumPy, torch or mlx arrays, got {type(array).__qualname__}")

    return _walk(x, convert)


def _walk(x: Any, convert: Callable[[Any], Any]) -> Any:
    if x is None:
        return None
    if isinstance(x, CompressedBlocks):
        return x.map(convert)
    if isinstance(x, AttentionState):
        return AttentionState(convert(x.out), convert(x.lse))
    if isinstance(x, Inputs):
        return x._replace(**{name: _walk(getattr(x, name), convert) for name in x._fields if name != "config"})
    if isinstance(x, (list, tuple)):
        return type(x)(_walk(part, convert) for part in x)
    return convert(x)


def _torch() -> Any:
    import torch

    return torch


def _mlx() -> Any:
    import mlx.core

    return mlx.core


def _to_mlx(array: np.ndarray) -> Any:
    """MLX would narrow float64 where no dtype is named."""
    if array.dtype.name == "bfloat16":
        return _mlx().array(np.ascontiguousarray(array).view(np.uint16)).view(_mlx().bfloat16)
    return _mlx().array(array, dtype=getattr(_mlx(), array.dtype.name.replace("bool", "bool_")))


def _numpy_dtype(name: str) -> np.dtype:
    if name not in ROUNDING:
        raise ValueError(f"dtype must be one of {tuple(ROUNDING)}, got {name!r}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 in NumPy needs ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def assert_matches_reference(backend: str | Callable[..., Any], op: str, inputs: Inputs, **options: Any) -> Any:
    """Run ``op`` and hold the result against the reference in float64.

    Parameters
    ----------
    backend : str or callable
        A backend's name, or a function with the arguments of ``dkv.<op>`` (without ``backend``).
    op : str
        A key of ``TOLERANCES``.
    inputs : Inputs
        From :func:`make_inputs`. ``exact_attention`` takes the window's rows as keys, ``prefill_attention`` all rows,
        ``merge_states`` the reference's states of the three parts of a decode.
    **options
        Further arguments of the op. The block indices of attention ops are the reference's where none are given, so
        that both sides attend the same blocks.

    Returns
    -------
    The op's result.

    Raises
    ------
    AssertionError
        It names op, dtype, largest error, tolerance and the reason for it. Also raised where the op changed its inputs,
        where a number of the result is not finite but the reference's is, and where shape, dtype or library differ.
    """
    if op not in TOLERANCES:
        raise ValueError(f"op must be one of {tuple(TOLERANCES)}, got {op!r}")
    arguments, options = _arguments(op, inputs, options)
    run = _public(op, backend) if isinstance(backend, str) else backend
    before = to_numpy([part for part in (*arguments, *options.values()) if _is_data(part)])
    result = run(*arguments, **options)
    after = to_numpy([part for part in (*arguments, *options.values()) if _is_data(part)])
    if not _same_bits(before, after):
        raise AssertionError(f"{op} changed its inputs")
    library = library_of(inputs.q)
    made = library_of(next(_arrays(result)))
    if made != library:
        raise AssertionError(f"{op} returned {made} arrays for {library} inputs")
    got = to_numpy(result)
    wide, known = to_numpy(arguments), {name: to_numpy(x) if _is_data(x) else x for name, x in options.items()}
    if op == "compress_blocks":
        _compare_blocks(got, *wide, **known)
    elif op == "route_blocks":
        _compare_routes(got, wide, known)
    elif op == "reconstruct_blocks":
        exact = op_module("reference", "compress").reconstruct_blocks(_widened(wide[0]))
        for name, part, want in zip(("k", "v"), got, exact, strict=True):
            _compare(op, name, part, want, wide[0].anchor_k.dtype.name, TOLERANCES[op])
    else:
        exact = _exact_state(op, wide, known)
        dtype = (wide[0][0].out if op == "merge_states" else wide[0]).dtype.name
        _compare(op, "out", got[0], exact[0], dtype, TOLERANCES[op])
        _compare_lse(op, got[1], exact[1], dtype)
    return result


def _public(op: str, backend: str) -> Callable[..., Any]:
    import dkv

    def run(*arguments: Any, **options: Any) -> Any:
        fmt = options.get("config")
        if op == "compress_blocks" and isinstance(fmt, BlockFormat):  # formats that no DKVConfig stands for
            settings = (
                fmt,
                options.get("keep", "distinct"),
                options.get("token_weight"),
                options.get("channel_weight"),
            )
            made = op_module(backend, "compress").compress_blocks(*arguments, *settings)
            return CompressedBlocks(format=fmt, **made) if isinstance(made, dict) else made
        return getattr(dkv, op)(*arguments, backend=backend, **options)

    return run


def _arguments(op: str, inputs: Inputs, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the public op, in the library of the inputs and on their device."""
    library, config = library_of(inputs.q), inputs.config
    device = inputs.q.device if library == "torch" else None

    def own(x: Any) -> Any:
        return to_library(to_numpy(x), library, device)

    options = {name: own(x) if _is_data(x) else x for name, x in options.items()}
    if op in ("lowrank_attention", "residual_attention", "decode_attention") and options.get("block_indices") is None:
        names = ("top_k", "router", "share", "sink_blocks", "recent_blocks")
        settings = {name: getattr(config, name) for name in names}
        indices = op_module("reference", "route").route_blocks(to_numpy(inputs.q), to_numpy(inputs.blocks), **settings)
        options["block_indices"] = own(indices)
    if op in ("lowrank_attention", "residual_attention"):
        return (inputs.q, inputs.blocks, options.pop("block_indices")), options
    if op == "decode_attention":
        return (inputs.q, inputs.blocks, inputs.k_window, inputs.v_window), {"config": config} | options
    if op == "exact_attention":
        return (inputs.q, inputs.k_window, inputs.v_window), options
    if op == "prefill_attention":
        wide = to_numpy(inputs)
        rows = (np.concatenate([wide.k, wide.k_window], axis=2), np.concatenate([wide.v, wide.v_window], axis=2))
        if options.get("block_indices") is None:
            limits = ("top_k", "ratio", "mass", "stride")
            settings = {name: getattr(config, f"prefill_{name}") for name in limits}
            settings |= {"block_size": config.prefill_keys, "prefill_block": config.prefill_block}
            settings["prefill_window"] = config.prefill_window
            indices = op_module("reference", "prefill").select_key_blocks(
                wide.q, rows[0], sm_scale=options.get("sm_scale"), **settings
            )
            options["block_indices"] = own(indices)
        return (inputs.q, *own(rows)), {"config": config} | options
    if op == "merge_states":
        wide, reference = to_numpy(inputs), op_module("reference", "decode")
        indices = op_module("reference", "route").route_blocks(wide.q, wide.blocks, config.top_k)
        states = [
            reference.lowrank_attention(wide.q, wide.blocks, indices),
            reference.residual_attention(wide.q, wide.blocks, indices),
            reference.exact_attention(wide.q, wide.k_window, wide.v_window),
        ]
        return ([own(AttentionState(*state)) for state in states],), options
    if op == "compress_blocks":
        fmt = inputs.blocks.format
        same = config.block_format == fmt and "keep" not in options
        return (inputs.k, inputs.v), {"config": config if same else fmt} | options
    return (inputs.blocks,) if op == "reconstruct_blocks" else (inputs.q, inputs.blocks), options


def _exact_state(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> AttentionState:
    """The reference's state with its output in float64."""
    options, config = dict(options), options.get("config")
    options.pop("config", None)
    if op == "merge_states":
        outs, lses = zip(*((state.out.astype(np.float64), state.lse) for state in arguments[0]), strict=True)
        return AttentionState(*op_module("reference", "merge").merge_states(outs, lses))
    if op == "prefill_attention":
        config = config or DKVConfig()
        options |= {"block_size": config.prefill_keys, "prefill_block": config.prefill_block}
    base = options.pop("lse_base", "e")
    fn = getattr(op_module("reference", "prefill" if op == "prefill_attention" else "decode"), op)
    out, lse = fn(arguments[0].astype(np.float64), *arguments[1:], **options)
    return AttentionState(out, lse if base == "e" else lse / math.log(2))


def _compare(op: str, name: str, got: np.ndarray, exact: np.ndarray, dtype: str, table: dict[str, Tolerance]) -> None:
    tolerance = table[dtype]
    _compare_form(op, name, got, exact.shape, dtype)
    _compare_finite(op, name, got, exact, dtype)
    got, exact = np.where(np.isfinite(exact), got, 0).astype(np.float64), np.where(np.isfinite(exact), exact, 0)
    rounded = np.abs(exact.astype(_numpy_dtype(dtype)).astype(np.float64) - exact)
    allowed = tolerance.value * np.max(np.abs(exact), initial=0.0)
    if dtype != "float32":
        allowed = allowed + rounded + ROUNDING[dtype] * np.abs(exact) + SMALLEST[dtype]
    _refuse(op, name, dtype, np.abs(got - exact), allowed, tolerance.reason)


def _compare_lse(op: str, got: np.ndarray, exact: np.ndarray, dtype: str) -> None:
    tolerance = TOLERANCES[op][dtype]
    _compare_form(op, "lse", got, exact.shape, "float32")
    _compare_finite(op, "lse", got, exact, dtype)
    finite = np.isfinite(exact)
    error = np.abs(np.where(finite, got, 0).astype(np.float64) - np.where(finite, exact, 0))
    allowed = tolerance.lse * max(1.0, np.max(np.abs(exact), initial=0.0, where=finite))
    _refuse(op, "lse", dtype, error, allowed, tolerance.reason)


def _compare_form(op: str, name: str, got: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    if got.shape != shape or got.dtype.name != dtype:
        raise AssertionError(f"{op}: {name} must be {dtype} {list(shape)}, got {got.dtype.name} {list(got.shape)}")


def _compare_finite(op: str, name: str, got: np.ndarray, exact: np.ndarray, dtype: str) -> None:
    got, finite = got.astype(np.float64), np.isfinite(exact)
    same = np.where(finite, np.isfinite(got), (got == exact) | (np.isnan(got) & np.isnan(exact)))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(f"{op} {dtype}: {name}{list(at)} is {got[at]}, the reference says {exact[at]}")


def _refuse(op: str, name: str, dtype: str, error: np.ndarray, allowed: np.ndarray | float, reason: str) -> None:
    if (error <= allowed).all():
        return
    allowed = np.broadcast_to(allowed, error.shape)
    at = np.unravel_index(np.argmax(error - allowed), error.shape)
    where = [int(i) for i in at]
    raise AssertionError(
        f"{op} {dtype}: {name}{where} is off by {error[at]:.3g}, allowed are {allowed[at]:.3g} ({reason}); "
        f"largest error {error.max():.3g}, {(error > allowed).sum()} of {error.size} beyond"
    )


def _compare_routes(got: np.ndarray, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Same sets, but for blocks whose probabilities tie."""
    reference, (q, blocks) = op_module("reference", "route"), arguments
    want = reference.route_blocks(q, blocks, **options)
    _compare_form("route_blocks", "block_indices", got, want.shape, "int32")
    if (got == want).all():
        return
    tolerance = TOLERANCES["route_blocks"][q.dtype.name]
    B, H, _ = want.shape
    scores = reference.route_scores(q, blocks, options.get("router", "lowrank"), options.get("sm_scale"))
    p = reference.block_probabilities(scores).mean(axis=2).reshape(B, H, -1, scores.shape[-1]).mean(axis=2)
    if options.get("share") == "all":
        p = np.repeat(p.mean(axis=1, keepdims=True), H, axis=1)
    for b, h in np.ndindex(B, H):
        mine, theirs = got[b, h], want[b, h]
        used = mine[mine >= 0]
        if (np.diff(used) <= 0).any() or (mine[len(used) :] != -1).any() or len(used) != (theirs >= 0).sum():
            raise AssertionError(f"route_blocks: {mine.tolist()} must be {(theirs >= 0).sum()} ascending, then -1")
        extra, missed = np.setdiff1d(used, theirs), np.setdiff1d(theirs[theirs >= 0], used)
        if (extra >= p.shape[-1]).any():
            raise AssertionError(f"route_blocks: {mine.tolist()} names blocks beyond {p.shape[-1]}")
        gap = np.max(p[b, h, missed], initial=0.0) - np.min(p[b, h, extra], initial=1.0) if len(extra) else 0.0
        if gap > tolerance.value:
            raise AssertionError(
                f"route_blocks {q.dtype.name}: row {b}, kv head {h} took {mine.tolist()}, the reference "
                f"{theirs.tolist()}; probabilities differ by {gap:.3g}, "
                f"allowed are {tolerance.value:.3g} ({tolerance.reason})"
            )


def _compare_blocks(
    got: CompressedBlocks,
    k: np.ndarray,
    v: np.ndarray,
    config: DKVConfig | BlockFormat,
    token_weight: np.ndarray | None = None,
    channel_weight: np.ndarray | None = None,
    keep: str | None = None,
) -> None:
    """Exact parts bit by bit, factors by their product, coded rows by squared error, what is chosen up to near-ties."""
    reference = op_module("reference", "compress")
    fmt = config if isinstance(config, BlockFormat) else config.block_format
    keep = keep or getattr(config, "keep", "distinct")
    want = CompressedBlocks(format=fmt, **reference.compress_blocks(k, v, fmt, keep, token_weight, channel_weight))
    if got.format != fmt:
        raise AssertionError(f"compress_blocks: format must be {fmt}, got {got.format}")
    for field in dataclasses.fields(CompressedBlocks):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        if field.name == "format" or (mine is None and theirs is None):
            continue
        if mine is None or theirs is None:
            raise AssertionError(f"compress_blocks: {field.name} must {'not ' * (theirs is None)}be stored")
        _compare_form("compress_blocks", field.name, mine, theirs.shape, theirs.dtype.name)
        if mine.dtype.kind not in "iu" and not np.isfinite(mine.astype(np.float64)).all():
            raise AssertionError(f"compress_blocks: {field.name} holds a number that is not finite")
    for name in ("anchor_k", "anchor_v", "k_min", "k_max"):
        if getattr(got, name) is not None and not _same_bits(getattr(got, name), getattr(want, name)):
            raise AssertionError(f"compress_blocks: {name} must be the exact rows")
    if got.u[:, :, 0].astype(np.float64).any():
        raise AssertionError("compress_blocks: row 0 of u must be zero")
    size = fmt.block_size
    for b, n in np.ndindex(got.u.shape[:2]):
        rows = slice(n * size, (n + 1) * size)
        weight = None if token_weight is None else token_weight[b, rows].astype(np.float64)
        where, mine = f"row {b}, block {n}", _block(got, b, n)
        _compare_block(mine, _block(want, b, n), k[b, :, rows], v[b, :, rows], str(keep), weight, where)
        if not fmt.exact_rows:
            _compare_codes(mine, k[b, :, rows], v[b, :, rows], channel_weight, where)


def _block(blocks: CompressedBlocks, b: int, n: int) -> CompressedBlocks:
    return blocks.map(lambda part: part[b : b + 1, n : n + 1])


def _compare_block(
    got: CompressedBlocks,
    want: CompressedBlocks,
    k: np.ndarray,
    v: np.ndarray,
    keep: str,
    weight: np.ndarray | None,
    where: str,
) -> None:
    reference, storage = op_module("reference", "compress"), op_module("reference", "storage")
    fmt, kept = got.format, storage.residual_positions(got)[0, 0]
    exact_k, exact_v, k, v = k, v, k.astype(np.float64), v.astype(np.float64)
    dk, dv = k - k[:, :1], v - v[:, :1]  # [H, S, D]

    gain = 1.0 if want.v_gain is None else float(want.v_gain[0, 0])
    joint = _joint(dk, None if fmt.keeps_every_row else gain * dv)
    norm = np.maximum(np.linalg.norm(joint, axis=1, keepdims=True), reference.NORM_FLOOR)
    factor = got.u.dtype.name
    tolerance, energy = TOLERANCES["compress_blocks"][factor], float(np.square(joint / norm).sum())
    mine, theirs = (
        float(np.square((joint - _lowrank_rows(blocks, storage, gain)) / norm)[1:].sum()) for blocks in (got, want)
    )
    allowed = (1 + tolerance.value) * theirs + _FACTOR_ROUNDING[factor] ** 2 * energy
    if mine > allowed:
        raise AssertionError(
            f"compress_blocks {factor}: {where}: squared low-rank error {mine:.6g}, allowed are {allowed:.6g} "
            f"({tolerance.reason}); the reference has {theirs:.6g}"
        )

    if (np.diff(kept) <= 0).any() or (kept < 1).any() or (kept >= fmt.block_size).any():
        raise AssertionError(f"compress_blocks: {where}: residual_indices must ascend within the block, got {kept}")
    if not np.array_equal(kept, storage.residual_positions(want)[0, 0]):
        u, basis = reference.truncated_svd(joint / norm, got.rank)
        score = np.square(joint - norm * u @ basis).sum(axis=1) if keep == "error" else reference.distinctness(v)
        score = score if weight is None else score * weight
        left_out = np.setdiff1d(np.arange(1, fmt.block_size), kept)
        gap = score[left_out].max() - score[kept].min()
        if gap > 1e-6 * max(score.max(), 1e-6):
            raise AssertionError(f"compress_blocks: {where}: a kept row scores {gap:.3g} below one left out ({keep!r})")

    if fmt.exact_rows:
        stored = zip(("residual_k", "residual_v"), (got.residual_k, got.residual_v), (exact_k, exact_v), strict=True)
        for name, part, rows in stored:
            if not _same_bits(part[0, 0], rows[:, kept]):
                raise AssertionError(f"compress_blocks: {where}: {name} must hold the exact rows")


def _compare_codes(
    got: CompressedBlocks, k: np.ndarray, v: np.ndarray, channel_weight: np.ndarray | None, where: str
) -> None:
    """Coded rows by the squared error that the reference makes of the same rows and channels in the same order."""
    storage, fmt = op_module("reference", "storage"), got.format
    kept = storage.residual_positions(got)[0, 0]
    k, v = k.astype(np.float64), v.astype(np.float64)
    rows_k, (H, _, D) = (k - k[:, :1])[:, kept], k.shape
    if fmt.orders_channels:
        order = got.residual_k_order[0, 0].astype(np.int64)
        if (np.sort(order, axis=1) != np.arange(D)).any():
            raise AssertionError(
                f"compress_blocks: {where}: residual_k_order must hold every channel once, got {order}"
            )
        weight = np.ones((H, D)) if channel_weight is None else channel_weight.astype(np.float64)
        importance = np.take_along_axis(storage.channel_importance(rows_k, weight), order, axis=1)
        if (np.diff(importance, axis=1) > 1e-6 * importance[:, :-1]).any():
            raise AssertionError(f"compress_blocks: {where}: residual_k_order must descend in importance, got {order}")
        rows_k = np.take_along_axis(rows_k, order[:, None], axis=2)
    for name, rows, segments, largest in (
        ("residual_k", rows_k, fmt.key_segments(D), np.abs(k).max()),
        ("residual_v", v[:, kept], fmt.value_segments(v.shape[2]), np.abs(v).max()),
    ):
        parts = storage.store_rows(rows, segments, name)
        stored = {part: x.astype(getattr(got, part).dtype)[None, None] for part, x in parts.items()}
        want = dataclasses.replace(got, **stored)
        mine, theirs = (
            _group_norms(storage.decoded(blocks, name, segments)[0, 0] - rows, storage) for blocks in (got, want)
        )
        # float32 may round a minimum and a step to the float16 number beside the reference's, in few groups
        levels = np.repeat([2**bits - 1 for _, bits in segments], [count for count, _ in segments])  # [D]
        apart = 2 * ROUNDING["float16"] * (np.abs(parts[f"{name}_min"]) + levels * parts[f"{name}_scale"])  # [H, Q, D]
        apart = parts[f"{name}_unit"][:, None, None] * (apart + (levels + 1) * SMALLEST["float16"])
        apart = (apart + 1e-12 * largest) * _group_norms(np.ones_like(rows), storage)
        what, kind = f"error of {name} of {where}", got.u.dtype.name
        reason = "the reference's error of the group, and a float16 number apart"
        _refuse("compress_blocks", what, kind, mine, 1.001 * theirs + apart, reason)
        one = (2 * theirs * apart + np.square(apart)).max(initial=0.0)  # what one group apart adds to the squares
        total, allowed = np.sqrt(np.square(mine).sum(keepdims=True)), np.sqrt(np.square(1.01 * theirs).sum() + one)
        _refuse(
            "compress_blocks", f"total {what}", kind, total, allowed, "the reference's, and one float16 number apart"
        )


def _group_norms(error: np.ndarray, storage: Any) -> np.ndarray:
    """Norm of ``error [H, R, D]`` over the rows of each group, ``[H, Q, D]``."""
    norms = [np.linalg.norm(group, axis=1) for group in storage.row_groups(error)]
    return np.stack(norms, axis=1) if norms else np.zeros((error.shape[0], 0, error.shape[2]))


def _joint(dk: np.ndarray, dv: np.ndarray | None) -> np.ndarray:
    """``[H, S, D]`` and ``[H, S, Dv]`` as ``[S, H * (D + Dv)]``."""
    parts = [dk] if dv is None else [dk, dv]
    return np.concatenate([x.swapaxes(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2]) for x in parts], axis=1)


def _lowrank_rows(blocks: CompressedBlocks, storage: Any, gain: float) -> np.ndarray:
    u, basis_k, basis_v = storage.lowrank_factors(blocks)
    return _joint(u[0, 0] @ basis_k[0, 0], None if basis_v is None else gain * (u[0, 0] @ basis_v[0, 0]))


def _widened(blocks: CompressedBlocks) -> CompressedBlocks:
    """Anchors in float64, so that rebuilt rows are not rounded to the cache's dtype."""
    return dataclasses.replace(
        blocks, anchor_k=blocks.anchor_k.astype(np.float64), anchor_v=blocks.anchor_v.astype(np.float64)
    )


def _is_data(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return bool(x) and all(_is_data(part) for part in x)
    return isinstance(x, (CompressedBlocks, AttentionState)) or hasattr(x, "dtype")


def _arrays(x: Any) -> Any:
    if isinstance(x, CompressedBlocks):
        yield from (part for _, part in x.parts())
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _arrays(part)
    elif x is not None:
        yield x


def _same_bits(a: Any, b: Any) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(_arrays(a), _arrays(b), strict=True)
    )
