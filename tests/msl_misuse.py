"""Small kernels, each with one defect in the line marked HERE, or with none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

PREFIX = "uint i = thread_position_in_grid.x;\nuint l = thread_index_in_threadgroup;\n"
ATOMIC = {"atomic_outputs": True, "init_value": 0}


@dataclass(frozen=True)
class Misuse:
    """A kernel of ``x [64] -> out [64]`` in threadgroups of ``group`` threads, and what is to be said of it."""

    name: str
    body: str
    says: str = ""
    always: bool = False  # found without ``check`` too
    size: int = 64
    group: int = 64
    inputs: Any = None
    outputs: int = 64
    dtype: mx.Dtype = mx.float32
    header: str = ""
    atomic_outputs: bool = False
    init_value: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return PREFIX + self.body

    @property
    def line(self) -> int:
        """The line of the defect, 0 where no single line has it."""
        lines = [n for n, line in enumerate(self.source.splitlines(), 1) if "HERE" in line]
        return lines[0] if lines else 0

    def run(self, host: Any, source: str | None = None) -> mx.array:
        kernel = host.metal_kernel(
            self.name, ["x"], ["out"], source or self.source, self.header, atomic_outputs=self.atomic_outputs
        )
        inputs = mx.arange(64, dtype=mx.float32) if self.inputs is None else self.inputs
        with host.using(**self.options):
            return kernel(
                inputs=[inputs],
                grid=(self.size, 1, 1),
                threadgroup=(self.group, 1, 1),
                output_shapes=[(self.outputs,)],
                output_dtypes=[self.dtype],
                init_value=self.init_value,
            )[0]


def run(host, source, inputs, shape, dtype=mx.float32, grid=(32, 1, 1), group=None, name="k", **options):
    """One output of a kernel of the inputs ``a``, ``b``, ..."""
    call = {key: options.pop(key) for key in ("template", "init_value") if key in options}
    names = [chr(ord("a") + index) for index in range(len(inputs))]
    kernel = host.metal_kernel(name, names, ["out"], source, **options)
    return kernel(
        inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], grid=grid, threadgroup=group or grid, **call
    )[0]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

DIVERGENCE = [
    Misuse(
        "divergent_barrier",
        f"out[i] = x[i];\nif (l < 32) {{\n  {BARRIER} // HERE\n}} else {{\n  {BARRIER}\n}}",
        "threadgroup_barrier not reached by all threads.*32 from thread 32 threadgroup_barrier in line 7",
        always=True,
    ),
    Misuse(
        "divergent_barrier_in_one_line",
        f"out[i] = x[i];\nif (l < 32) {BARRIER} else {BARRIER} // HERE",
        "threadgroup_barrier not reached by all threads",
        always=True,
    ),
    Misuse(
        "half_a_barrier",
        f"out[i] = x[i];\nif (l < 32)\n  {BARRIER} // HERE",
        "threadgroup_barrier not reached by all threads.*32 from thread 32 returned",
        always=True,
    ),
    Misuse(
        "returned_before_barrier",
        f"out[i] = x[i];\nif (i >= 60) return;\n{BARRIER} // HERE",
        "4 from thread 60 returned",
        always=True,
    ),
    Misuse(
        "divergent_simdgroup_barrier",
        "out[i] = x[i];\nif (l < 5)\n  simdgroup_barrier(mem_flags::mem_none); // HERE",
        "divergent simd-group operation",
        always=True,
    ),
    Misuse(
        "simd_sum_of_half_the_lanes",
        "float v = x[i];\nif (l % 2)\n  v = simd_sum(v); // HERE\nout[i] = v;",
        "divergent simd-group operation.*16 from thread 1 a simd operation",
        always=True,
    ),
    Misuse(
        "simd_sums_in_two_places",
        "float v = x[i];\nif (l % 2 == 0)\n  v = simd_sum(v); // HERE\nelse\n  v = simd_sum(v);\nout[i] = v;",
        "divergent simd-group operation",
        always=True,
    ),
    Misuse(
        "simd_sum_in_loops_of_unequal_length",
        "float v = 0;\nfor (uint k = 0; k < 1 + l % 2; k++)\n  v += simd_sum(x[i]); // HERE\nout[i] = v;",
        "divergent simd-group operation",
        always=True,
    ),
    Misuse(
        "returned_before_simd_sum",
        "if (i >= 60) { out[i] = 0; return; }\nout[i] = simd_sum(x[i]); // HERE",
        "4 from thread 60 returned",
        always=True,
    ),
    Misuse("shuffle_from_lane_40", "out[i] = simd_shuffle(x[i], ushort(40)); // HERE", "a lane outside", always=True),
]

RACES = [
    Misuse(
        "two_writers_in_a_threadgroup",
        "threadgroup float s[64];\ns[l] = x[i];\nif (l >= 32) s[l - 32] = 1; // HERE\nout[i] = 0;",
        r"race, a write after a write: 's'\[0\] by thread 32 of threadgroup 0, against thread 0",
    ),
    Misuse(
        "read_without_barrier",
        f"threadgroup float s[64];\ns[l] = 0;\n{BARRIER}\ns[l] = x[i];\nout[i] = s[63 - l]; // HERE",
        r"race, a read after a write: 's'\[31\] by thread 32 .*against thread 31 of threadgroup 0",
    ),
    Misuse(
        "write_without_barrier",
        f"threadgroup float s[64];\ns[l] = x[i];\n{BARRIER}\nfloat v = s[63 - l];\ns[l] = v; // HERE\n{BARRIER}\n"
        "out[i] = s[l];",
        "race, a write after a read: 's'",
    ),
    Misuse(
        "barrier_for_other_memory",
        "threadgroup float s[64];\ns[l] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[i] = s[63 - l]; // HERE",
        "race, a read after a write: 's'",
    ),
    Misuse(
        "barrier_for_no_memory",
        "threadgroup float s[64];\ns[l] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_none);\nout[i] = s[63 - l]; // HERE",
        "race, a read after a write: 's'",
    ),
    Misuse(
        "lanes_without_barrier",
        f"threadgroup float s[64];\ns[l] = 0;\n{BARRIER}\ns[l] = x[i];\nsimd_sum(x[i]);\nout[i] = s[l ^ 1]; // HERE",
        "race, a read after a write: 's'",
    ),
    Misuse(
        "simdgroup_barrier_across_simdgroups",
        "threadgroup float s[64];\ns[l] = x[i];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = s[63 - l]; // HERE",
        "race|uninitialised",
    ),
    Misuse(
        "an_early_reader",  # the readers after it are all ordered before the write
        f"threadgroup float s[4];\nif (l == 0) s[0] = 1;\n{BARRIER}\nfloat v = 0;\nif (l == 7) v = s[0];\n"
        "if (l >= 32) v = s[0];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nif (l >= 32) v += s[0];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (l == 32) s[0] = 2; // HERE\nout[i] = v;",
        "race, a write after a read: 's'.*against thread 7 ",
    ),
    Misuse(
        "the_last_reader_writes",
        "threadgroup float s[4];\nif (l == 0) s[0] = 1;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "float v = s[0];\nif (l == 31) s[0] = 2; // HERE\nout[i] = v;",
        "race, a write after a read: 's'.*by thread 31 .*against thread 30",
        group=32,
    ),
    Misuse(
        "across_threadgroups",
        "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nif (i >= 32) out[i] += out[i - 32]; // HERE",
        "race, a read after a write: 'out'.*against thread 0 of threadgroup 0",
        group=32,
    ),
    Misuse(
        "two_writers", "out[i / 2] = x[i]; // HERE", r"race, a write after a write: 'out'\[0\] by thread 1", outputs=32
    ),
    Misuse(
        "two_writers_of_a_vector",
        "((device float2*)out)[i / 4] = float2(x[i]); // HERE",
        "race, a write after a write: 'out'",
        outputs=32,
    ),
    Misuse(
        "plain_beside_atomic",
        "if (i == 0) ((device float*)out)[0] = 1;\nelse\n"
        "  atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed); // HERE",
        "race, a write after a write: 'out'",
        **ATOMIC,
    ),
    Misuse(
        "atomics_of_another_threadgroup_read_plainly",
        "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "if (i == 32) ((device float*)out)[1] = ((device float*)out)[0]; // HERE",
        "race, a read after a write: 'out'.* of threadgroup 1, against thread 31 of threadgroup 0",
        group=32,
        **ATOMIC,
    ),
]

MEMORY = [
    Misuse("one_beyond", "out[i] = x[i + 1]; // HERE", r"read out of bounds: 'x'\[64\] by thread 63"),
    Misuse("one_before", "out[i] = x[(int)i - 1]; // HERE", r"read out of bounds: 'x'\[-1\] by thread 0"),
    Misuse("far_beyond", "out[i + 5000] = x[i]; // HERE", "out of bounds: 'out'", always=True),
    Misuse("one_written_beyond", "out[i + 1] = x[i]; // HERE", r"write out of bounds: 'out'\[64\]"),
    Misuse(
        "threadgroup_beyond",
        "threadgroup float s[63];\nthreadgroup float* p = s;\np[l] = x[i]; // HERE\nout[i] = 0;",
        r"write out of bounds: 's'\[63\]",
    ),
    Misuse(
        "threadgroup_far_beyond",
        "threadgroup float s[64];\nthreadgroup float* p = s;\np[l * 4000] = x[i]; // HERE\nout[i] = 0;",
        "out of bounds",
        always=True,
    ),
    Misuse(
        "threadgroup_index",
        "threadgroup float s[63];\ns[l] = x[i]; // HERE\nout[i] = 0;",
        "index outside a fixed-size array by thread 63",
    ),
    Misuse(
        "private_index",
        "float a[4] = {x[i], 1, 2, 3};\nint k = 4 + (int)(x[i] * 0);\nout[i] = a[k]; // HERE",
        "index outside a fixed-size array",
    ),
    Misuse(
        "too_much_threadgroup_memory",
        "threadgroup float s[8193]; // HERE\ns[l] = x[i];\nout[i] = s[l];",
        "threadgroup memory: 32772 bytes with 's', 32768 are there",
        always=True,
    ),
    Misuse(
        "too_much_private_memory",
        "float a[20000];\nfor (int j = 0; j < 20000; j++) a[j] = x[(i + j) % 64];\nfloat s = 0;\n"
        "for (int j = 0; j < 20000; j++) s += a[j] * a[(j * 7) % 20000];\nout[i] = s;",
        "more than 64 KiB of private memory",
        always=True,
    ),
    Misuse(
        "unset_threadgroup",
        f"threadgroup float s[64];\nif (l < 32) s[l] = x[i];\n{BARRIER}\nout[i] = s[l]; // HERE",
        r"read of uninitialised memory: 's'\[32\]",
    ),
    Misuse(
        "threadgroup_set_by_another_threadgroup",
        f"threadgroup float s[32];\nif (i < 32) s[l] = x[i];\n{BARRIER}\nout[i] = s[l]; // HERE",
        r"read of uninitialised memory: 's'\[0\] by thread 0 of threadgroup 1",
        group=32,
    ),
    Misuse("unset_output", "out[i] += x[i]; // HERE", r"read of uninitialised memory: 'out'\[0\]"),
    Misuse("unwritten_output", "if (i != 17) out[i] = x[i];", "1 of 64 elements never written, the first at 17"),
    Misuse(
        "written_input",
        "device float* p = (device float*)x;\np[i] = 0; // HERE\nout[i] = 0;",
        "write to an input",
        always=True,
    ),
    Misuse(
        "misaligned_vector",
        "float4 v = 0.0f;\nif (i < 8)\n  v = *(const device float4*)(x + 1 + i * 4); // HERE\nout[i] = v.x + v.w;",
        "misaligned",
    ),
    Misuse(
        "misaligned_pair",  # which the machine does not mind
        "float2 v = 0.0f;\nif (i < 8)\n  v = *(const device float2*)(x + 1 + i * 2); // HERE\nout[i] = v.x + v.y;",
        "misaligned or null access by thread 0",
    ),
    Misuse("divided_by_zero", "int k = (int)(x[i] * 0);\nout[i] = 5 / k; // HERE", "division by zero", always=True),
    Misuse("shifted_too_far", "int k = 32 + (int)(x[i] * 0);\nout[i] = 1 << k; // HERE", "shift by more bits"),
    Misuse(
        "endless_loop",
        "uint k = i;\nwhile (k < 100) { out[i] = k; k ^= 1; } // HERE\nout[i] = k;",
        "still running after 0.2 s: an endless loop",
        always=True,
        options={"timeout": 0.2},
    ),
    Misuse(
        "waiting_for_another_thread",
        "if (i == 0) while (\n  atomic_load_explicit(&out[1], memory_order_relaxed) == 0); // HERE\n"
        "atomic_store_explicit(&out[i], 1.0f, memory_order_relaxed);",
        "still running after 0.2 s: an endless loop",
        options={"timeout": 0.2},
        **ATOMIC,
    ),
]

REFUSED = [
    Misuse("float_to_bfloat", "bfloat b = x[i]; // HERE\nout[i] = b;", "conversion from"),
    Misuse("half_to_bfloat", "half h = x[i];\nbfloat b = h; // HERE\nout[i] = b;", "conversion from"),
    Misuse("bfloat_times_half", "half h = x[i];\nout[i] = float(bfloat(x[i]) * h); // HERE", "no match for"),
    Misuse("double_precision", "double d = x[i]; // HERE\nout[i] = d;", "double_is_not_in_metal"),
    Misuse("std_function", "out[i] = std::exp(x[i]); // HERE", "not a member of"),
    Misuse("no_such_function", "out[i] = erf(x[i]); // HERE", "not declared"),
    Misuse("max_of_float_and_int", "out[i] = max(x[i], 0); // HERE", "ambiguous"),
    Misuse("simd_sum_of_bool", "out[i] = simd_sum(x[i] > 3); // HERE", "and no bool"),
    Misuse("simd_sum_of_long", "out[i] = simd_sum(ulong(i)); // HERE", "8, 16 or 32 bits"),
    Misuse(
        "atomic_maximum_of_float",
        "atomic_fetch_max_explicit(&out[0], x[i], memory_order_relaxed); // HERE",
        "not there for this type",
        **ATOMIC,
    ),
    Misuse(
        "atomic_half",
        "atomic_fetch_add_explicit(&out[0], half(1), memory_order_relaxed); // HERE",
        "T must be int, uint, ulong, float or bool",
        dtype=mx.float16,
        **ATOMIC,
    ),
    Misuse(
        "sequential_atomic",
        "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_seq_cst); // HERE",
        "memory_order_seq_cst",
        **ATOMIC,
    ),
    Misuse("static_variable", "static float s = 0; // HERE\ns += 1;\nout[i] = s;", "a static variable"),
    Misuse("threadgroup_with_a_value", "threadgroup float s[2] = {1, 2}; // HERE\nout[i] = s[0];", "no initial value"),
    Misuse(
        "recursion",
        "out[i] = f(i);",
        "recursion.header.metal:2: error: f calls itself",
        header="inline float f(uint n) {\n  return n == 0 ? 0.0f : 1.0f + f(n - 1);\n}\n",
    ),
]

CONTROLS = [
    Misuse("copied", "out[i] = x[i];"),
    Misuse("edge_group", f"threadgroup float s[48];\ns[l] = x[i];\n{BARRIER}\nout[i] = s[l];", group=48),
    Misuse(
        "lanes_with_barrier",
        "threadgroup float s[64];\ns[l] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = s[l ^ 1];",
    ),
    Misuse(
        "reversed_twice",
        f"threadgroup float s[64];\ns[l] = x[i];\n{BARRIER}\nfloat v = s[63 - l];\n{BARRIER}\ns[l] = v;\n{BARRIER}\n"
        "out[i] = s[63 - l];",
    ),
    Misuse(
        "overloads_that_call_each_other",
        "out[i] = f(float2(x[i], 0));",
        header="inline float f(float v) { return v; }\ninline float f(float2 v) { return f(v.x) + f(v.y); }\n",
    ),
    Misuse("one_value_by_all", "out[0] = 5; // all store the same\nif (i > 0) out[i] = x[i];"),
    Misuse(
        "through_the_device",
        "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nfloat v = out[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[i] = v;",
    ),
    Misuse("counted", "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);", group=32, **ATOMIC),
    Misuse(
        "components_of_a_vector",
        f"threadgroup float4 s[16];\nthreadgroup float* p = (threadgroup float*)s;\np[l] = x[i];\n{BARRIER}\n"
        "out[i] = s[l / 4][l % 4];",
    ),
    Misuse(
        "returned_threads_allowed",
        f"out[i] = x[i];\nif (i >= 60) return;\n{BARRIER}\nout[i] = simd_sum(1.0f);",
        options={"allow_returned": True},
    ),
]

FOUND = [*DIVERGENCE, *RACES, *MEMORY]
