// The functions of <metal_math>, <metal_integer>, <metal_common>, <metal_geometric> and <metal_relational>.
#pragma once
#include "types.h"

namespace metal {
// A function of 1, 2 or 3 floating-point operands x, y, z. As in Metal there is an overload for float, one for half
// and one for vectors, none for integers or bfloat: max(x, 0) is ambiguous here as it is there.
#define MSL_F1(name, value)                                                             \
  MSL_INLINE float name(float x) { return value; }                                      \
  MSL_INLINE half name(half x_) { float x = x_; return (half)(float)(value); }          \
  template <class T, int N>                                                             \
  MSL_INLINE vec<T, N> name(const vec<T, N>& x) { MSL_EACH(T, name(x.d[i])) }
#define MSL_F2(name, value)                                                             \
  MSL_INLINE float name(float x, float y) { return value; }                             \
  MSL_INLINE half name(half x_, half y_) { float x = x_, y = y_; return (half)(float)(value); } \
  template <class T, int N>                                                             \
  MSL_INLINE vec<T, N> name(const vec<T, N>& x, const vec<T, N>& y) { MSL_EACH(T, name(x.d[i], y.d[i])) }
#define MSL_F3(name, value)                                                             \
  MSL_INLINE float name(float x, float y, float z) { return value; }                    \
  MSL_INLINE half name(half x_, half y_, half z_) {                                     \
    float x = x_, y = y_, z = z_;                                                       \
    return (half)(float)(value);                                                        \
  }                                                                                     \
  template <class T, int N>                                                             \
  MSL_INLINE vec<T, N> name(const vec<T, N>& x, const vec<T, N>& y, const vec<T, N>& z) { \
    MSL_EACH(T, name(x.d[i], y.d[i], z.d[i]))                                           \
  }
#define B(name) __builtin_##name##f
#define MSL_PI 3.14159265358979f
#define MSL_BUILTIN(name) MSL_F1(name, B(name)(x))
#define MSL_BOTH_PRECISIONS                                                                                \
  MSL_BUILTIN(exp) MSL_BUILTIN(exp2) MSL_BUILTIN(log) MSL_BUILTIN(log2) MSL_BUILTIN(log10)                 \
  MSL_BUILTIN(sin) MSL_BUILTIN(cos) MSL_BUILTIN(tan) MSL_BUILTIN(asin) MSL_BUILTIN(acos) MSL_BUILTIN(atan) \
  MSL_BUILTIN(sinh) MSL_BUILTIN(cosh) MSL_BUILTIN(tanh) MSL_BUILTIN(asinh) MSL_BUILTIN(acosh)              \
  MSL_BUILTIN(atanh) MSL_BUILTIN(sqrt) MSL_BUILTIN(ceil) MSL_BUILTIN(floor) MSL_BUILTIN(trunc)             \
  MSL_BUILTIN(round) MSL_BUILTIN(fabs) MSL_F1(rint, B(nearbyint)(x)) MSL_F1(abs, B(fabs)(x))               \
  MSL_F1(exp10, B(pow)(10.0f, x)) MSL_F1(rsqrt, 1.0f / B(sqrt)(x)) MSL_F1(saturate, B(fmin)(B(fmax)(x, 0.0f), 1.0f)) \
  MSL_F1(sinpi, B(sin)(MSL_PI * x)) MSL_F1(cospi, B(cos)(MSL_PI * x)) MSL_F1(tanpi, B(tan)(MSL_PI * x))    \
  MSL_F1(fract, B(fmin)(x - B(floor)(x), 0x1.fffffep-1f)) MSL_F2(pow, B(pow)(x, y)) MSL_F2(powr, B(pow)(x, y)) \
  MSL_F2(atan2, B(atan2)(x, y)) MSL_F2(divide, x / y) MSL_F2(fmod, B(fmod)(x, y))                          \
  MSL_F2(fmin, B(fmin)(x, y)) MSL_F2(fmax, B(fmax)(x, y)) MSL_F2(min, B(fmin)(x, y)) MSL_F2(max, B(fmax)(x, y)) \
  MSL_F3(clamp, B(fmin)(B(fmax)(x, y), z))
MSL_BOTH_PRECISIONS
namespace precise { MSL_BOTH_PRECISIONS }
namespace fast { MSL_BOTH_PRECISIONS }
MSL_F1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
MSL_F2(copysign, B(copysign)(x, y))
MSL_F2(step, y < x ? 0.0f : 1.0f)
MSL_F2(fdim, x > y ? x - y : 0.0f)
MSL_F2(nextafter, B(nextafter)(x, y))
MSL_F3(fma, B(fma)(x, y, z))
MSL_F3(mix, x + (y - x) * z)
MSL_F3(fmax3, B(fmax)(B(fmax)(x, y), z))
MSL_F3(fmin3, B(fmin)(B(fmin)(x, y), z))
MSL_F3(fmedian3, B(fmax)(B(fmin)(x, y), B(fmin)(B(fmax)(x, y), z)))
MSL_INLINE float ldexp(float x, int k) { return B(ldexp)(x, k); }
MSL_INLINE float frexp(float x, int& k) { return B(frexp)(x, &k); }
MSL_INLINE bool isnan(float x) { return x != x; }
MSL_INLINE bool isinf(float x) { return B(fabs)(x) == __builtin_inff(); }
MSL_INLINE bool isfinite(float x) { return B(fabs)(x) < __builtin_inff(); }
MSL_INLINE bool signbit(float x) { return as_type<uint>(x) >> 31; }
MSL_INLINE bool isnan(half x) { return x != x; }
MSL_INLINE bool isinf(half x) { return isinf((float)x); }
MSL_INLINE bool isfinite(half x) { return isfinite((float)x); }
#undef B
#undef MSL_PI
#undef MSL_BUILTIN
#undef MSL_BOTH_PRECISIONS
#undef MSL_F1
#undef MSL_F2
#undef MSL_F3

#define MSL_INTEGER(T)                                                                      \
  MSL_INLINE T min(T a, T b) { return a < b ? a : b; }                                      \
  MSL_INLINE T max(T a, T b) { return a > b ? a : b; }                                      \
  MSL_INLINE T clamp(T x, T a, T b) { return min(max(x, a), b); }                           \
  MSL_INLINE T abs(T a) { return a < T(0) ? T(-a) : a; }                                    \
  MSL_INLINE T popcount(T a) { return __builtin_popcountll((std::make_unsigned_t<T>)a); }   \
  MSL_INLINE T clz(T a) {                                                                   \
    return a ? __builtin_clzll((std::make_unsigned_t<T>)a) - (64 - 8 * sizeof(T)) : 8 * sizeof(T); \
  }                                                                                         \
  MSL_INLINE T ctz(T a) { return a ? __builtin_ctzll((std::make_unsigned_t<T>)a) : 8 * sizeof(T); }
MSL_INTEGER(int8_t) MSL_INTEGER(uchar) MSL_INTEGER(short) MSL_INTEGER(ushort)
MSL_INTEGER(int) MSL_INTEGER(uint) MSL_INTEGER(long) MSL_INTEGER(ulong)
#undef MSL_INTEGER
template <class T, int N, std::enable_if_t<std::is_integral_v<T>, int> = 0>
MSL_INLINE vec<T, N> popcount(const vec<T, N>& x) { MSL_EACH(T, popcount(x.d[i])) }
template <class T>
MSL_INLINE T extract_bits(T x, uint offset, uint bits) {
  return bits == 0 ? T(0) : T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits));
}
MSL_INLINE uint mulhi(uint a, uint b) { return (ulong)a * b >> 32; }
MSL_INLINE int mul24(int a, int b) { return a * b; }

template <class T>
MSL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N>
MSL_INLINE vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  MSL_EACH(T, c.d[i] ? b.d[i] : a.d[i])
}
template <class T, int N>
MSL_INLINE T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a.d[0] * b.d[0];
  for (int i = 1; i < N; i++) sum = T(sum + a.d[i] * b.d[i]);
  return sum;
}
template <class T, int N>
MSL_INLINE T length_squared(const vec<T, N>& a) { return dot(a, a); }
template <class T, int N>
MSL_INLINE T length(const vec<T, N>& a) { return sqrt(dot(a, a)); }
template <int N>
MSL_INLINE bool any(const vec<bool, N>& a) {
  bool found = false;
  for (int i = 0; i < N; i++) found |= a.d[i];
  return found;
}
template <int N>
MSL_INLINE bool all(const vec<bool, N>& a) {
  bool found = true;
  for (int i = 0; i < N; i++) found &= a.d[i];
  return found;
}
}  // namespace metal
