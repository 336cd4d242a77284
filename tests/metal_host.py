"""Metal kernels on the CPU: what builds them is replaced by :mod:`msl_host`, and every launch is counted and linted."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import msl_host
import pytest
from msl_host import Host

from dkv.kernels.mlx import _metal

# How a kernel is run: in order, threads in random order, every access checked, products fused and subnormals flushed.
MODES = {"plain": {}, "random": {"seed": 12345}, "checked": {"check": True}, "fused": {"contract": True, "ftz": True}}
CAN_LINT = msl_host.lint_unavailable() is None
needs_host = pytest.mark.skipif(msl_host.unavailable() is not None, reason=str(msl_host.unavailable()))
LAUNCHES: Counter[str] = Counter()  # by kernel
SIGNATURES: dict[tuple[Any, ...], Any] = {}  # of each build, and of one for small arrays, what the linter says
FEW = 5  # elements of an array that MLX passes in the constant address space


@functools.cache
def host(mode: str) -> Host:
    return Host(**MODES[mode], max_threads=_metal.MAX_THREADS, timeout=10.0)


class Counted:
    """What ``host.metal_kernel`` returns, counted and, once for each signature, linted."""

    def __init__(self, target: Host, **built: Any) -> None:
        self.host, self.name, self.inputs = target, built["name"], len(built["input_names"])
        self.run = target.metal_kernel(**built)

    def __call__(self, *, inputs: list[Any], output_dtypes: list[Any], template: Any = None, **call: Any) -> list[Any]:
        template = list(template or [])
        key = (self.name, *map(str, template), *(f"{x.dtype} {x.size < _metal.CONSTANT_BELOW}" for x in inputs))
        LAUNCHES[self.name] += 1
        if key not in SIGNATURES:
            few = [mx.zeros(FEW, x.dtype) for x in inputs]
            SIGNATURES[key] = [self.lint(arrays, output_dtypes, template) for arrays in (inputs, few)]
        return self.run(inputs=inputs, output_dtypes=output_dtypes, template=template, **call)

    def lint(self, inputs: list[Any], output_dtypes: list[Any], template: list[Any]) -> list[str]:
        found = list(self.host.lint(self.run, inputs, output_dtypes, template)) if CAN_LINT else []
        assert not found, f"{self.name} {template}: {found}"
        return found


@contextlib.contextmanager
def compared_text() -> Iterator[set[str]]:
    """Backend "mlx-metal", the source of every launch compared with that which MLX would compile; names what ran."""
    seen: set[str] = set()

    class Compared:
        def __init__(self, **built: Any) -> None:
            self.kernel = host("plain").metal_kernel(**built)

        def __call__(self, *, inputs: list[Any], **call: Any) -> Any:
            text = self.kernel.signature(inputs, call["output_dtypes"], call.get("template")).text
            assert text == msl_host.mlx_text(self.kernel, inputs, **call)
            seen.add(self.kernel.name.removeprefix("dkv_"))
            return self.kernel(inputs=inputs, **call)

    with metal("plain"):
        _metal.builder = Compared
        yield seen


@contextlib.contextmanager
def metal(mode: str, texts: Callable[[str], str] | None = None) -> Iterator[Host]:
    """Backend "mlx-metal" by the host in a mode of ``MODES``; ``texts`` gives other sources in place of the files'."""
    target, kept = host(mode), (_metal.builder, _metal.available, _metal.text)
    _metal.builder = _counted(mode) if texts is None else target.metal_kernel
    _metal.available = lambda: True
    if texts is not None:
        _metal.text = texts
        _metal._built.cache_clear()
    try:
        yield target
    finally:
        _metal.builder, _metal.available, _metal.text = kept
        if texts is not None:
            _metal._built.cache_clear()


@functools.cache
def _counted(mode: str) -> Callable[..., Any]:
    return functools.partial(Counted, host(mode))


def counts() -> tuple[dict[str, int], list[str]]:
    """Launches by kernel, and signatures, of this process."""
    return dict(LAUNCHES), [" ".join(key) for key in SIGNATURES]


def summary(runs: list[tuple[dict[str, int], list[str]]]) -> str:
    """What was run by some processes: a line for the end of a test run."""
    launches: Counter[str] = sum((Counter(each) for each, _ in runs), Counter())
    signatures = len({key for _, keys in runs for key in keys})
    linted = f"{signatures} signatures linted" if CAN_LINT else f"{signatures} signatures, no clang to lint"
    named = ", ".join(f"{name.removeprefix('dkv_')} {count}" for name, count in sorted(launches.items()))
    return f"Metal on the CPU: {sum(launches.values())} launches of {len(launches)} kernels ({named}); {linted}"
