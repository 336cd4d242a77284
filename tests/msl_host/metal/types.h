// Scalars, vectors and limits of the Metal Shading Language.
#pragma once
#include <limits>
#include <type_traits>

#include "runtime.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;  // g++ rounds every operation to half, as Metal does

template <class To, class From>
MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// ---- bfloat: rounds every operation; implicit only to float and from integers, as in the Metal specification

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class I, std::enable_if_t<std::is_integral_v<I>, int> = 0>
  MSL_INLINE bfloat(I i) : bits(round((float)i)) {}
  template <class F, std::enable_if_t<std::is_same_v<F, float> || std::is_same_v<F, half>, int> = 0>
  MSL_INLINE explicit bfloat(F f) : bits(round((float)f)) {}
  template <class F, std::enable_if_t<std::is_same_v<F, float>, int> = 0>
  MSL_INLINE operator F() const {
    return as_type<float>((uint32_t)bits << 16);
  }
  template <class T, std::enable_if_t<std::is_integral_v<T> || std::is_same_v<T, half>, int> = 0>
  MSL_INLINE explicit operator T() const {
    return (T)(float)*this;
  }
  constexpr MSL_INLINE bfloat operator-() const { return raw(bits ^ 0x8000); }
  MSL_INLINE bfloat operator+() const { return *this; }

  static constexpr bfloat raw(uint16_t bits) { return bfloat(bits, nullptr); }

 private:
  constexpr bfloat(uint16_t b, decltype(nullptr)) : bits(b) {}
  static MSL_INLINE uint16_t round(float f) {  // to nearest even; a NaN stays one
    uint32_t u = as_type<uint32_t>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 0x40;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
};

constexpr half operator""h(long double x) { return (half)x; }
inline bfloat operator""bf(long double x) { return bfloat((float)x); }

namespace msl {
template <class A, class B, class = void>
struct Common {};  // the type of bfloat with another; with half there is none
template <>
struct Common<bfloat, bfloat> {
  typedef bfloat type;
};
template <>
struct Common<bfloat, float> {
  typedef float type;
};
template <class I>
struct Common<bfloat, I, std::enable_if_t<std::is_integral_v<I>>> {
  typedef bfloat type;
};
template <class A>
struct Common<A, bfloat, std::enable_if_t<!std::is_same_v<A, bfloat>>> : Common<bfloat, A> {};
}  // namespace msl

#define MSL_ARITHMETIC(op)                                             \
  template <class A, class B, class C = typename msl::Common<A, B>::type> \
  MSL_INLINE C operator op(A a, B b) {                                 \
    return C((float)C(a) op (float)C(b));                              \
  }                                                                    \
  template <class A, class B, class C = typename msl::Common<A, B>::type> \
  MSL_INLINE A& operator op##=(A& a, B b) {                            \
    return a = A(a op b);                                              \
  }
MSL_ARITHMETIC(+)
MSL_ARITHMETIC(-)
MSL_ARITHMETIC(*)
MSL_ARITHMETIC(/)
#undef MSL_ARITHMETIC
#define MSL_COMPARISON(op)                                             \
  template <class A, class B, class C = typename msl::Common<A, B>::type> \
  MSL_INLINE bool operator op(A a, B b) {                              \
    return (float)C(a) op (float)C(b);                                 \
  }
MSL_COMPARISON(<)
MSL_COMPARISON(>)
MSL_COMPARISON(<=)
MSL_COMPARISON(>=)
MSL_COMPARISON(==)
MSL_COMPARISON(!=)
#undef MSL_COMPARISON

// ---- vectors of 2, 3 and 4

namespace metal {
template <class T, int N>
struct vec;
}

