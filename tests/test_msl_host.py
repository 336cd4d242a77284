"""The host of Metal kernels: what it finds, what it computes, and that MLX would compile the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import mlx.core as mx
import msl_host
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msl_misuse import CONTROLS, FOUND, RACES, REFUSED, Misuse, run

pytestmark = pytest.mark.skipif(msl_host.unavailable() is not None, reason=str(msl_host.unavailable()))


@pytest.fixture(scope="module")
def host():
    return msl_host.Host()


@pytest.fixture(scope="module")
def checked():
    return msl_host.Host(check=True)


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


WIDE = {
    "float2": (8, "float2 v = p[i]; out[i] = v.y;"),
    "float3": (16, "float3 v = p[i]; out[i] = v.y;"),
    "float4": (16, "float4 v = p[i] * 2; out[i] = v.y;"),
    "packed_float3": (12, "packed_float3 v = p[i]; out[i] = v[1];"),
    "packed_float4": (16, "float4 v = p[i]; out[i] = v[1];"),
    "uint4": (16, "out[i] = as_type<float4>(p[i]).x;"),
    "half4": (8, "half4 v = p[i]; out[i] = dot(v, v);"),
    "ulong": (8, "out[i] = p[i] >> 3;"),
    "uchar4": (4, "out[i] = p[i].w;"),
    "Row": (36, "Row v = p[i]; out[i] = v.x[i % 9];"),
}


@pytest.mark.parametrize("type_", WIDE)
def test_wide_accesses_are_watched(type_, checked):
    """As many as lie in the memory are fine, one more is not; two threads that store one race."""
    size, body = WIDE[type_]
    count, header = 64 * 4 // size, "struct Row { float x[9]; };\n"
    read = f"uint i = thread_position_in_grid.x;\nauto p = (const device {type_}*)a;\n{body}\n"
    inputs, many, more = [mx.zeros(64)], (count, 1, 1), (count + 1, 1, 1)
    run(checked, read, inputs, (count,), grid=many, header=header)
    with pytest.raises(msl_host.MSLRunError, match=r"^k\.metal:3: read out of bounds: 'a'"):
        run(checked, read, inputs, (count + 1,), grid=more, header=header)
    write = f"uint i = thread_position_in_grid.x;\n{type_} v = *(const device {type_}*)(a + 4 * i);\n"
    write += f"((device {type_}*)out)[{{}}] = v;\n"
    values, whole = [mx.arange(1024)], (count * size // 4,)
    run(checked, write.format("i"), values, whole, mx.float32, grid=many, header=header)
    with pytest.raises(msl_host.MSLRunError, match=r"^k\.metal:3: race, a write after a write: 'out'"):
        run(checked, write.format("i % 2"), values, whole, mx.float32, grid=many, header=header)
    with pytest.raises(msl_host.MSLRunError, match=r"^k\.metal:3: write out of bounds: 'out'"):
        run(checked, write.format("i"), values, whole, mx.float32, grid=more, header=header)


def test_lines_are_those_of_the_file_the_source_names(checked):
    body = msl_host.located("uint i = thread_position_in_grid.x;\nout[i] = f(a, i);\n", "kernels/b.metal", line=40)
    header = "inline float f(const device float* p, uint i) {\n  return p[i + 1];\n}\n"
    header = msl_host.located(header, "kernels/a.metal")
    with pytest.raises(msl_host.MSLRunError, match=r"^kernels/a\.metal:2: read out of bounds: 'a'\[32\] by thread 31"):
        run(checked, body, [mx.zeros(32)], (32,), header=header)
    with pytest.raises(msl_host.MSLCompileError, match=r"kernels/b\.metal:41:"):
        run(checked, body.replace("f(a, i)", "g(a, i)"), [mx.zeros(32)], (32,), header=header)
    for line in ("static int n = 0;", "threadgroup float s[2] = {0, 0};"):
        with pytest.raises(msl_host.MSLCompileError, match=r"^kernels/b\.metal:42: "):
            run(checked, body + line, [mx.zeros(32)], (32,), header=header)


def test_all_that_is_found_is_told_once(checked):
    body = "uint i = thread_position_in_grid.x;\nfloat v = out[i];\nout[i / 2] = v + a[i];\n"
    with pytest.raises(msl_host.MSLRunError) as error:
        run(checked, body, [mx.arange(32)], (32,))
    lines = str(error.value).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "k.metal:2: read of uninitialised memory: 'out'[0] by thread 0 of threadgroup 0",
        "k.metal:3: race",
    ]


def test_a_host_is_usable_after_errors(checked):
    misuse = next(m for m in FOUND if m.name == "endless_loop")
    with pytest.raises(msl_host.MSLRunError):
        misuse.run(checked)
    assert mx.array_equal(CONTROLS[0].run(checked), mx.arange(64, dtype=mx.float32))


# ---- mutants

REDUCTION = """
threadgroup float s[64]; // the sum of 64 numbers, and of their squares
uint l = thread_index_in_threadgroup;
uint n = a_shape[0];
if (l < n) s[l] = a[l]; else s[l] = 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = 32; k > 0; k /= 2) {
  if (l < k) s[l] += s[l + k]; // "threadgroup_barrier(none)" in a comment
  threadgroup_barrier(
      mem_flags::mem_threadgroup);
}
float sum = s[0];
threadgroup_barrier(mem_flags::mem_threadgroup);
s[l] = l < n ? a[l] * a[l] : 0;
simdgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_simdgroup == 0)
  for (uint k = 1; k < 32; k++) s[l] += s[l + k];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (l == 0) { out[0] = sum; out[1] = s[0] + s[32]; }
