// Declarations only, for clang++ -fsyntax-only: here address spaces are part of the types, as they are in Metal.
#pragma once
#include <limits>
#include <stddef.h>
#include <stdint.h>
#include <type_traits>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline
#define __METAL__ 1
#define __METAL_VERSION__ 310
#define MLX_METAL_JIT 1
#define MLX_MTL_PRAGMA_UNROLL
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955e-07f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
half operator""h(long double);
bfloat operator""bf(long double);
#define VECTORS(T) EXTENDED(T, 2) EXTENDED(T, 3) EXTENDED(T, 4)
#define EXTENDED(T, N) typedef T T##N __attribute__((ext_vector_type(N)));
VECTORS(float) VECTORS(half) VECTORS(int) VECTORS(uint) VECTORS(short) VECTORS(ushort) VECTORS(char) VECTORS(uchar)
VECTORS(long) VECTORS(ulong)
#undef EXTENDED
#undef VECTORS

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
using std::conditional, std::conditional_t, std::enable_if, std::enable_if_t, std::is_convertible_v, std::is_integral_v;
using std::is_same, std::is_same_v;
template <class T>
struct numeric_limits : std::numeric_limits<T> {};

#define F1(n) float n(float); half n(half); bfloat n(bfloat); template <class T, int N> vec<T, N> n(vec<T, N>);
#define F2(n)                                                         \
  float n(float, float); half n(half, half); bfloat n(bfloat, bfloat); \
  template <class T, int N> vec<T, N> n(vec<T, N>, vec<T, N>);
#define F3(n)                                                                                \
  float n(float, float, float); half n(half, half, half); bfloat n(bfloat, bfloat, bfloat);  \
  template <class T, int N> vec<T, N> n(vec<T, N>, vec<T, N>, vec<T, N>);
#define BOTH_PRECISIONS                                                                                             \
  F1(exp) F1(exp2) F1(exp10) F1(log) F1(log2) F1(log10) F1(sin) F1(cos) F1(tan) F1(asin) F1(acos) F1(atan) F1(sinh) \
  F1(cosh) F1(tanh) F1(asinh) F1(acosh) F1(atanh) F1(sinpi) F1(cospi) F1(tanpi) F1(sqrt) F1(rsqrt) F1(ceil)         \
  F1(floor) F1(trunc) F1(round) F1(rint) F1(fract) F1(fabs) F1(abs) F1(saturate) F2(pow) F2(powr) F2(fmin) F2(fmax) \
  F2(min) F2(max) F2(fmod) F2(atan2) F2(divide) F3(clamp)
BOTH_PRECISIONS F1(sign) F2(copysign) F2(step) F2(fdim) F2(nextafter) F3(fma) F3(mix) F3(fmax3) F3(fmin3) F3(fmedian3)
namespace precise { BOTH_PRECISIONS }
namespace fast { BOTH_PRECISIONS }
#undef BOTH_PRECISIONS
#undef F1
#undef F2
#undef F3
#define INTEGER(T) T min(T, T); T max(T, T); T clamp(T, T, T); T abs(T); T popcount(T); T clz(T); T ctz(T);
INTEGER(int8_t) INTEGER(uchar) INTEGER(short) INTEGER(ushort) INTEGER(int) INTEGER(uint) INTEGER(long) INTEGER(ulong)
#undef INTEGER
template <class T> T extract_bits(T, uint, uint);
uint mulhi(uint, uint);
float ldexp(float, int);
bool isnan(float); bool isinf(float); bool isfinite(float); bool isnan(half); bool isinf(half); bool isfinite(half);
template <class T> T select(T, T, bool);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T, int N> T length(vec<T, N>);

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define S1(n) template <class T> T n(T);
#define S2(n) template <class T> T n(T, ushort);
S1(simd_sum) S1(simd_product) S1(simd_max) S1(simd_min) S1(simd_and) S1(simd_or) S1(simd_xor) S1(simd_broadcast_first)
S1(simd_prefix_inclusive_sum) S1(simd_prefix_exclusive_sum)
S1(simd_prefix_inclusive_product) S1(simd_prefix_exclusive_product)
S2(simd_shuffle) S2(simd_broadcast) S2(simd_shuffle_xor) S2(simd_shuffle_down) S2(simd_shuffle_up)
S2(simd_shuffle_rotate_down) S2(simd_shuffle_rotate_up) S2(quad_shuffle) S2(quad_broadcast) S2(quad_shuffle_xor)
#undef S1
#undef S2
template <class T> T simd_shuffle_and_fill_down(T, T, ushort, ushort = 32);
template <class T> T simd_shuffle_and_fill_up(T, T, ushort, ushort = 32);
bool simd_all(bool); bool simd_any(bool); bool simd_is_first();
struct simd_vote { explicit operator ulong() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define ATOMIC(space, result, name, ...) \
  template <class T, class U> result name(volatile space atomic<T>*, __VA_ARGS__ memory_order);
#define EVERY_ATOMIC(space)                                                                                        \
  ATOMIC(space, T, atomic_fetch_add_explicit, U,) ATOMIC(space, T, atomic_fetch_sub_explicit, U,)                  \
  ATOMIC(space, T, atomic_fetch_max_explicit, U,) ATOMIC(space, T, atomic_fetch_min_explicit, U,)                  \
  ATOMIC(space, T, atomic_fetch_and_explicit, U,) ATOMIC(space, T, atomic_fetch_or_explicit, U,)                   \
  ATOMIC(space, T, atomic_fetch_xor_explicit, U,) ATOMIC(space, T, atomic_exchange_explicit, U,)                   \
  ATOMIC(space, void, atomic_store_explicit, U,)                                                                   \
  ATOMIC(space, bool, atomic_compare_exchange_weak_explicit, T*, U, memory_order,)                                 \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);
EVERY_ATOMIC(device) EVERY_ATOMIC(threadgroup)
#undef EVERY_ATOMIC
#undef ATOMIC

template <class T, int R, int C>
struct simdgroup_matrix { simdgroup_matrix(); explicit simdgroup_matrix(T); vec<T, 2>& thread_elements(); };
template <class T> using Matrix = simdgroup_matrix<T, 8, 8>;
typedef Matrix<float> simdgroup_float8x8;
typedef Matrix<half> simdgroup_half8x8;
template <class T, int R = 8, int C = 8> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <class D, class A, class B> void simdgroup_multiply(Matrix<D>&, Matrix<A>, Matrix<B>);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(Matrix<D>&, Matrix<A>, Matrix<B>, Matrix<C>);
#define MATRIX_MEMORY(space)                                                                                \
  template <class T> void simdgroup_load(Matrix<T>&, const space T*, ulong = 8, ulong2 = 0, bool = false);  \
  template <class T> void simdgroup_store(Matrix<T>, space T*, ulong = 8, ulong2 = 0, bool = false);
MATRIX_MEMORY(device) MATRIX_MEMORY(threadgroup)
#undef MATRIX_MEMORY
}  // namespace metal
using namespace metal;
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  return To();
}
template <class V, class... A> V msl_make(A...);  // lint.py writes float4(a, b) as msl_make<float4>(a, b)

// of MLX's prelude
template <class IdxT = int64_t> IdxT elem_to_loc(IdxT, constant const int*, constant const int64_t*, int);
template <class T, class U> T ceildiv(T, U);
template <class T> struct Limits {
  static constexpr constant T max = T(), min = T(), finite_max = T(), finite_min = T();
};
struct complex64_t { float real, imag; };
