"""The host of Metal kernels: what it finds, what it computes, and that MLX would compile the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msl_host
from msl_misuse import CONTROLS, FOUND, RACES, REFUSED, Misuse

pytestmark = pytest.mark.skipif(msl_host.unavailable() is not None, reason=str(msl_host.unavailable()))


@pytest.fixture(scope="module")
def host():
    return msl_host.Host()


@pytest.fixture(scope="module")
def checked():
    return msl_host.Host(check=True)


def run(host, source, inputs, shape, dtype=mx.float32, grid=(32, 1, 1), group=None, name="k", **options):
    """One output of a kernel of the inputs ``a``, ``b``, ..."""
    call = {key: options.pop(key) for key in ("template", "init_value") if key in options}
    names = [chr(ord("a") + index) for index in range(len(inputs))]
    kernel = host.metal_kernel(name, names, ["out"], source, **options)
    return kernel(
        inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], grid=grid, threadgroup=group or grid, **call
    )[0]


# ---- what it finds


def says(misuse: Misuse, message: str) -> None:
    where = f"{misuse.name}.metal:{misuse.line}: " if misuse.line else ""
    assert any(line.startswith(where) and re.search(misuse.says, line) for line in message.splitlines()), message


@pytest.mark.parametrize("misuse", FOUND, ids=lambda m: m.name)
def test_found(misuse, checked):
    with pytest.raises(msl_host.MSLRunError) as error:
        misuse.run(checked)
    says(misuse, str(error.value))
    assert checked.report.errors == tuple(str(error.value).splitlines())


@pytest.mark.parametrize("misuse", [m for m in FOUND if m.always], ids=lambda m: m.name)
def test_found_without_checks(misuse, host):
    with pytest.raises(msl_host.MSLRunError) as error:
        misuse.run(host)
    says(misuse, str(error.value))


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda m: m.name)
def test_refused_by_the_compiler(misuse, host):
    with pytest.raises(msl_host.MSLCompileError) as error:
        misuse.run(host)
    message = str(error.value)
    assert re.search(misuse.says, message), message
    assert not misuse.line or f"{misuse.name}.metal:{misuse.line}" in message, message


@pytest.mark.parametrize("misuse", CONTROLS, ids=lambda m: m.name)
def test_controls_run(misuse, host, checked):
    plain = misuse.run(host)
    assert mx.array_equal(misuse.run(checked), plain)
    with host.using(seed=7):
        assert mx.array_equal(misuse.run(host), plain)


@pytest.mark.parametrize("misuse", RACES, ids=lambda m: m.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_races_are_found_in_any_order(misuse, seed, checked):
    with checked.using(seed=seed), pytest.raises(msl_host.MSLRunError, match="race|uninitialised"):
        misuse.run(checked)
