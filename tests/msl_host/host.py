"""A host of kernels: takes what ``mx.fast.metal_kernel`` takes and runs it on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from . import build
from .errors import MSLCompileError, MSLError, MSLRunError
from .lint import lint_signature
from .signature import Signature, Template, make_signature
from .source import to_cpp

INPUT, OUTPUT, INITIALISED_OUTPUT = range(3)
MAX_BUFFERS = 31
_lock = threading.Lock()  # the runtime runs one launch at a time


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("item", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("num_buffers", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("seed", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("allow_returned", ctypes.c_uint32),
        ("flush", ctypes.c_uint32),
        ("timeout", ctypes.c_double),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("errors", ctypes.c_uint64),
        ("text", ctypes.c_char_p),
        ("capacity", ctypes.c_size_t),
    ]


@dataclass(frozen=True)
class Options:
    """How a host runs kernels.

    Attributes
    ----------
    check : watch every access to memory; finds races, accesses out of bounds, reads of what was never written and
        outputs left unwritten. About twice as slow.
    seed : 0 runs threads in order, each simd-group as far as it can go; any other shuffles simd-groups and lanes.
    ftz : subnormal numbers of 32 bits are 0, as on Apple's GPUs.
    contract : the compiler may fuse a product and a sum into one rounding, as Metal's may.
    allow_returned : barriers and simd-group operations need only the threads that have not returned.
    max_threads : threads a threadgroup may have.
    timeout : seconds of CPU time after which a launch is called endless.
    """

    check: bool = False
    seed: int = 0
    ftz: bool = False
    contract: bool = False
    allow_returned: bool = False
    max_threads: int = 1024
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        if not 1 <= self.max_threads <= 1024:
            raise ValueError(f"max_threads must be in [1, 1024], got {self.max_threads}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")


@dataclass(frozen=True)
class Report:
    """What one launch was: the name of the instance, its size, what it used and what was found."""

    kernel: str
    threads: int
    threadgroup_bytes: int
    buffers: int
    switches: int
    seconds: float
    errors: tuple[str, ...]


@dataclass
class Totals:
    """Launches, instances and seconds of all hosts of this process."""

    launches: int = 0
    instances: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    compile_seconds: float = 0.0
    run_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.launches} launches of {len(self.kernels)} Metal kernels in {len(self.instances)} instances: "
            f"{self.run_seconds:.1f} s running, {self.compile_seconds:.1f} s compiling"
        )


totals = Totals()


class Host:
    """Runs Metal kernels on this CPU. Takes the fields of :class:`Options`.

    Raises :class:`MSLError` with the reason where it cannot run at all.
    """

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)
        self.report: Report | None = None
        self.signatures: dict[str, tuple[str, Signature]] = {}
        reason = build.unavailable()
        if reason:
            raise MSLError(reason)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
    ) -> Kernel:
        """As ``mx.fast.metal_kernel``: a kernel to be called with arrays. Errors name ``NAME.metal`` and the line of
        ``source``, or the file and line its ``#line`` marks say (see :func:`located`)."""
        math_mode = (compile_options or {}).get("math_mode", "safe")
        if set(compile_options or {}) - {"math_mode"} or math_mode not in ("safe", "relaxed", "fast"):
            raise ValueError(f"compile_options: only math_mode of safe, relaxed or fast, got {compile_options}")
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        return Kernel(
            self,
            name,
            tuple(input_names),
            tuple(output_names),
            source,
            header,
            ensure_row_contiguous,
            atomic_outputs,
            math_mode,
        )

    @contextlib.contextmanager
    def using(self, **options: Any) -> Iterator[Host]:
        """Other options within the context, for kernels made before it too."""
        before = self.options
        self.options = replace(before, **options)
        try:
            yield self
        finally:
            self.options = before

    @contextlib.contextmanager
    def patched(self, seam: ModuleType | None = None) -> Iterator[Host]:
        """Within the context kernels run here.

        ``seam`` is a module with ``available()`` and ``kernel(...)`` that stand for Metal and ``mx.fast.metal_kernel``;
        without one MLX itself is patched.
        """
        changes: list[tuple[Any, str, Any]]
        if seam is None:
            changes = [(mx.fast, "metal_kernel", self.metal_kernel), (mx.metal, "is_available", lambda: True)]
        else:
            changes = [(seam, "kernel", self.metal_kernel), (seam, "available", lambda: True)]
        before = [getattr(owner, attribute) for owner, attribute, _ in changes]
        for owner, attribute, value in changes:
            setattr(owner, attribute, value)
        try:
            yield self
        finally:
            for (owner, attribute, _), value in zip(changes, before):
                setattr(owner, attribute, value)

    def lint(
        self,
        kernel: Kernel | None = None,
        inputs: Sequence[Any] = (),
        output_dtypes: Sequence[mx.Dtype] = (),
        template: Template | None = None,
    ) -> list[str]:
        """What clang finds wrong with address spaces and uninitialised variables: of one instance of a kernel, or
        without arguments of all that this host has run. Needs clang++ (see :func:`lint_unavailable`)."""
        if kernel is None:
            return [problem for signature in self.signatures.values() for problem in lint_signature(*signature)]
        return lint_signature(kernel.name, kernel.signature(as_arrays(inputs), output_dtypes, template))