"""


def reduce(host, source):
    return run(host, source, [mx.arange(50, dtype=mx.float32)], (2,), grid=(64, 1, 1), name="reduction")


def test_every_barrier_deleted_is_missed(checked):
    assert reduce(checked, REDUCTION).tolist() == [sum(range(50)), sum(k * k for k in range(50))]
    mutants = list(msl_host.without_barriers(REDUCTION))
    assert [mutant.line for mutant in mutants] == [6, 9, 13, 15, 18]
    assert mutants[1].what == "threadgroup_barrier( mem_flags::mem_threadgroup)"
    for mutant in mutants:
        assert mutant.source.count("\n") == REDUCTION.count("\n")
        with pytest.raises(msl_host.MSLRunError, match="race"):
            reduce(checked, mutant.source)


def test_every_guard_removed_is_missed(checked):
    mutants = list(msl_host.without_guards(REDUCTION))
    assert [(mutant.line, mutant.what) for mutant in mutants] == [
        (5, "l < n"),
        (8, "l < k"),
        (16, "thread_index_in_simdgroup == 0"),
        (19, "l == 0"),
    ]
    assert [mutant.line for mutant in msl_host.without_guards(REDUCTION, "< n")] == [5]
    for mutant in mutants[:3]:
        with pytest.raises(msl_host.MSLRunError, match="out of bounds|race|outside"):
            reduce(checked, mutant.source)
    reduce(checked, mutants[3].source)  # all threads store the same: harmless, and not reported


# ---- MLX's own text

DTYPES = list(msl_host.TYPES)


@st.composite
def calls(draw):
    """A kernel that asks for some shapes and attributes, its inputs and the rest of the call."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    names = [f"in{index}" for index in range(rng.integers(1, 5))]
    outputs = [f"o{index}" for index in range(rng.integers(1, 4))]
    asked = [name + kind for name in names for kind in ("_shape", "_strides", "_ndim") if rng.random() < 0.3]
    asked += [name for name in msl_host.ATTRIBUTES if rng.random() < 0.12]
    source = "  // body\n" + "".join(f"  (void){name};\n" for name in asked)
    inputs = []
    for _ in names:
        shape = rng.integers(1, 5, rng.integers(0, 4)).tolist()
        inputs.append(mx.zeros(shape, DTYPES[rng.integers(len(DTYPES))]))
    template = []
    for index in range(rng.integers(0, 4)):
        values = [DTYPES[rng.integers(len(DTYPES))], int(rng.integers(-5, 9)), True, False]
        template.append((f"P{index}", values[rng.integers(4)]))
    call = {
        "output_shapes": [(3,)] * len(outputs),
        "output_dtypes": [DTYPES[k] for k in rng.integers(len(DTYPES), size=len(outputs))],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        **({"template": template} if template else {}),
    }
    made = {"header": ["", "// header\n"][rng.integers(2)], "atomic_outputs": bool(rng.random() < 0.3)}
    return (f"k{rng.integers(9)}", names, outputs, source, made), inputs, call


