"""The function MLX writes around the body of a kernel, to the letter (``mlx/backend/common/metal_kernel.cpp``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
}

# What a kernel may ask about its thread: the type Metal gives it and its value on the host, from msl::Thread* t.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "(volume(t->nominal) + 3) / 4"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "(volume(t->nominal) + 31) / 32"),
    "dispatch_threads_per_threadgroup": ("uint3", "as_uint3(t->nominal)"),
    "grid_origin": ("uint3", "uint3(0u)"),
    "grid_size": ("uint3", "as_uint3(t->grid_size)"),
    "quadgroup_index_in_threadgroup": ("uint", "t->index / 4"),
    "quadgroups_per_threadgroup": ("uint", "(volume(t->group_size) + 3) / 4"),
    "simdgroup_index_in_threadgroup": ("uint", "t->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "t->simdgroups"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_quadgroup": ("uint", "t->index % 4"),
    "thread_index_in_simdgroup": ("uint", "t->lane"),
    "thread_index_in_threadgroup": ("uint", "t->index"),
    "thread_position_in_grid": ("uint3", "as_uint3(t->in_grid)"),
    "thread_position_in_threadgroup": ("uint3", "as_uint3(t->in_group)"),
    "threadgroup_position_in_grid": ("uint3", "as_uint3(t->group)"),
    "threadgroups_per_grid": ("uint3", "as_uint3(t->groups)"),
    "threads_per_grid": ("uint3", "as_uint3(t->grid_size)"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "as_uint3(t->group_size)"),
}

TemplateValue = bool | int | mx.Dtype
Template = Sequence[tuple[str, TemplateValue]]


@dataclass(frozen=True)
class Binding:
    """A buffer of the function: an input, its ``_shape``, ``_strides`` or ``_ndim``, or an output."""

    kind: str
    array: str
    type: str
    reference: bool

    @property
    def name(self) -> str:
        return self.array + (self.kind if self.kind.startswith("_") else "")


@dataclass(frozen=True)
class Signature:
    """One instance of a kernel: for given types of inputs and outputs and given template values."""

    name: str
    header: str
    opening: str
    source: str
    template: str
    bindings: tuple[Binding, ...]
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        """What MLX hands to Metal's compiler, without its own prelude."""
        end = ""
        if self.template:
            full = self.name + self.template
            end = f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({full}) {full};\n'
        return f"{self.header}{self.opening}{self.source}\n}}\n{end}"


def write_value(value: TemplateValue) -> str:
    return str(int(value)) if isinstance(value, int) else TYPES[value]


def make_signature(
    name: str,
    header: str,
    source: str,
    inputs: Iterable[tuple[str, mx.Dtype, int, int]],
    outputs: Iterable[tuple[str, mx.Dtype]],
    template: Template = (),
    atomic_outputs: bool = False,
) -> Signature:
    """Signature for ``inputs`` (name, dtype, ndim, size) and ``outputs`` (name, dtype)."""
    inputs, outputs = list(inputs), list(outputs)
    full_name, arguments, opening = "custom_kernel_" + name, "", ""
    if template:
        values = [write_value(value) for _, value in template]
        arguments = f"<{', '.join(values)}>"
        full_name += "__" + "_".join(values).replace("-", "_")
        kinds = ["bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template]
        opening = f"template <{', '.join(f'{kind} {key}' for kind, (key, _) in zip(kinds, template))}>\n"
    for _, dtype, ndim, size in inputs:
        full_name += "_" + TYPES[dtype] + ("s" if ndim == 0 else "c" if size < 8 else "")
    full_name += "".join("_" + TYPES[dtype] for _, dtype in outputs)

    bindings: list[Binding] = []
    lines: list[str] = []

    def bind(kind: str, array: str, type_: str, reference: bool, qualified: str) -> None:
        binding = Binding(kind, array, type_, reference)
        lines.append(f"  {qualified}{'&' if reference else '*'} {binding.name} [[buffer({len(bindings)})]]")
        bindings.append(binding)

    for array, dtype, ndim, size in inputs:
        space = "constant" if size < 8 else "device"
        bind("input", array, TYPES[dtype], ndim == 0, f"const {space} {TYPES[dtype]}")
        for kind, type_ in (("_shape", "int"), ("_strides", "int64_t"), ("_ndim", "int")):
            if ndim and array + kind in source:
                bind(kind, array, type_, kind == "_ndim", f"const constant {type_}")
    first_output = len(bindings)
    for array, dtype in outputs:
        type_ = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        bind("output", array, type_, False, f"device {type_}")

    attributes = tuple(key for key in ATTRIBUTES if key in source)
    opening += f"[[kernel]] void {full_name}(\n" + "".join(line + ",\n" for line in lines[:first_output])
    for index, line in enumerate(lines[first_output:], first_output):
        # MLX forgets the shapes and strides among the buffers here: without an attribute it can close the list twice.
        last = index >= len(inputs) + len(outputs) - 1 and not attributes
        opening += line + (") {\n" if last else ",\n")
    opening += ",\n".join(f"  {ATTRIBUTES[key][0]} {key} [[{key}]]" for key in attributes)
    opening += ") {\n" if attributes else ""
    return Signature(full_name, header, opening, source, arguments, tuple(bindings), attributes)