def as_arrays(inputs: Sequence[Any]) -> list[mx.array]:
    return [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]


@dataclass(frozen=True)
class Kernel:
    """What :meth:`Host.metal_kernel` returns."""

    host: Host
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    math_mode: str
    _built: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def signature(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template | None
    ) -> Signature:
        described = [(name, x.dtype, x.ndim, x.size) for name, x in zip(self.input_names, inputs)]
        outputs = zip(self.output_names, output_dtypes)
        return make_signature(
            self.name, self.header, self.source, described, outputs, template or (), self.atomic_outputs
        )

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        options = self.host.options
        sizes = [("inputs", inputs, self.input_names), ("output_shapes", output_shapes, self.output_names)]
        for argument, given, names in [*sizes, ("output_dtypes", output_dtypes, self.output_names)]:
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{argument}` to have size {len(names)} but got size {len(given)}."
                )
        for name, value in template or ():
            if not isinstance(value, (bool, int, mx.Dtype)):
                raise ValueError(
                    f"[metal_kernel] Invalid template argument {name}: a Dtype, int or bool, got {value!r}"
                )
        for argument, triple in (("grid", grid), ("threadgroup", threadgroup)):
            if len(triple) != 3 or min(triple) < 1:
                raise ValueError(f"{argument} must be three positive numbers, got {triple}")
        threads = int(np.prod(threadgroup))
        if threads > options.max_threads:
            raise ValueError(
                f"Thread group size ({threads}) is greater than the maximum allowed threads per threadgroup "
                f"({options.max_threads})."
            )
        arrays = as_arrays(inputs)
        mx.eval(arrays)
        with _lock:
            signature, path = self._build(arrays, output_dtypes, template, options)
            if verbose:
                print(f"Generated source code for `{self.name}`:\n```\n{signature.text}\n```")
            return self._launch(
                signature, path, arrays, output_shapes, output_dtypes, grid, threadgroup, init_value, options
            )

    def _build(
        self,
        arrays: list[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Template | None,
        options: Options,
    ) -> tuple[Signature, Path]:
        described = tuple((x.dtype, x.ndim == 0, x.size < 8) for x in arrays)
        values = tuple((key, type(value), value) for key, value in template or ())
        instance = described, tuple(output_dtypes), values, options.check, options.contract
        if instance not in self._built:
            signature = self.signature(arrays, output_dtypes, template)
            if len(signature.bindings) > MAX_BUFFERS:
                raise MSLCompileError(f"{self.name}: {len(signature.bindings)} buffers, Metal takes {MAX_BUFFERS}")
            cpp = to_cpp(signature, self.name)
            path, seconds = build.build(cpp, options.check, options.contract, self.math_mode == "fast")
            totals.compile_seconds += seconds
            self.host.signatures[build.digest(signature.text)] = (self.name, signature)
            self._built[instance] = signature, path
        return self._built[instance]

    def _launch(
        self,
        signature: Signature,
        path: Path,
        arrays: list[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        init_value: float | None,
        options: Options,
    ) -> list[mx.array]:
        data = {}
        for name, array in zip(self.input_names, arrays):
            data[name, "input"], strides = lay_out(array, self.ensure_row_contiguous)
            data[name, "_shape"] = np.array(array.shape, np.int32)
            data[name, "_strides"] = np.array(strides, np.int64)
            data[name, "_ndim"] = np.array([array.ndim], np.int32)
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes):
            initial = to_numpy(mx.array(init_value or 0).astype(dtype))
            data[name, "output"] = np.full(tuple(shape), initial, initial.dtype)
        output_kind = OUTPUT if init_value is None else INITIALISED_OUTPUT
        buffers = (_Buffer * len(signature.bindings))()
        for buffer, binding in zip(buffers, signature.bindings):
            values = data[binding.array, binding.kind]
            kind = output_kind if binding.kind == "output" else INPUT
            buffer.data, buffer.bytes, buffer.item = values.ctypes.data, values.nbytes, values.itemsize
            buffer.kind, buffer.name = kind, binding.name.encode()
        text = ctypes.create_string_buffer(1 << 15)
        group = [min(size, whole) for size, whole in zip(threadgroup, grid)]
        launch = _Launch(
            grid=(ctypes.c_uint32 * 3)(*grid),
            group=(ctypes.c_uint32 * 3)(*group),
            num_buffers=len(buffers),
            buffers=buffers,
            seed=options.seed,
            check=options.check,
            allow_returned=options.allow_returned,
            flush=options.ftz,
            timeout=options.timeout,
            text=ctypes.cast(text, ctypes.c_char_p),
            capacity=len(text),
        )
        began = time.perf_counter()
        entry = ctypes.cast(build.load(path).msl_entry, ctypes.c_void_p)
        if build.load(build.runtime()).msl_launch(entry, ctypes.byref(launch)):
            raise MSLError("msl_host could not reserve 132 GiB of address space (ulimit -v, vm.overcommit_memory = 2?)")
        seconds = time.perf_counter() - began
        errors = describe(text.value.decode(), path, self.name) if launch.errors else ()
        threads, used = int(np.prod(grid)), int(launch.threadgroup_bytes)
        self.host.report = Report(
            signature.name, threads, used, len(buffers), int(launch.switches), seconds, errors
        )
        totals.launches += 1
        totals.run_seconds += seconds
        totals.kernels.add(self.name)
        totals.instances.add(signature.name)
        if errors:
            raise MSLRunError("\n".join(errors))
        return [from_numpy(data[name, "output"], dtype) for name, dtype in zip(self.output_names, output_dtypes)]


def to_numpy(x: mx.array) -> np.ndarray:
    """A view of an array, bfloat16 as its bits."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, copy=False)


def from_numpy(x: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(x).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(x)


def lay_out(x: mx.array, contiguous: bool) -> tuple[np.ndarray, list[int]]:
    """An array as a kernel gets it: its elements in memory, and its strides in elements."""
    values = to_numpy(x)
    if contiguous or values.flags.c_contiguous:
        values = np.ascontiguousarray(values).reshape(x.shape)
        return values, [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim)]
    strides = [stride // values.itemsize for stride in values.strides]
    if min(strides) < 0:
        raise ValueError(f"an input of negative strides {strides}; make it contiguous first")
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides))
    return np.lib.stride_tricks.as_strided(values, (span,), (values.itemsize,)).copy(), strides


def describe(text: str, path: Path, kernel: str) -> tuple[str, ...]:
    """The runtime's errors, each with the file and line of the kernel's text that it comes from."""
    found = [line.split("\t", 3) for line in text.splitlines()]
    places = build.locate(path, sorted({int(address, 16) for _, _, address, _ in found}))
    result = []
    for file, line, address, message in found:
        where = places.get(int(address, 16)) or (f"{file}:{line}" if file else f"{kernel}.metal")
        result.append(f"{where}: {message}")
    return tuple(result)


