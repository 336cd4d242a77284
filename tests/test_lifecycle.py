"""Caches through their lives: any order of operations, a limit, threads. ``HYPOTHESIS_PROFILE=deep`` tries more."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_any_order_of_operations_equals_plain_rows():
    from lifecycle_machine import CacheMachine

    with torch.no_grad():
        run_state_machine_as_test(CacheMachine, settings=settings(stateful_step_count=30))


def test_any_order_of_operations_of_mlx_lm_equals_plain_rows():
    pytest.importorskip("mlx_lm")
    import lifecycle_mlx_machine as machine

    machine.hook()
    run_state_machine_as_test(machine.MlxCacheMachine, settings=settings(stateful_step_count=30))
