// The prelude of every kernel: Metal's standard library, then what MLX puts before its own kernels.
#pragma once
#include "simd.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL__ 1
#define __METAL_VERSION__ 310
#define MLX_METAL_JIT 1
#define device
#define constant
#define thread
#define threadgroup  // variables are declared through msl::threadgroup_variable, see source.py
#define kernel

namespace msl {
template <class T>
MSL_INLINE T& threadgroup_variable(const Variable* variable) {
  return *(T*)msl_threadgroup(variable);
}
}  // namespace msl
using namespace metal;

// MLX's complex.h overloads its constructors on address spaces, which C++ has not; kernels/complex.h is empty here.
template <class T>
struct complex_t {
  T real, imag;
  complex_t() = default;
  complex_t(T r, T i) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
template <class T>
constexpr bool is_complex_v = false;

// Names inside Apple's compiler that MLX's bf16_math.h defines the functions of bfloat with.
#define MSL_INTERNAL(name)                                                                       \
  template <class... Mode>                                                                       \
  MSL_INLINE float __metal_##name(float x, Mode...) { return metal::name(x); }
#define MSL_INTERNAL2(name)                                                                      \
  template <class... Mode>                                                                       \
  MSL_INLINE float __metal_##name(float x, float y, Mode...) { return metal::name(x, y); }
#define MSL_INTERNAL3(name)                                                                      \
  template <class... Mode>                                                                       \
  MSL_INLINE float __metal_##name(float x, float y, float z, Mode...) { return metal::name(x, y, z); }
#define MSL_INTERNAL_SIMD(name)                                                                  \
  template <class T, class... N>                                                                 \
  MSL_INLINE T __metal_##name(T x, N... n) { return metal::name(x, n...); }
MSL_INTERNAL(acos) MSL_INTERNAL(acosh) MSL_INTERNAL(asin) MSL_INTERNAL(asinh) MSL_INTERNAL(atan) MSL_INTERNAL(atanh)
MSL_INTERNAL(ceil) MSL_INTERNAL(cos) MSL_INTERNAL(cosh) MSL_INTERNAL(cospi) MSL_INTERNAL(exp) MSL_INTERNAL(exp10)
MSL_INTERNAL(exp2) MSL_INTERNAL(fabs) MSL_INTERNAL(floor) MSL_INTERNAL(fract) MSL_INTERNAL(log) MSL_INTERNAL(log10)
MSL_INTERNAL(log2) MSL_INTERNAL(rint) MSL_INTERNAL(round) MSL_INTERNAL(rsqrt) MSL_INTERNAL(sin) MSL_INTERNAL(sinh)
MSL_INTERNAL(sinpi) MSL_INTERNAL(sqrt) MSL_INTERNAL(tan) MSL_INTERNAL(tanh) MSL_INTERNAL(tanpi) MSL_INTERNAL(trunc)
MSL_INTERNAL2(atan2) MSL_INTERNAL2(divide) MSL_INTERNAL2(fmax) MSL_INTERNAL2(fmin) MSL_INTERNAL2(fmod)
MSL_INTERNAL2(pow) MSL_INTERNAL2(powr) MSL_INTERNAL2(nextafter)
MSL_INTERNAL3(fma) MSL_INTERNAL3(fmax3) MSL_INTERNAL3(fmin3) MSL_INTERNAL3(fmedian3)
MSL_INTERNAL_SIMD(simd_sum) MSL_INTERNAL_SIMD(simd_product) MSL_INTERNAL_SIMD(simd_max) MSL_INTERNAL_SIMD(simd_min)
MSL_INTERNAL_SIMD(simd_broadcast) MSL_INTERNAL_SIMD(simd_shuffle)
MSL_INTERNAL_SIMD(simd_shuffle_xor) MSL_INTERNAL_SIMD(simd_shuffle_down) MSL_INTERNAL_SIMD(simd_shuffle_up)
MSL_INTERNAL_SIMD(simd_shuffle_rotate_down) MSL_INTERNAL_SIMD(simd_shuffle_rotate_up)
MSL_INTERNAL_SIMD(simd_prefix_inclusive_sum) MSL_INTERNAL_SIMD(simd_prefix_exclusive_sum)
MSL_INTERNAL_SIMD(simd_prefix_inclusive_product) MSL_INTERNAL_SIMD(simd_prefix_exclusive_product)
template <class T>
MSL_INLINE T __metal_simd_shuffle_and_fill_down(T x, T y, ushort d, ushort m) {
  return metal::simd_shuffle_and_fill_down(x, y, d, m);
}
template <class T>
MSL_INLINE T __metal_simd_shuffle_and_fill_up(T x, T y, ushort d, ushort m) {
  return metal::simd_shuffle_and_fill_up(x, y, d, m);
}
inline float __metal_simd_xor(float x) {
  msl::msl_fail("simd_xor of a floating-point number");
  return x;
}
inline float __metal_ldexp(float x, int k, int) { return metal::ldexp(x, k); }
inline float __metal_frexp(float x, int* k) { return __builtin_frexpf(x, k); }
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#include "mlx/backend/metal/kernels/utils.h"

#define double double_is_not_in_metal
