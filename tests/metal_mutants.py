"""Kernels broken in one place at a time, and whether the host or the reference notices.

``python tests/metal_mutants.py [KERNEL | KERNEL:FILE ...]`` prints the table of all mutants: each barrier deleted, each
``if`` without its condition, each guard of a value without it. Such as compute the same whatever is broken are listed
with the reason why.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from metal_host import metal
from metal_row_cases import COMPRESS, PREFILL
from msl_host import MSLCompileError, MSLError
from strategies import poisoned

from dkv import testing
from dkv._dispatch import op_module
from dkv.kernels.mlx import _metal
from dkv.types import AttentionState, BlockFormat

BARRIER = re.compile(r"threadgroup_barrier\([^)]*\);")
IF = re.compile(r"\bif \(")

# file, condition -> why the kernel computes the same without it
EQUIVALENT = {
    ("rows.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("attend.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("route_scores.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("route_rows.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("route_minmax.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("route_select.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("decode.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("numbers.metal", "metal::isinf(x) || metal::isnan(x) ?"): "a mean of finite numbers of a type is in its range",
    ("merge.metal", "column == 0"): "all threads of a row hold the number that one writes",
    ("decode.metal", "channel == 0"): "all threads of a part hold the number that one writes",
    ("decode.metal", "e == 0"): "all threads of a part hold the number that one writes",
    ("decode.metal", "simd == SIMDS - 1"): "every simd-group computes the same anchors",
    ("route_scores.metal", "simd == SIMDS - 1"): "every simd-group computes the same anchors",
    ("route_select.metal", "mass > 0.0f ?"): "max takes no NaN, which 0 / 0 is",
    ("route_scores.metal", "group > 0"): "a barrier more than is needed",
    ("attend.metal", "live ?"): "the row weighs 0 in place of being skipped",
    ("decode.metal", "PARTS > 1"): "the sum of one part is the part",
    ("prefill.metal", "PARTS > 1"): "the sum of one part is the part",
    ("prefill.metal", "channel == 0"): "all threads of a part hold the number that one writes",
    ("gain.metal", "index == 0"): "all threads hold the number that one writes",
    ("unit_rows.metal", "index == 0"): "all threads hold the number that one writes",
    ("row_scales.metal", "index == 0"): "all threads hold the number that one writes",
    ("wide.metal", "lane == 0"): "all lanes hold the number that one writes",
    ("unit_rows.metal", "dim_v > 0"): "values without channels are nowhere far from their anchor",
    ("unit_rows.metal", "sum.high > 0.0f ?"): "max takes no NaN, which 0 / 0 is",
    ("unit_rows.metal", "length > 0.0f ?"): "it is 0 where subnormals are flushed alone",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``file`` with ``what`` of ``line`` broken."""

    file: str
    line: int
    what: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why nothing can be noticed, where nothing can."""
        return EQUIVALENT.get((self.file, self.what.removeprefix("if ")))


def barriers(file: str) -> Iterator[Mutant]:
    """Without its first barrier, without its second, and so on."""
    text = _metal.text(file)
    for match in BARRIER.finditer(text):
        yield _mutant(file, text, match.start(), match.end(), "", "barrier")


def guards(file: str) -> Iterator[Mutant]:
    """With one condition always true; of an ``if`` that skips what follows, never."""
    text = _metal.text(file)
    for match in IF.finditer(text):
        end = _closing(text, match.end() - 1)
        skips = re.match(r"\s*\{\s*continue", text[end + 1 :])
        condition = text[match.end() : end]
        yield _mutant(file, text, match.end(), end, "false" if skips else "true", f"if {' '.join(condition.split())}")
    clean = re.sub(r"//[^\n]*", lambda comment: " " * len(comment.group()), text)
    for match in re.finditer(r" \? ", clean):
        start = _condition_start(clean, match.start())
        if "constexpr" in clean[clean.rfind("\n", 0, start) + 1 : start]:
            continue  # a size, no guard
        yield _mutant(file, text, start, match.start(), "true", f"{clean[start : match.start()]} ?")


def _condition_start(text: str, end: int) -> int:
    """Where the condition of a conditional expression begins, of which ``end`` is the end."""
    depth = 0
    for position in range(end - 1, -1, -1):
        depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(text[position], 0)
        assigned = re.match(r"[^=!<>]=\s|[^:]: ", text[position - 1 : position + 2])
        if depth < 0 or (
            depth == 0 and (text[position] in ",;" or assigned or text[position - 6 : position] == "return")
        ):
            start = position + 1
            return start + len(text[start:end]) - len(text[start:end].lstrip())
    raise ValueError(f"a condition that ends at {end} and begins nowhere")


def _mutant(file: str, text: str, start: int, end: int, new: str, what: str) -> Mutant:
    new += "\n" * text.count("\n", start, end)
    return Mutant(file, text.count("\n", 0, start) + 1, what, text[:start] + new + text[end:])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"a parenthesis at {opening} that is never closed")


# what each kernel is tried with


def _decode(fmt: BlockFormat, op: str = "decode_attention", ragged: bool = True, **shape: Any) -> Callable[[], Any]:
    """A decode with repeats, -1 and, where ``ragged``, blocks beyond the counts, lengths, a window and sinks."""
    inputs, indices, options = _decode_inputs(fmt, op, ragged, tuple(shape.items()))
    return lambda: testing.assert_matches_reference("mlx-metal", op, inputs, **indices, **options)


@functools.cache
def _decode_inputs(fmt: BlockFormat, op: str, ragged: bool, shape: tuple[tuple[str, int], ...]) -> Any:
    made = testing.make_inputs(5, config=fmt, **{"q_len": 2, "num_blocks": 5, "window": 13} | dict(shape))
    rng, (batch, heads) = np.random.default_rng(6), made.blocks.anchor_k.shape[:3:2]
    total, window = made.blocks.num_blocks, made.k_window.shape[2]
    indices = rng.integers(-1, total + 2, (batch, heads, 9), np.int32)
    indices[..., :2] = total - 1  # the last block, twice
    counts = np.array([total, max(1, total - 1)] * batch, np.int32)[:batch]
    if not ragged:
        exact = op == "exact_attention"
        return (
            testing.to_library(made, "mlx"),
            {} if exact else {"block_indices": indices},
            {"causal": False} if exact else {},
        )
    if op in ("decode_attention", "exact_attention"):
        lengths = np.array([window, max(1, window - 3)] * batch, np.int32)[:batch]
        made.k_window[1:, :, window - 3 :], made.v_window[1:, :, window - 3 :] = np.nan, np.nan
        options = {"seq_lens": lengths, "window": 7, "sink": rng.standard_normal(made.q.shape[1]).astype(np.float32)}
    else:
        options = {}
    options["softcap"] = 15.0
    if op == "exact_attention":
        options["window"] = 2  # some rows no query of a tile sees
        return testing.to_library(made, "mlx"), {}, options
    made = made._replace(blocks=dataclasses.replace(made.blocks, block_counts=counts))
    return testing.to_library(made, "mlx"), {"block_indices": indices}, options


def _route(fmt: BlockFormat, router: str, **shape: Any) -> Callable[[], Any]:
    def run() -> None:
        inputs, want = _route_inputs(fmt, router, tuple(shape.items()))
        route = op_module("mlx-metal", "route")
        got = testing.to_numpy(route.route_scores(inputs.q, inputs.blocks, router, inputs.q.shape[-1] ** -0.5))
        got = np.where(np.isnan(got), -np.inf, got)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=2e-6, atol=1e-5)

    return run


@functools.cache
def _route_inputs(fmt: BlockFormat, router: str, shape: tuple[tuple[str, int], ...]) -> Any:
    made = testing.make_inputs(5, config=fmt, **{"q_len": 2, "num_blocks": 3} | dict(shape))
    counts = np.array([3, 1], np.int32)
    blocks = dataclasses.replace(made.blocks, block_counts=counts)
    if router != "minmax":  # whose NaN would count as what is expected
        blocks = poisoned(blocks, np.arange(3) >= counts[:, None])
    made = made._replace(blocks=blocks)
    made.q[0, 0, 0, 0] = np.nan
    want = op_module("reference", "route").route_scores(made.q, made.blocks, router)
    return testing.to_library(made, "mlx"), want


def _select(total: int, maxed: int, meaned: int) -> Callable[[], Any]:
    def run() -> None:
        rng = np.random.default_rng(total)
        scores = (2 * rng.standard_normal((4, maxed, meaned, total))).astype(np.float32)
        if maxed * meaned == 1:
            scores = scores.round(0)
        scores[0, ..., 1], scores[1, 0, 0, 2:4], scores[2] = np.nan, np.inf, -np.inf
        counts = np.array([total, total - 3], np.int32)
        select = op_module("mlx-metal", "route").select_scores
        twin = op_module("mlx-twin", "route")
        got = testing.to_numpy(select(mx.array(scores), mx.array(counts), 2, 2, 6, 1, 1))
        weights = twin._softmax_over_blocks(mx.array(scores).reshape(2, 2, maxed * meaned, total), mx.array(counts))
        share = weights.reshape(2, 2, maxed, meaned, total).max(2).mean(2)
        want = testing.to_numpy(twin.select_blocks(share, mx.array(counts), 6, 1, 1)).reshape(4, 1, -1)
        assert np.array_equal(got, np.repeat(want, 2, axis=1))
        got, every = select(mx.array(scores), None, 2, 1, 6, 0, 0), mx.array([total, total])
        assert np.array_equal(testing.to_numpy(got), testing.to_numpy(select(mx.array(scores), every, 2, 1, 6, 0, 0)))
        share = rng.choice([0.0, -0.0, 0.5, np.nan, np.inf, -np.inf, -2.0], (2, 2, total)).astype(np.float32)
        route = op_module("mlx-metal", "route")
        got = testing.to_numpy(route.select_blocks(mx.array(share), mx.array(counts), 6, 1, 1))
        assert np.array_equal(got, testing.to_numpy(twin.select_blocks(mx.array(share), mx.array(counts), 6, 1, 1)))

    return run


def _merge() -> None:
    rng = np.random.default_rng(1)
    parts = [
        AttentionState(*(rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 4, 37), (2, 3, 4)))) for _ in "abc"
    ]
    parts[0].lse[0], parts[1].lse[1], parts[2].lse[0, 0] = -np.inf, np.inf, np.inf
    parts[0].out[0], parts[1].out[1], parts[1].lse[0, 0] = np.nan, np.inf, np.inf
    parts[2].out[1, 0] = 3e38
    for part in parts:
        part.lse[:, 1] += 200.0
    got = testing.to_numpy(_public("mlx-metal")(testing.to_library(parts, "mlx")))
    want = op_module("reference", "merge").merge_states([part.out for part in parts], [part.lse for part in parts])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    for numbers, check in (((-6e4, -6e4), np.isfinite), ((np.inf, 1.0), np.isinf)):
        half = [AttentionState(np.full((1, 1, 1, 2), x, np.float16), np.zeros((1, 1, 1), np.float32)) for x in numbers]
        assert check(testing.to_numpy(_public("mlx-metal")(testing.to_library(half, "mlx"))).out).all()


def _public(backend: str) -> Callable[..., Any]:
    import dkv

    return functools.partial(dkv.merge_states, backend=backend)


MIXED = {"key_bits": (8, 6, 5, 4, 3, 2, 1, 0), "value_bits": 3}
DECODE = [  # those of the first build come first
    lambda: _decode(BlockFormat(16, 5, 6)),
    lambda: _decode(BlockFormat(16, 5, 0)),
    lambda: _decode(BlockFormat(16, 5, 6), ragged=False),
    lambda: _decode(BlockFormat(1, 0, 0)),
    lambda: _decode(BlockFormat(256, 5, 130, **MIXED), num_blocks=2, batch=1),
    lambda: _decode(BlockFormat(140, 100, 139), num_blocks=2, batch=1, head_dim=32, head_dim_v=31),
    lambda: _decode(BlockFormat(16, 0, 6, value_bits=0), "lowrank_attention"),
    lambda: _decode(BlockFormat(16, 0, 15, value_bits=0), "residual_attention"),
    lambda: _decode(BlockFormat(16, 5, 6), "exact_attention", window=300, q_len=12),
    lambda: _decode(BlockFormat(16, 5, 6), "exact_attention", ragged=False),
    lambda: _decode(BlockFormat(16, 5, 6, 16, 16)),
    lambda: _decode(BlockFormat(16, 5, 6), num_q_heads=2, num_kv_heads=1, q_len=1, head_dim=40, head_dim_v=130),
]  # fmt: skip
ROUTE = [
    *(functools.partial(_route, BlockFormat(16, 5, 6), router) for router in ("lowrank", "residual")),
    functools.partial(_route, BlockFormat(256, 5, 255, **MIXED), "keys"),
    functools.partial(_route, BlockFormat(256, 5, 255, **MIXED), "residual"),
    functools.partial(_route, BlockFormat(140, 100, 139), "keys"),
    functools.partial(_route, BlockFormat(16, 0, 6), "lowrank"),
    functools.partial(_route, BlockFormat(16, 5, 6, 16, 16), "residual"),
    functools.partial(_route, BlockFormat(16, 5, 6, 16, 16), "lowrank"),
    functools.partial(_route, BlockFormat(16, 5, 15), "lowrank"),
]
MINMAX = [functools.partial(_route, BlockFormat(16, 5, 6, minmax=True), "minmax")]
SELECT = [
    functools.partial(_select, 300, 2, 3),
    functools.partial(_select, 40, 1, 1),
    functools.partial(_select, 1030, 1, 1),
]
KERNELS: dict[str, tuple[tuple[str, ...], list[Callable[[], Callable[[], Any]]]]] = {
    "merge": (("merge.metal", "numbers.metal"), [lambda: _merge]),
    "decode": (("decode.metal", "attend.metal", "rows.metal"), DECODE),
    "route": (("route_scores.metal", "score.metal"), ROUTE),
    "minmax": (("route_minmax.metal",), MINMAX),
    "compress": (
        (
            *("gain.metal", "unit_rows.metal", "joint.metal", "distinct.metal", "select_rows.metal"),
            *("row_order.metal", "row_scales.metal", "row_codes.metal", "coded.metal", "wide.metal"),
        ),
        COMPRESS,
    ),
    "prefill": (("prefill.metal",), PREFILL),  # the rest of it is broken as part of decode and merge
    "select": (("route_rows.metal", "route_select.metal", "shares.metal"), SELECT),
}


def caught(mutant: Mutant, cases: list[Callable[[], Callable[[], Any]]], modes: tuple[str, ...] = ("checked",)) -> str:
    """By what a mutant is caught, the first line of it; empty where it is not."""
    real = _metal.text
    for mode in modes:
        with metal(mode, lambda file: mutant.text if file == mutant.file else real(file)):
            for case in cases:
                try:
                    case()()
                except MSLCompileError:
                    return ""  # a mutant of no use
                except (MSLError, AssertionError) as error:
                    return next((line for line in str(error).splitlines() if line.strip()), "another result")
    return ""


def main(names: list[str]) -> int:
    missed = 0
    for name, only in (argument.partition(":")[::2] for argument in names or KERNELS):
        files, cases = KERNELS[name]
        files = (only,) if only else files
        assert not caught(Mutant("", 0, "nothing", ""), cases), f"{name} is wrong before anything is broken"
        for mutant in [mutant for file in files for kind in (barriers, guards) for mutant in kind(file)]:
            if mutant.reason is not None:
                result = f"same: {mutant.reason}"
            else:
                result = caught(mutant, cases, ("checked", "random"))
                missed += not result
            what = " ".join(mutant.what.split())
            print(f"{name} | {mutant.file}:{mutant.line} | {what} | {result[:110] or 'NOT CAUGHT'}", flush=True)
    print(f"{missed} not caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
