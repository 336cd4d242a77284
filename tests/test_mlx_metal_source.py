"""What the texts of the Metal kernels promise: limits of Metal, numbers in order, MLX's own text, mutants caught."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

mx: Any = pytest.importorskip("mlx.core")
import metal_mutants  # noqa: E402
from metal_host import compared_text, host, metal, needs_host  # noqa: E402

from dkv import testing  # noqa: E402
from dkv._dispatch import op_module  # noqa: E402
from dkv.kernels.mlx import _format, _metal, decode, route  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

pytestmark = needs_host
THREADGROUP_BYTES = 32768
SIZES = {"TILE": 128, "SIMDS": 4, "SELECT_SIMDS": 8}
BARRIERS = [mutant for file in metal_mutants.KERNELS["decode"][0] for mutant in metal_mutants.barriers(file)]


def threadgroup_bytes(file: str, **template: int) -> int:
    """Bytes of the threadgroup arrays of a source, all of 4 bytes a number."""
    sizes = re.findall(r"^threadgroup (?:float|uint) \w+\[([\w *]+)\];", _metal.text(file), re.M)
    return 4 * sum(eval(size, {"__builtins__": {}}, SIZES | template) for size in sizes)


@pytest.mark.parametrize("file", ["decode.metal", "route_scores.metal"])
def test_threadgroup_memory_suffices_for_every_format(file: str) -> None:
    used = {
        (rows, width, ranks): threadgroup_bytes(file, ROWS=rows, WIDTH=width, RANKS=ranks)
        for rows, width, ranks in itertools.product(_format.ROWS, _format.WIDTHS, _format.RANKS)
    }
    assert min(used.values()) > 0 and max(used.values()) <= THREADGROUP_BYTES, used


def test_the_host_counts_the_same_threadgroup_memory() -> None:
    inputs = testing.make_inputs(0, num_q_heads=2, head_dim=32, config=BlockFormat(16, 5, 6), library="mlx")
    with metal("checked"):
        op_module("mlx-metal", "route").route_scores(inputs.q, inputs.blocks, "lowrank", 0.3)
    report = host("checked").report
    assert report is not None
    assert report.threadgroup_bytes == threadgroup_bytes("route_scores.metal", ROWS=1, WIDTH=32, RANKS=32)


@pytest.mark.parametrize("file, names", [("decode.metal", decode.PARAMETERS), ("route_scores.metal", route.PARAMETERS)])
def test_numbers_come_in_the_order_in_which_they_are_read(file: str, names: tuple[str, ...]) -> None:
    read = re.findall(r"^const \w+ (\w+) = (?:as_type<float>\()?params\[(\d+)\]", _metal.text(file), re.M)
    assert [(name, str(index)) for index, name in enumerate(names)] == read
    assert f"first_run = {len(names)};" in _metal.text(file)


def test_every_kernel_is_built_once_under_a_name_of_its_own() -> None:
    folder, found = Path(_metal.__file__).parent, []
    for module in folder.glob("*.py"):
        found += re.findall(r"kernel\(\s*\"(\w+)\"", module.read_text(encoding="utf-8"))
    assert len(found) > 5 and len(set(found)) == len(found)
    arguments = "merge", ("outs", "lses", "sizes"), ("out", "lse"), "merge.metal", ("numbers.metal",)
    with metal("plain"):
        assert _metal.kernel(*arguments) is _metal.kernel(*arguments)


def test_the_text_is_the_one_that_mlx_compiles() -> None:
    """Of each kernel of a decode, by exporting the call; small arrays among them."""
    inputs = testing.make_inputs(0, batch=1, num_blocks=2, config=BlockFormat(16, 5, 6, minmax=True), library="mlx")
    with compared_text() as seen:
        for router in ("lowrank", "minmax"):
            route_blocks = op_module("mlx-metal", "route").route_blocks
            indices = route_blocks(inputs.q, inputs.blocks, 2, router, "kv_head", 0.2, 0, 0)
        arguments = inputs.q, inputs.blocks, inputs.k_window, inputs.v_window, indices
        op_module("mlx-metal", "decode").decode_attention(*arguments, None, None, None, None, 0.2)
    assert seen == {"decode", "merge", "route_scores", "route_rows", "route_select", "route_minmax"}


def test_what_mutants_are_tried_with_passes_as_it_is() -> None:
    whole = metal_mutants.Mutant("", 0, "nothing", "")
    for _, cases in metal_mutants.KERNELS.values():
        assert not metal_mutants.caught(whole, cases[:4])


@pytest.mark.parametrize("mutant", BARRIERS, ids=lambda mutant: f"{mutant.file}:{mutant.line}")
def test_decode_without_a_barrier_is_caught(mutant: metal_mutants.Mutant) -> None:
    cases: list[Callable[[], Callable[[], Any]]] = metal_mutants.DECODE[:4]  # all of one build
    assert metal_mutants.caught(mutant, cases)