namespace msl {
using metal::vec;

template <class T>
constexpr bool is_scalar = std::is_integral_v<T> || std::is_same_v<T, float> || std::is_same_v<T, half> ||
                           std::is_same_v<T, bfloat>;

template <class T, int N, int... I>
struct Swizzle {  // some components of a vector, which it overlays
  T d[N];
  MSL_INLINE operator vec<T, sizeof...(I)>() const { return {d[I]...}; }
  MSL_INLINE Swizzle& operator=(const vec<T, sizeof...(I)>& o) {
    int k = 0;
    ((d[I] = o.d[k++]), ...);
    return *this;
  }
};

template <class T>
constexpr int width = is_scalar<T> ? 1 : 0;
template <class T, int N>
constexpr int width<vec<T, N>> = N;
template <class T, int N, int... I>
constexpr int width<Swizzle<T, N, I...>> = sizeof...(I);

#define MSL_PAIRS(N) Swizzle<T, N, 0, 1> xy, rg, lo; Swizzle<T, N, 1, 0> yx;
template <class T, int N>
struct Components;
template <class T>
struct alignas(2 * sizeof(T)) Components<T, 2> {
  union {
    T d[2];
    struct { T x, y; };
    struct { T r, g; };
    MSL_PAIRS(2)
  };
};
template <class T>
struct alignas(4 * sizeof(T)) Components<T, 3> {
  union {
    T d[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    MSL_PAIRS(3)
    Swizzle<T, 3, 1, 2> yz;
    Swizzle<T, 3, 0, 2> xz;
    Swizzle<T, 3, 2, 1, 0> zyx;
  };
};
template <class T>
struct alignas(4 * sizeof(T)) Components<T, 4> {
  union {
    T d[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    MSL_PAIRS(4)
    Swizzle<T, 4, 1, 2> yz;
    Swizzle<T, 4, 2, 3> zw, hi;
    Swizzle<T, 4, 0, 2> xz, even;
    Swizzle<T, 4, 1, 3> yw, odd;
    Swizzle<T, 4, 0, 1, 2> xyz, rgb;
    Swizzle<T, 4, 1, 2, 3> yzw;
    Swizzle<T, 4, 3, 2, 1, 0> wzyx;
  };
};
#undef MSL_PAIRS

// The size of what one thread writes alone: a component of a vector, a member of a struct.
template <class T>
constexpr size_t grain = alignof(T) < 4 ? alignof(T) : 4;
template <class T, int N>
constexpr size_t grain<vec<T, N>> = sizeof(T);
template <class T, size_t N>
constexpr size_t grain<T[N]> = grain<T>;
}  // namespace msl

namespace metal {
template <class T, int N>
struct vec : msl::Components<T, N> {
  using msl::Components<T, N>::d;
  vec() = default;
  template <class S, std::enable_if_t<msl::is_scalar<S>, int> = 0>
  MSL_INLINE vec(S s) {
    for (int i = 0; i < N; i++) d[i] = (T)s;
  }
  template <class U, std::enable_if_t<!std::is_same_v<U, T>, int> = 0>
  MSL_INLINE explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; i++) d[i] = (T)o.d[i];
  }
  template <class A, class B, class... C,
            std::enable_if_t<msl::width<A> + msl::width<B> + (0 + ... + msl::width<C>) == N, int> = 0>
  MSL_INLINE vec(const A& a, const B& b, const C&... c) {
    int k = 0;
    put(k, a), put(k, b), (put(k, c), ...);
  }
  MSL_INLINE T& operator[](int i) { return d[i]; }
  MSL_INLINE const T& operator[](int i) const { return d[i]; }

 private:
  template <class S, std::enable_if_t<msl::is_scalar<S>, int> = 0>
  MSL_INLINE void put(int& k, S s) {
    d[k++] = (T)s;
  }
  template <class U, int M>
  MSL_INLINE void put(int& k, const vec<U, M>& o) {
    for (int i = 0; i < M; i++) d[k++] = (T)o.d[i];
  }
  template <class U, int M, int... I>
  MSL_INLINE void put(int& k, const msl::Swizzle<U, M, I...>& o) {
    put(k, (vec<U, sizeof...(I)>)o);
  }
};

// `body` for each component: `x` and `y` are operands, scalars are spread over the vector.
#define MSL_EACH(R, body)                      \
  vec<R, N> result;                            \
  for (int i = 0; i < N; i++) result.d[i] = R(body); \
  return result;
#define MSL_SCALAR std::enable_if_t<msl::is_scalar<S>, int> = 0
#define MSL_BINARY(op, R)                                                                          \
  template <class T, int N>                                                                        \
  MSL_INLINE vec<R, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                       \
    MSL_EACH(R, a.d[i] op b.d[i])                                                                  \
  }                                                                                                \
  template <class T, int N, class S, MSL_SCALAR>                                                   \
  MSL_INLINE vec<R, N> operator op(const vec<T, N>& a, S b) {                                      \
    return a op vec<T, N>(b);                                                                      \
  }                                                                                                \
  template <class T, int N, class S, MSL_SCALAR>                                                   \
  MSL_INLINE vec<R, N> operator op(S a, const vec<T, N>& b) {                                      \
    return vec<T, N>(a) op b;                                                                      \
  }
