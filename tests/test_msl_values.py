"""What kernels compute on the host: positions, simd-group operations, rounding, functions, matrices, atomics."""

from __future__ import annotations

import mlx.core as mx
import msl_host
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msl_misuse import run

pytestmark = pytest.mark.skipif(msl_host.unavailable() is not None, reason=str(msl_host.unavailable()))


@pytest.fixture(scope="module")
def host():
    return msl_host.Host()


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


def bits(x):
    return x.astype(np.float32).view(np.uint32)


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
    "float(popcount(as_type<uint>(x)))": lambda x: [int(b).bit_count() for b in bits(x)],
    "float(clz(as_type<int>(x) & 0xffff))": lambda x: [32 - int(b & 0xFFFF).bit_length() for b in bits(x)],
    "float(ctz(as_type<uint>(x) | 0x800000u))": lambda x: [f"{b | 0x800000:b}"[::-1].index("1") for b in bits(x)],
    "float(mulhi(as_type<uint>(x), 65536u))": lambda x: np.float64((bits(x) >> 16).astype("f4")),
    "float(extract_bits(as_type<uint>(x), 3u, 5u))": lambda x: np.float64(bits(x) >> 3 & 31),
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
        constexpr auto relaxed = memory_order_relaxed;
        threadgroup atomic_uint count[8];
        uint i = thread_position_in_grid.x, l = thread_index_in_threadgroup;
        for (uint k = l; k < 8; k += threads_per_threadgroup.x)
          atomic_store_explicit(&count[k], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count[a[i]], 1u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = l; k < 8; k += threads_per_threadgroup.x)
          atomic_fetch_add_explicit(&out[k], atomic_load_explicit(&count[k], relaxed), relaxed);
        atomic_fetch_max_explicit(&out[8], a[i], relaxed);
        uint seen = 0;
        while (!atomic_compare_exchange_weak_explicit(&out[9], &seen, seen + a[i], relaxed, relaxed));
        atomic_fetch_or_explicit(&out[10], 1u << a[i], relaxed);
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


def test_threadgroup_variables(host):
    source = """
        threadgroup float s[N * (N + 1)], t[2][N], one; // "threadgroup float u[3];" in a comment
        threadgroup vec<T, 4>
            v[N];
        threadgroup float3 w[64];
        threadgroup float* p = s; const threadgroup T& first = v[0][0];
        uint l = thread_index_in_threadgroup;
        for (uint k = l; k < N * (N + 1); k += 32) p[k] = k;
        t[l % 2][l / 2] = l;
        if (l == 0) one = 1;
        if (l < N) v[l] = vec<T, 4>(l, 2, 3, 4);
        w[l] = float3(l, 2 * l, 3 * l); // the fourth component is never written
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float3 other = w[31 - l];
        out[l] = s[l] + t[1][l % N] + one + float(v[l % N].x) + other.z + float(first);
    """
    with host.using(check=True):
        out = run(host, source, [0], (32,), template=[("T", mx.bfloat16), ("N", 16)])
    lane = np.arange(32)
    assert np.array_equal(out, lane + (2 * (lane % 16) + 1) + 1 + lane % 16 + 3 * (31 - lane))
    assert host.report.threadgroup_bytes == 4 * (16 * 17 + 32 + 1) + 8 * 16 + 16 * 64