@settings(max_examples=10 * settings().max_examples)
@given(calls())
def test_the_text_is_mlx_own(host, case):
    (name, names, outputs, source, made), inputs, call = case
    kernel = host.metal_kernel(name, names, outputs, source, **made)
    text = kernel.signature(inputs, call["output_dtypes"], call.get("template")).text
    assert text == msl_host.mlx_text(kernel, inputs, **call)


def test_a_drop_in_for_mlx(host, capfd):
    def exponential(a):
        kernel = mx.fast.metal_kernel(
            name="my_exp",
            input_names=["inp"],
            output_names=["out"],
            source="uint elem = thread_position_in_grid.x;\nT tmp = inp[elem];\nout[elem] = metal::exp(tmp);",
            compile_options={"math_mode": "safe"},
        )
        return kernel(
            inputs=[a],
            template=[("T", a.dtype)],
            grid=(a.size, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[a.shape],
            output_dtypes=[a.dtype],
            verbose=True,
            stream=mx.cpu,
        )[0]

    launches = msl_host.totals.launches
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        a = mx.random.normal(shape=(4, 16)).astype(dtype)
        with host.patched():
            assert mx.metal.is_available()
            b = exponential(a)
        assert b.dtype == dtype and mx.allclose(b, mx.exp(a), rtol=1e-6 if dtype == mx.float32 else 1e-2)
    assert "Generated source code for `my_exp`:\n```\ntemplate <typename T>" in capfd.readouterr().out
    assert msl_host.totals.launches == launches + 3 and "Metal kernels" in str(msl_host.totals)
    assert host.report.kernel == "custom_kernel_my_exp__bfloat16_t_bfloat16_t_bfloat16_t"
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        exponential(a)


def test_a_seam_of_a_package_is_replaced(host):
    seam = types.SimpleNamespace(available=lambda: False, kernel=None)
    with host.patched(seam):
        assert seam.available() and seam.kernel == host.metal_kernel
    assert not seam.available() and seam.kernel is None


def test_options_change_for_kernels_made_before(host):
    kernel = host.metal_kernel("k", ["a"], ["out"], "out[thread_position_in_grid.x] = a * 2;")
    call = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(5,)], "output_dtypes": [mx.float32]}
    kernel(inputs=[1.5], **call)
    with host.using(check=True), pytest.raises(msl_host.MSLRunError, match="1 of 5 elements never written"):
        kernel(inputs=[1.5], **call)
    kernel(inputs=[1.5], **call)