#define MSL_ASSIGNING(op)                                                                          \
  MSL_BINARY(op, T)                                                                                \
  template <class T, int N, class S>                                                               \
  MSL_INLINE vec<T, N>& operator op##=(vec<T, N>& a, const S& b) {                                 \
    return a = a op b;                                                                             \
  }
MSL_ASSIGNING(+) MSL_ASSIGNING(-) MSL_ASSIGNING(*) MSL_ASSIGNING(/) MSL_ASSIGNING(%)
MSL_ASSIGNING(&) MSL_ASSIGNING(|) MSL_ASSIGNING(^) MSL_ASSIGNING(<<) MSL_ASSIGNING(>>)
MSL_BINARY(<, bool) MSL_BINARY(>, bool) MSL_BINARY(<=, bool) MSL_BINARY(>=, bool)
MSL_BINARY(==, bool) MSL_BINARY(!=, bool)
template <class T, int N>
MSL_INLINE vec<T, N> operator-(const vec<T, N>& a) { MSL_EACH(T, -a.d[i]) }
template <class T, int N>
MSL_INLINE vec<T, N> operator~(const vec<T, N>& a) { MSL_EACH(T, ~a.d[i]) }
#undef MSL_BINARY
#undef MSL_ASSIGNING
}  // namespace metal

namespace msl {
template <class T, int N>
struct Packed {  // a vector without its alignment
  T d[N];
  Packed() = default;
  MSL_INLINE Packed(const vec<T, N>& o) {
    for (int i = 0; i < N; i++) d[i] = o.d[i];
  }
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> o;
    for (int i = 0; i < N; i++) o.d[i] = d[i];
    return o;
  }
  MSL_INLINE T& operator[](int i) { return d[i]; }
  MSL_INLINE const T& operator[](int i) const { return d[i]; }
};
}  // namespace msl

#define MSL_VECTORS(T, name)                                              \
  typedef metal::vec<T, 2> name##2;                                       \
  typedef metal::vec<T, 3> name##3;                                       \
  typedef metal::vec<T, 4> name##4;                                       \
  typedef msl::Packed<T, 2> packed_##name##2;                             \
  typedef msl::Packed<T, 3> packed_##name##3;                             \
  typedef msl::Packed<T, 4> packed_##name##4;
MSL_VECTORS(float, float) MSL_VECTORS(half, half) MSL_VECTORS(bfloat, bfloat) MSL_VECTORS(bool, bool)
MSL_VECTORS(int8_t, char) MSL_VECTORS(uchar, uchar) MSL_VECTORS(short, short) MSL_VECTORS(ushort, ushort)
MSL_VECTORS(int, int) MSL_VECTORS(uint, uint) MSL_VECTORS(long, long) MSL_VECTORS(ulong, ulong)
#undef MSL_VECTORS

// ---- what kernels take from <metal_type_traits> and <metal_limits>

namespace metal {
using std::conditional, std::conditional_t, std::enable_if, std::enable_if_t, std::false_type, std::true_type;
using std::integral_constant, std::is_convertible, std::is_convertible_v, std::is_integral, std::is_integral_v;
using std::is_same, std::is_same_v, std::is_signed, std::is_unsigned, std::make_unsigned, std::remove_cv;
using std::remove_reference;
template <class T>
constexpr bool is_floating_point_v = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
struct is_floating_point : std::bool_constant<is_floating_point_v<T>> {};

template <class T>
struct numeric_limits : std::numeric_limits<T> {};
#define MSL_LIMITS(T, from, INF, MAX, LOWEST, MIN, EPS, QUIET, DIGITS)   \
  template <>                                                           \
  struct numeric_limits<T> {                                            \
    static constexpr bool is_specialized = true;                        \
    static constexpr int digits = DIGITS;                               \
    static constexpr T infinity() { return from(INF); }                 \
    static constexpr T max() { return from(MAX); }                      \
    static constexpr T lowest() { return from(LOWEST); }                \
    static constexpr T min() { return from(MIN); }                      \
    static constexpr T epsilon() { return from(EPS); }                  \
    static constexpr T quiet_NaN() { return from(QUIET); }              \
  };
MSL_LIMITS(half, (half), __builtin_inff(), 65504.0f, -65504.0f, 0x1p-14f, 0x1p-10f, __builtin_nanf(""), 11)
MSL_LIMITS(bfloat, bfloat::raw, 0x7f80, 0x7f7f, 0xff7f, 0x0080, 0x3c00, 0x7fc0, 8)
#undef MSL_LIMITS
}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955e-07f
#define HALF_MAX ((half)65504.0f)
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_2_SQRTPI_F 1.12837916709551257390f
