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
from hypothesis import Phase, given, settings
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


def test_lines_are_those_of_the_file_the_source_names(checked):
    body = msl_host.located("uint i = thread_position_in_grid.x;\nout[i] = f(a, i);\n", "kernels/b.metal", line=40)
    header = msl_host.located("inline float f(const device float* p, uint i) {\n  return p[i + 1];\n}\n", "kernels/a.metal")
    with pytest.raises(msl_host.MSLRunError, match=r"^kernels/a\.metal:2: read out of bounds: 'a'\[32\] by thread 31"):
        run(checked, body, [mx.zeros(32)], (32,), header=header)
    with pytest.raises(msl_host.MSLCompileError, match=r"kernels/b\.metal:41:"):
        run(checked, body.replace("f(a, i)", "g(a, i)"), [mx.zeros(32)], (32,), header=header)


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
        template.append((f"P{index}", [DTYPES[rng.integers(len(DTYPES))], int(rng.integers(-5, 9)), True, False][rng.integers(4)]))
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
    with host.using(check=True), pytest.raises(msl_host.MSLRunError, match="1 of 5 elements never written, the first at 4"):
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


# ---- what it computes


@settings(max_examples=20)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3)),
    st.tuples(st.integers(1, 36), st.integers(1, 4), st.integers(1, 2)),
)
def test_positions_in_edge_threadgroups(host, grid, group):
    source = """
        uint3 p = thread_position_in_grid;
        uint at = (p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x;
        device uint* o = out + at * 12;
        uint3 v[3] = {thread_position_in_threadgroup, threadgroup_position_in_grid, threads_per_threadgroup};
        for (uint k = 0; k < 9; k++) o[k] = v[k / 3][k % 3];
        o[9] = thread_index_in_threadgroup;
        o[10] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
        o[11] = simd_sum(1u) + 100 * simdgroups_per_threadgroup;
    """
    size = int(np.prod(grid))
    with host.using(check=True):
        out = run(host, source, [0], (size, 12), mx.uint32, grid=grid, group=group)
    z, y, x = np.unravel_index(np.arange(size), grid[::-1])
    position, group = np.stack([x, y, z], 1), np.minimum(group, grid)
    at = position // group
    edge = np.minimum(group, grid - at * group)
    inside = position - at * group
    index = (inside[:, 2] * edge[:, 1] + inside[:, 1]) * edge[:, 0] + inside[:, 0]
    threads = edge.prod(1)
    lanes = np.minimum(32, threads - index // 32 * 32)
    expected = [inside, at, edge, index[:, None], (index // 32 * 100 + index % 32)[:, None]]
    expected.append((lanes + 100 * -(-threads // 32))[:, None])
    assert np.array_equal(out, np.concatenate(expected, 1))


COLLECTIVES = """
    uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
    T x = a[i];
    device T* o = out + i * 17;
    o[0] = simd_sum(x);
    o[1] = simd_max(x);
    o[2] = simd_min(x);
    o[3] = simd_prefix_inclusive_sum(x);
    o[4] = simd_prefix_exclusive_sum(x);
    o[5] = simd_shuffle_down(x, 3);
    o[6] = simd_shuffle_up(x, 5);
    o[7] = simd_shuffle_xor(x, 1);
    o[8] = simd_broadcast(x, 1);
    o[9] = simd_broadcast_first(x);
    o[10] = simd_shuffle(x, ushort((lane * 7) % 2));
    o[11] = simd_shuffle_and_fill_up(x, T(-9), 2);
    o[12] = simd_all(x > T(0)) ? T(1) : T(0);
    o[13] = simd_any(x > T(3)) ? T(1) : T(0);
    o[14] = T(popcount(uint(ulong(simd_ballot(x > T(0))))));
    o[15] = quad_shuffle_xor(x, 1);
    o[16] = simd_is_first() ? T(1) : T(0);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int16], ids=str)
@settings(max_examples=8, phases=[Phase.generate])
@given(st.integers(1, 48), st.integers(0, 2**31), st.integers(0, 99))
def test_simdgroup_operations(host, dtype, pairs, seed, order):
    size = 2 * pairs  # the xor and the second lane are there
    x = np.random.default_rng(seed).integers(-4, 5, size)
    with host.using(check=True, seed=order):
        inputs = [mx.array(x).astype(dtype)]
        out = run(host, COLLECTIVES, inputs, (size, 17), dtype, grid=(size, 1, 1), template=[("T", dtype)])
    out = np.array(out.astype(mx.float32))
    for start in range(0, size, 32):
        v, got = x[start : start + 32], out[start : start + 32]
        lane, ones = np.arange(len(v)), np.ones(len(v))
        up = {delta: v[lane - np.minimum(lane, delta)] for delta in (2, 5)}
        down = np.where(lane + 3 < 32, v[np.minimum(lane + 3, len(v) - 1)], v)
        expected = [v.sum() * ones, v.max() * ones, v.min() * ones, np.cumsum(v), np.cumsum(v) - v, down]
        expected += [np.where(lane >= 5, up[5], v), v[lane ^ 1], v[1] * ones, v[0] * ones, v[lane * 7 % 2]]
        expected += [np.where(lane >= 2, up[2], -9), (v > 0).all() * ones, (v > 3).any() * ones]
        expected += [(v > 0).sum() * ones, v[lane ^ 1], lane == 0]
        known = np.ones((17, len(v)), bool)  # what comes from a lane that is not there is undefined
        known[5] = (lane + 3 < len(v)) | (lane + 3 > 31)
        known[11] = (lane >= 2) | (len(v) == 32)
        assert np.array_equal(got.T[known], np.stack(expected)[known])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@settings(max_examples=8, phases=[Phase.generate])
@given(st.integers(0, 2**31), st.booleans())
def test_halves_round_every_operation(host, dtype, seed, contract):
    source = """
        uint i = thread_position_in_grid.x;
        T x = a[i], y = b[i];
        T sum = x + y, product = x * y, chain = x * y + x;
        sum += 1;
        out[i * 6] = sum;
        out[i * 6 + 1] = product;
        out[i * 6 + 2] = x / y;
        out[i * 6 + 3] = contract ? x : chain;
        out[i * 6 + 4] = T(float(x) * float(y) + 0.1);
        out[i * 6 + 5] = metal::max(x, y) - metal::abs(x);
    """
    rng = np.random.default_rng(seed)
    x, y = (mx.array(rng.standard_normal(64) * 10.0 ** rng.integers(-5, 4, 64)).astype(dtype) for _ in range(2))
    options = {"template": [("T", dtype), ("contract", contract)], "grid": (64, 1, 1)}
    with host.using(contract=contract):
        out = run(host, source, [x, y], (64, 6), dtype, **options)
    one = mx.array(1, dtype)
    expected = [x + y + one, x * y, x / y, x if contract else x * y + x]
    fused = np.array(x.astype(mx.float32), np.float64) * np.array(y.astype(mx.float32)) + np.float64(np.float32(0.1))
    expected += [mx.array(fused.astype(np.float32)).astype(dtype), mx.maximum(x, y) - mx.abs(x)]
    assert mx.array_equal(out, mx.stack(expected, 1), equal_nan=True)


def test_contraction_and_flushing(host):
    source = "out[0] = a[0] * a[1] + a[2];\nout[1] = a[3] * 0.5f;\nout[2] = 1.0h * half(a[4]);"
    inputs = [mx.array([1 + 2**-12, 1 + 2**-12, -1 - 2**-11, 2.0**-126, 2.0**-20, 0, 0, 0])]
    for contract in (False, True):
        for ftz in (False, True):
            with host.using(contract=contract, ftz=ftz):
                got = run(host, source, inputs, (3,), grid=(1, 1, 1)).tolist()
            assert got == [2.0**-24 if contract else 0, 0 if ftz else 2.0**-127, 2.0**-20]


def test_literals_are_floats(host):
    source = """
        auto x = 1.0; static_assert(is_same_v<decltype(x), float>); static_assert(is_same_v<decltype(2.5h), half>);
        auto y = 1.5bf; static_assert(is_same_v<decltype(y), bfloat>);
        out[0] = 16777217.0 - 1.0; out[1] = float(y) + float(2.5h); // not 0.5 in a comment: "1.0"
    """
    assert run(host, source, [0], (2,), grid=(1, 1, 1)).tolist() == [16777216.0 - 1, 4.0]


FUNCTIONS = {
    "exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "exp10(x)": lambda x: 10.0**x,
    "log(fabs(x))": lambda x: np.log(abs(x)),
    "log2(fabs(x))": lambda x: np.log2(abs(x)),
    "precise::tanh(x)": np.tanh,
    "fast::sin(x)": np.sin,
    "rsqrt(abs(x))": lambda x: abs(x) ** -0.5,
    "fract(x)": lambda x: x - np.floor(x),
    "rint(x)": np.rint,
    "trunc(x)": np.trunc,
    "sign(x)": np.sign,
    "saturate(x)": lambda x: np.clip(x, 0, 1),
    "clamp(x, -1.0f, 0.5f)": lambda x: np.clip(x, -1, 0.5),
    "fmod(x, 0.7f)": lambda x: np.fmod(x, np.float64(np.float32(0.7))),
    "pow(fabs(x), 1.5f)": lambda x: abs(x) ** 1.5,
    "fma(x, x, 1.0f)": lambda x: x * x + 1,
    "mix(x, 1.0f, 0.25f)": lambda x: x + (1 - x) / 4,
    "select(x, -x, x < 0)": abs,
    "copysign(2.0f, x)": lambda x: np.copysign(2, x),
    "float(popcount(uint(as_type<uint>(x))))": lambda x: np.array([int(b).bit_count() for b in x.astype("f4").view("u4")]),
    "float(clz(as_type<int>(x) & 0xffff))": lambda x: 32 - np.array(
        [int(b & 0xFFFF).bit_length() for b in x.astype("f4").view("u4")]
    ),
    "float(ctz(ushort(as_type<uint>(x) << 4)))": lambda x: np.array(
        [(int(b << 4 & 0xFFFF) | 1 << 16).bit_length() - 1 and bin(int(b << 4 & 0xFFFF) | 1 << 16)[::-1].index("1")
         for b in x.astype("f4").view("u4")]
    ),
    "float(mulhi(as_type<uint>(x), 65536u))": lambda x: np.float64((x.astype("f4").view("u4") >> 16).astype("f4")),
    "float(extract_bits(as_type<uint>(x), 3u, 5u))": lambda x: np.float64(x.astype("f4").view("u4") >> 3 & 31),
    "dot(float3(x, 1, 2), float3(2, x, 0.5))": lambda x: 3 * x + 1,
    "length(float2(x, 1))": lambda x: np.hypot(x, 1),
    "float4(float4(x, float2(1, 2), 3).wzyx).w + float3(float3(x).zyx).x": lambda x: 2 * x,
    "float2((float4(x) * 2 + float4(1, 2, 3, 4)).even).y": lambda x: 2 * x + 3,
    "max(float2(x, 0), float2(0)).x": lambda x: np.maximum(x, 0),
    "float(any(float2(x, 1) < 0) ? 1 : 0)": lambda x: x < 0,
    "float(as_type<half2>(as_type<uint>(half2(half(x), 2.0h))).y)": lambda x: 2 + 0 * x,
    "float(float3(packed_float3(float3(x, 2, 3))).y)": lambda x: 2 + 0 * x,
    "float(numeric_limits<half>::max()) + float(Limits<bfloat>::finite_max) * 0": lambda x: 65504 + 0 * x,
    "log1p(fabs(x))": lambda x: np.log1p(abs(x)),
    "float(ceildiv(int(fabs(x)), 2))": lambda x: np.ceil(np.trunc(abs(x)) / 2),
}


def test_functions(host):
    lines = [f"out[i * {len(FUNCTIONS)} + {k}] = {call};" for k, call in enumerate(FUNCTIONS)]
    source = "uint i = thread_position_in_grid.x;\nfloat x = a[i];\n" + "\n".join(lines)
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2
    out = np.array(run(host, source, [mx.array(x)], (50, len(FUNCTIONS)), grid=(50, 1, 1)))
    for (call, function), got in zip(FUNCTIONS.items(), out.T):
        np.testing.assert_allclose(got, function(x.astype(np.float64)), rtol=2e-6, atol=1e-6, err_msg=call)


@pytest.mark.parametrize(("dtype", "transposed"), [(mx.float32, False), (mx.float16, True)], ids=str)
def test_matrices(host, dtype, transposed):
    source = """
        simdgroup_matrix<T, 8, 8> x, y;
        simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
        for (int k = 0; k < 24; k += 8) {
          simdgroup_load(x, a + k, 24);
          if (transposed) simdgroup_load(y, b + k, 24, ulong2(0, 0), true);
          else simdgroup_load(y, b, 8, ulong2(0, k));
          simdgroup_multiply_accumulate(sum, x, y, sum);
        }
        simdgroup_store(sum, out, 8);
    """
    rng = np.random.default_rng(1)
    x, y = rng.integers(-9, 9, (8, 24)), rng.integers(-9, 9, (24, 8))
    inputs = [mx.array(x).astype(dtype), mx.array(y.T if transposed else y).astype(dtype)]
    with host.using(check=True):
        out = run(host, source, inputs, (8, 8), template=[("T", dtype), ("transposed", transposed)])
    assert np.array_equal(out, x @ y + 0.5)


@settings(max_examples=8, phases=[Phase.generate])
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_atomics(host, size, seed):
    source = """
        threadgroup atomic_uint count[8];
        uint i = thread_position_in_grid.x, l = thread_index_in_threadgroup;
        for (uint k = l; k < 8; k += threads_per_threadgroup.x)
          atomic_store_explicit(&count[k], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count[a[i]], 1u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = l; k < 8; k += threads_per_threadgroup.x)
          atomic_fetch_add_explicit(&out[k], atomic_load_explicit(&count[k], memory_order_relaxed), memory_order_relaxed);
        atomic_fetch_max_explicit(&out[8], a[i], memory_order_relaxed);
        uint seen = 0;
        while (!atomic_compare_exchange_weak_explicit(&out[9], &seen, seen + a[i], memory_order_relaxed, memory_order_relaxed));
        atomic_fetch_or_explicit(&out[10], 1u << a[i], memory_order_relaxed);
    """
    x = np.random.default_rng(seed).integers(0, 8, size).astype(np.uint32)
    options = {"atomic_outputs": True, "init_value": 0}
    with host.using(check=True, seed=seed % 100):
        padded = mx.array(np.resize(x, max(size, 8)))  # 8 elements or more are a device buffer
        out = run(host, source, [padded], (11,), mx.uint32, grid=(size, 1, 1), group=(64, 1, 1), **options)
    expected = [*np.bincount(x, minlength=8), x.max(), x.sum(), np.bitwise_or.reduce(1 << x)]
    assert np.array_equal(out, expected)


def test_the_order_of_threads_follows_the_seed(host):
    source = """
        uint i = thread_position_in_grid.x;
        uint ticket = atomic_fetch_add_explicit(&out[64], 1u, memory_order_relaxed);
        atomic_store_explicit(&out[ticket], i, memory_order_relaxed);
    """
    orders = []
    for seed in (0, 0, 1, 2, 1):
        with host.using(seed=seed):
            options = {"atomic_outputs": True, "init_value": 0}
            orders.append(run(host, source, [0], (65,), mx.uint32, grid=(64, 1, 1), **options).tolist()[:64])
    assert orders[0] == orders[1] == list(range(64))
    assert orders[2] == orders[4] != orders[3] and all(sorted(order) == orders[0] for order in orders)


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
    run(host, "out[0] = first((const device float*)a) + first(a);", [mx.zeros(3)], (1,), header=DEVICE_ONLY, name="other")
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