@pytest.mark.parametrize("contiguous", [True, False])
def test_shapes_strides_and_scalars(host, contiguous):
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = a[elem_to_loc(int(i), a_shape, a_strides, a_ndim)] * b + (i == 0 ? c[1] : 0);
        if (i == 1) out[1] = a_strides[0];
    """
    array = mx.arange(60, dtype=mx.float32).reshape(3, 4, 5).transpose(2, 0, 1)
    with host.using(check=True):
        out = run(
            host, source, [array, 3.0, mx.array([1, 9])], (60,), grid=(60, 1, 1), ensure_row_contiguous=contiguous
        )
    expected = np.array(array).ravel() * 3
    expected[0] += 9
    expected[1] = 12 if contiguous else 1
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_initial_values(host, dtype):
    x = mx.arange(40).astype(dtype)
    source = "uint i = thread_position_in_grid.x;\nif (i != 3) out[i] = a[i];"
    out = run(host, source, [x], (40,), dtype, grid=(40, 1, 1), init_value=1)
    x[3] = 1
    assert out.dtype == dtype and mx.array_equal(out, x)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"inputs": []}, "Expected `inputs` to have size 1 but got size 0"),
        ({"output_shapes": []}, "Expected `output_shapes` to have size 1 but got size 0"),
        ({"template": [("T", 1.5)]}, "Invalid template argument T"),
        ({"grid": (0, 1, 1)}, "grid must be three positive numbers"),
        ({"grid": (2048, 1, 1), "threadgroup": (1025, 1, 1)}, r"Thread group size \(1025\) is greater"),
    ],
)
def test_calls_are_checked(host, change, error):
    kernel = host.metal_kernel("k", ["a"], ["out"], "out[0] = a[0];")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    with pytest.raises(ValueError, match=error):
        kernel(**{"inputs": [1.0], **call, **change})


def test_limits_of_a_chip(host):
    with host.using(max_threads=256), pytest.raises(ValueError, match=r"\(257\) is greater .*\(256\)"):
        run(host, "out[0] = a;", [1.0], (1,), grid=(257, 1, 1))
    many = [mx.zeros(1)] * 11
    names = "".join(f"{chr(97 + k)}_shape;{chr(97 + k)}_strides;" for k in range(11))
    with pytest.raises(msl_host.MSLCompileError, match="34 buffers, Metal takes 31"):
        run(host, names, many, (1,))
    with pytest.raises(ValueError, match="timeout must be positive"):
        msl_host.Host(timeout=0)
    with pytest.raises(ValueError, match="compile_options"):
        host.metal_kernel("k", ["a"], ["b"], "", compile_options={"math_mode": "slow"})


# ---- the lint

needs_clang = pytest.mark.skipif(msl_host.lint_unavailable() is not None, reason=str(msl_host.lint_unavailable()))
DEVICE_ONLY = "inline float first(const device float* p) { return p[0]; }\n"


@needs_clang
@pytest.mark.parametrize(
    ("body", "header", "size", "problem"),
    [
        ("out[0] = first(a);", DEVICE_ONLY, 7, r"^k\.metal:1: no matching function for call to 'first'"),
        ("out[0] = first(a);", DEVICE_ONLY, 8, None),
        ("\nconst float* p = a;\nout[0] = p[0];", "", 8, r"^k\.metal:2: .*cannot initialize .* 'const float"),
        ("threadgroup float s[4];\ns[0] = 1;\ndevice float* p = s;\nout[0] = p[0];", "", 8, r"^k\.metal:3: "),
        ("float v;\nif (a[0] > 0) v = 1;\nout[0] = v;", "", 8, r"^k\.metal:2: variable 'v' is used uninitialized"),
        ("float2 v = float2(a[0], 1);\nauto x = 1.0 * v.x;\nout[0] = max(x, 2.0h * 1.0f);", "", 8, None),
        ("threadgroup float s[4];\nthreadgroup float* p = s + 1;\np[0] = a[0];\nout[0] = *p;", "", 8, None),
    ],
)
def test_lint(host, body, header, size, problem):
    kernel = host.metal_kernel("k", ["a"], ["out"], body, header)
    found = host.lint(kernel, [mx.zeros(size)], [mx.float32])
    assert not found if problem is None else re.search(problem, found[0]), found


@needs_clang
def test_lint_of_all_that_ran():
    host = msl_host.Host()
    run(host, "T x = a[0];\nout[0] = x;", [mx.zeros(3)], (1,), template=[("T", mx.float16)])
    assert host.lint() == []
    source = "out[0] = first((const device float*)a) + first(a);"
    run(host, source, [mx.zeros(3)], (1,), header=DEVICE_ONLY, name="other")
    assert len(host.lint()) == 1 and host.lint()[0].startswith("other.metal:1: ")


# ---- the machine


def in_another_process(program, **environment):
    program = "import mlx.core as mx, msl_host\n" + program
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_compiler_there_is_one_clear_error():
    program = "print(msl_host.unavailable())\nmsl_host.Host()"
    result = in_another_process(program, MSL_HOST_CXX="no-such-compiler")
    reason = "msl_host needs no-such-compiler, which is not installed (g++ 12 or newer brings it)"
    assert result.stdout.strip() == reason
    assert result.stderr.splitlines()[-1] == f"msl_host.errors.MSLError: {reason}"


def test_fibers_of_other_machines(tmp_path):
    program = "from msl_misuse import CONTROLS, FOUND\nhost = msl_host.Host(check=True)\n"
    program += "print(CONTROLS[3].run(host).tolist() == list(range(64)))\n"
    program += "try: FOUND[0].run(host)\nexcept msl_host.MSLRunError as error: print(error)"
    result = in_another_process(program, MSL_HOST_PORTABLE="1", MSL_HOST_CACHE=str(tmp_path))
    assert result.stdout.startswith("True\ndivergent_barrier.metal:5: "), result.stdout + result.stderr


def test_the_page_is_true():
    text = (Path(__file__).resolve().parent.parent / "docs" / "msl-host.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(blocks) == 8
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "docs/msl-host.md", "exec"), namespace)
