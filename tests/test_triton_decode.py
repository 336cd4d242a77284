"""What the Triton decode alone has: a workspace, splits of one sequence's work, and bits that no batch mate changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS

from dkv import testing
from dkv.types import BlockFormat

pytestmark = pytest.mark.skipif("triton" not in BACKENDS, reason="needs triton, and a GPU or TRITON_INTERPRET=1")

SOME_ROWS, EVERY_ROW = BlockFormat(16, 5, 6), BlockFormat(16, 5, 15)
WIDTH, WINDOW = 40, 300  # two slots a split at most, two stretches of the window


def made(fmt: BlockFormat, batch: int = 1, num_blocks: int = 5, **shape: Any) -> tuple[testing.Inputs, Any]:
    """Inputs, and all their blocks among many slots that hold -1, repeats and blocks that are not there."""
    inputs = testing.make_inputs(
        21, config=fmt, batch=batch, num_blocks=num_blocks, window=WINDOW, library="torch", **shape
    )
    rng = np.random.default_rng(22)
    indices = rng.integers(-1, num_blocks + 3, (batch, 2, WIDTH), np.int32)
    return inputs, testing.to_library(indices, "torch")


def run(inputs: testing.Inputs, indices: Any, **options: Any) -> Any:
    from dkv.kernels.triton import decode

    arguments = inputs.q, inputs.blocks, inputs.k_window, inputs.v_window, indices
    return decode.decode_attention(*arguments, None, None, None, None, 0.2, **options)


def size_of(inputs: testing.Inputs, indices: Any) -> int:
    from dkv.kernels.triton import decode

    return decode.workspace_size(inputs.q, inputs.blocks, indices, inputs.k_window, inputs.v_window)


def same(a: Any, b: Any) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(testing.to_numpy(a), testing.to_numpy(b), strict=True))


@pytest.mark.parametrize("fmt", [SOME_ROWS, EVERY_ROW])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_workspace_holds_before_is_not_read(fmt: BlockFormat, dtype: str) -> None:
    import torch

    inputs, indices = made(fmt, dtype=dtype)
    size = size_of(inputs, indices)
    assert size > 0
    want = run(inputs, indices)
    workspace = torch.full((size + 5,), torch.nan)
    assert same(run(inputs, indices, workspace=workspace), want)
    assert not workspace[:size].isnan().any()  # every state is written, those of splits without work too
    assert workspace[size:].isnan().all()


def test_partial_states_are_float32_and_empty_ones_exact() -> None:
    import torch

    inputs, indices = made(SOME_ROWS, dtype="bfloat16")
    indices[:, :, 16:] = -1  # a split of slots without work
    size = size_of(inputs, indices)
    workspace = torch.empty(size)
    run(inputs, indices, workspace=workspace)
    rows, dim = inputs.q.shape[1] * inputs.q.shape[2], inputs.blocks.head_dim_v
    splits = size // (rows * (dim + 1))
    out, lse = (
        workspace[: splits * rows * dim].view(splits, rows, dim),
        workspace[splits * rows * dim :].view(splits, -1),
    )
    empty = lse == -torch.inf
    assert empty.any() and not empty.all() and (out[empty] == 0).all()
    assert (out[~empty] != out[~empty].bfloat16().float()).any()


@pytest.mark.parametrize("fmt", [SOME_ROWS, EVERY_ROW])
def test_batch_mates_change_no_bit(fmt: BlockFormat) -> None:
    inputs, indices = made(fmt, batch=3, dtype="float16")
    whole = run(inputs, indices)
    for row in range(3):
        one = slice(row, row + 1)
        alone = inputs._replace(
            blocks=inputs.blocks.map(lambda part, one=one: part[one]),
            **{name: getattr(inputs, name)[one] for name in ("q", "k_window", "v_window")},
        )
        assert same(run(alone, indices[one]), [part[one] for part in whole])


def test_more_splits_than_blocks() -> None:
    inputs, indices = made(EVERY_ROW, num_blocks=1)
    states = size_of(inputs, indices) // (inputs.blocks.head_dim_v + 1) // inputs.q.shape[1]
    assert states > 3
    indices = testing.to_numpy(indices)
    testing.assert_matches_reference("triton", "decode_attention", inputs, block_indices=indices)


def test_a_workspace_that_does_not_fit_is_refused() -> None:
    import torch

    inputs, indices = made(SOME_ROWS)
    size = size_of(inputs, indices)
    for workspace, message in (
        (torch.empty(size - 1), f"workspace must hold {size} numbers, got {size - 1}"),
        (torch.empty(size, dtype=torch.float16), "workspace must be float32, got torch.float16"),
        (torch.empty(2 * size)[::2], "workspace must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            run(inputs, indices, workspace=workspace)


def test_rows_of_windows_and_lengths_may_lie_apart() -> None:
    """Lengths, counts and sinks that are every second number of their storage."""
    import torch

    from dkv.kernels.triton import decode

    inputs, indices = made(SOME_ROWS, batch=2)
    lengths, counts = torch.tensor([3, 9, WINDOW, 9], dtype=torch.int32), torch.tensor([2, 9, 4, 9], dtype=torch.int32)
    sink = torch.randn(12, generator=torch.Generator().manual_seed(0))
    blocks = dataclasses.replace(inputs.blocks, block_counts=counts[::2])
    window = inputs.k_window, inputs.v_window
    got = decode.decode_attention(inputs.q, blocks, *window, indices, lengths[::2], 7, None, sink[::2], 0.2)
    blocks = dataclasses.replace(blocks, block_counts=counts[::2].clone())
    dense = lengths[::2].clone(), 7, None, sink[::2].clone(), 0.2
    assert same(got, decode.decode_attention(inputs.q, blocks, *window, indices, *dense))


def test_lengths_beyond_the_window_read_nothing_behind_it() -> None:
    """Lengths on a device are not checked: they count for positions, and memory ends where the window does."""
    import torch

    from dkv.kernels.torch import decode as other
    from dkv.kernels.triton import decode

    inputs = testing.make_inputs(23, q_len=2, library="torch")
    rows, views = (inputs.k_window, inputs.v_window), []
    for part in rows:
        buffer = torch.full((*part.shape[:2], 80, part.shape[3]), torch.nan)
        buffer[:, :, : part.shape[2]] = part
        views.append(buffer[:, :, : part.shape[2]])
    lengths = torch.tensor([14, 70])
    for causal, window in ((True, None), (False, None), (True, 60)):
        settings = causal, lengths, window, None, None, 0.2
        got = decode.exact_attention(inputs.q, *views, *settings)
        want = other.exact_attention(inputs.q, *rows, *settings)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_threads_do_not_disturb_one_another() -> None:
    import sys
    import threading

    inputs, indices = made(SOME_ROWS)
    others, other_indices = made(EVERY_ROW, batch=2, num_blocks=2)
    calls, wrong = [(inputs, indices), (others, other_indices)], []
    wants = [run(*call) for call in calls]

    def again(order: int) -> None:
        for index in (order, 1 - order) * 3:
            if not same(run(*calls[index]), wants[index]):
                wrong.append(index)
        wrong.append(None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=again, args=(order,)) for order in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == [None, None]  # both came to their end
