// Barriers, simd-group operations, atomics and simdgroup_matrix. Lanes meet in the runtime, which calls one of the
// collectives below with the operands of all of them.
#pragma once
#include "math.h"

namespace metal {
enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((unsigned)a | (unsigned)b); }
MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl::msl_barrier(true, (unsigned)flags, site); }
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) { msl::msl_barrier(false, (unsigned)flags, site); }
}  // namespace metal

namespace msl {
template <class T>
constexpr bool is_simd_operand = is_scalar<T> && !std::is_same_v<T, bool> && sizeof(T) <= 4;
template <class T, int N>
constexpr bool is_simd_operand<vec<T, N>> = is_simd_operand<T>;

MSL_INLINE bool in(uint32_t lanes, int i) { return i >= 0 && i < 32 && (lanes >> i & 1); }

#define MSL_REDUCER(name, value)                        \
  struct name {                                         \
    template <class T>                                  \
    static T of(T a, T b) { return T(value); }          \
  };
MSL_REDUCER(Add, a + b) MSL_REDUCER(Multiply, a * b)
MSL_REDUCER(Max, metal::max(a, b)) MSL_REDUCER(Min, metal::min(a, b))
MSL_REDUCER(And, a & b) MSL_REDUCER(Or, a | b) MSL_REDUCER(Xor, a ^ b)
#undef MSL_REDUCER

template <class T, class Op>
MSL_UNWATCHED void reduce(void* const* operands, const uint32_t*, uint32_t lanes) {  // halves are added: 16, 8, 4, 2, 1
  T values[32];
  bool has[32];
  for (int i = 0; i < 32; i++)
    if ((has[i] = in(lanes, i))) values[i] = *(T*)operands[i];
  for (int half = 16; half; half /= 2)
    for (int i = 0; i < half; i++)
      if (has[i + half]) {
        values[i] = has[i] ? Op::of(values[i], values[i + half]) : values[i + half];
        has[i] = true;
      }
  for (int i = 0; i < 32; i++)
    if (in(lanes, i)) *(T*)operands[i] = values[0];
}

template <class T, class Op, int FIRST, bool INCLUSIVE>
MSL_UNWATCHED void scan(void* const* operands, const uint32_t*, uint32_t lanes) {
  T sum(FIRST);
  for (int i = 0; i < 32; i++)
    if (in(lanes, i)) {
      T next = Op::of(sum, *(T*)operands[i]);
      *(T*)operands[i] = INCLUSIVE ? next : sum;
      sum = next;
    }
}

template <class T, class Source>
MSL_UNWATCHED void shuffle(void* const* operands, const uint32_t* arguments, uint32_t lanes) {
  T values[32];
  for (int i = 0; i < 32; i++)
    if (in(lanes, i)) values[i] = *(T*)operands[i];
  for (int i = 0; i < 32; i++) {
    if (!in(lanes, i)) continue;
    int from = Source::lane(i, (int)arguments[i]);
    if (from == Source::keep) continue;
    if (from < 0 || from > 31) msl_fail("simd shuffle from a lane outside the simd-group");
    if (in(lanes, from)) *(T*)operands[i] = values[from];
    else __builtin_memset(operands[i], 0xff, sizeof(T));  // Metal leaves a value from no lane undefined
  }
}
#define MSL_SOURCE(name, value)                         \
  struct name {                                         \
    static constexpr int keep = -1000000;               \
    static int lane(int i, int n) { return value; }     \
  };
MSL_SOURCE(Lane, n) MSL_SOURCE(LaneXor, i ^ n) MSL_SOURCE(QuadLane, n > 3 ? -1 : (i & ~3) | n)
MSL_SOURCE(QuadXor, (i & ~3) | ((i ^ n) & 3)) MSL_SOURCE(Down, i + n > 31 ? keep : i + n)
MSL_SOURCE(Up, i - n < 0 ? keep : i - n)
MSL_SOURCE(RotateDown, (i + n) % 32) MSL_SOURCE(RotateUp, (i + 32 - n % 32) % 32)
#undef MSL_SOURCE

template <class T>
MSL_UNWATCHED void broadcast_first(void* const* operands, const uint32_t*, uint32_t lanes) {
  T value = *(T*)operands[__builtin_ctz(lanes)];
  for (int i = 0; i < 32; i++)
    if (in(lanes, i)) *(T*)operands[i] = value;
}

template <class T>
struct Filled {
  T value, filling;
};
template <class T, bool DOWN>
MSL_UNWATCHED void shuffle_and_fill(void* const* operands, const uint32_t* arguments, uint32_t lanes) {
  Filled<T> from[32];
  for (int i = 0; i < 32; i++)
    if (in(lanes, i)) from[i] = *(Filled<T>*)operands[i];
  for (int i = 0; i < 32; i++) {
    if (!in(lanes, i)) continue;
    int delta = arguments[i] & 0xffff, modulo = arguments[i] >> 16, base = i / modulo * modulo;
    int j = i - base + (DOWN ? delta : -delta);
    bool filled = j < 0 || j >= modulo;
    const Filled<T>& source = from[base + (j < 0 ? j + modulo : j % modulo)];
    ((Filled<T>*)operands[i])->value = filled ? source.filling : source.value;
  }
}

template <class T>
MSL_INLINE T meet(Collective compute, T value, uint32_t argument, const void* site) {
  static_assert(is_simd_operand<T>, "simd functions take scalars or vectors of 8, 16 or 32 bits, and no bool");
  msl_collective(compute, &value, argument, site);
  return value;
}
}  // namespace msl

namespace metal {
#define MSL_REDUCE(name, Op)                                                                                  \
  template <class T>                                                                                          \
  MSL_INLINE T name(T value, MSL_SITE) { return msl::meet(&msl::reduce<T, msl::Op>, value, 0, site); }
MSL_REDUCE(simd_sum, Add) MSL_REDUCE(simd_product, Multiply) MSL_REDUCE(simd_max, Max) MSL_REDUCE(simd_min, Min)
MSL_REDUCE(simd_and, And) MSL_REDUCE(simd_or, Or) MSL_REDUCE(simd_xor, Xor)
#undef MSL_REDUCE
#define MSL_SCAN(name, ...)                                                                                   \
  template <class T>                                                                                          \
  MSL_INLINE T name(T value, MSL_SITE) { return msl::meet(&msl::scan<T, __VA_ARGS__>, value, 0, site); }
MSL_SCAN(simd_prefix_inclusive_sum, msl::Add, 0, true) MSL_SCAN(simd_prefix_exclusive_sum, msl::Add, 0, false)
MSL_SCAN(simd_prefix_inclusive_product, msl::Multiply, 1, true)
MSL_SCAN(simd_prefix_exclusive_product, msl::Multiply, 1, false)
#undef MSL_SCAN
#define MSL_SHUFFLE(name, Source)                                                                             \
  template <class T>                                                                                          \
  MSL_INLINE T name(T value, ushort n, MSL_SITE) { return msl::meet(&msl::shuffle<T, msl::Source>, value, n, site); }
MSL_SHUFFLE(simd_shuffle, Lane) MSL_SHUFFLE(simd_broadcast, Lane) MSL_SHUFFLE(simd_shuffle_xor, LaneXor)
MSL_SHUFFLE(simd_shuffle_down, Down) MSL_SHUFFLE(simd_shuffle_up, Up)
MSL_SHUFFLE(simd_shuffle_rotate_down, RotateDown) MSL_SHUFFLE(simd_shuffle_rotate_up, RotateUp)
MSL_SHUFFLE(quad_shuffle, QuadLane) MSL_SHUFFLE(quad_broadcast, QuadLane) MSL_SHUFFLE(quad_shuffle_xor, QuadXor)
#undef MSL_SHUFFLE
#define MSL_FILL(name, DOWN)                                                                                  \
  template <class T>                                                                                          \
  MSL_INLINE T name(T value, T filling, ushort delta, ushort modulo = 32, MSL_SITE) {                         \
    static_assert(msl::is_simd_operand<T>, #name ": scalars or vectors of 8, 16 or 32 bits, and no bool");    \
    msl::Filled<T> both = {value, filling};                                                                   \
    msl::msl_collective(&msl::shuffle_and_fill<T, DOWN>, &both, delta | (uint)modulo << 16, site);            \
    return both.value;                                                                                        \
  }
MSL_FILL(simd_shuffle_and_fill_down, true) MSL_FILL(simd_shuffle_and_fill_up, false)
#undef MSL_FILL
template <class T>
MSL_INLINE T simd_broadcast_first(T value, MSL_SITE) {
  return msl::meet(&msl::broadcast_first<T>, value, 0, site);
}
MSL_INLINE bool simd_all(bool p, MSL_SITE) { return msl::meet(&msl::reduce<uint, msl::And>, (uint)p, 0, site); }
MSL_INLINE bool simd_any(bool p, MSL_SITE) { return msl::meet(&msl::reduce<uint, msl::Or>, (uint)p, 0, site); }
MSL_INLINE bool simd_is_first(MSL_SITE) {
  uint lane = msl::msl_thread()->lane;
  return msl::meet(&msl::broadcast_first<uint>, lane, 0, site) == lane;
}
struct simd_vote {
  uint lanes;
  explicit operator ulong() const { return lanes; }
  bool all() const { return lanes == ~0u; }
  bool any() const { return lanes != 0; }
};
MSL_INLINE simd_vote simd_ballot(bool p, MSL_SITE) {
  return {msl::meet(&msl::reduce<uint, msl::Or>, (uint)p << msl::msl_thread()->lane, 0, site)};
}

// ---- atomics: relaxed only; float adds and is exchanged, but has no minimum or maximum

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, uint> || std::is_same_v<T, float> ||
                    std::is_same_v<T, ulong> || std::is_same_v<T, bool>,
                "atomic<T>: T must be int, uint, ulong, float or bool");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

#define MSL_ATOMIC(name, number, result)                                                          \
  template <class T, class U>                                                                     \
  MSL_UNWATCHED inline T name(volatile atomic<T>* object, U operand, memory_order, MSL_SITE) {    \
    static_assert(std::is_##number##_v<T>, #name " is not there for this type");                  \
    msl::msl_atomic(object, sizeof(T), true, site);                                               \
    T x = object->value, y = (T)operand;                                                          \
    object->value = (T)(result);                                                                  \
    return x;                                                                                     \
  }
MSL_ATOMIC(atomic_fetch_add_explicit, arithmetic, x + y) MSL_ATOMIC(atomic_fetch_sub_explicit, arithmetic, x - y)
MSL_ATOMIC(atomic_fetch_max_explicit, integral, x > y ? x : y)
MSL_ATOMIC(atomic_fetch_min_explicit, integral, x < y ? x : y)
MSL_ATOMIC(atomic_fetch_and_explicit, integral, x & y) MSL_ATOMIC(atomic_fetch_or_explicit, integral, x | y)
MSL_ATOMIC(atomic_fetch_xor_explicit, integral, x ^ y) MSL_ATOMIC(atomic_exchange_explicit, arithmetic, y)
#undef MSL_ATOMIC
template <class T, class U>
MSL_UNWATCHED inline void atomic_store_explicit(volatile atomic<T>* object, U operand, memory_order, MSL_SITE) {
  msl::msl_atomic(object, sizeof(T), true, site);
  object->value = (T)operand;
}
template <class T>
MSL_UNWATCHED inline T atomic_load_explicit(const volatile atomic<T>* object, memory_order, MSL_SITE) {
  msl::msl_atomic(object, sizeof(T), false, site);
  return object->value;
}
template <class T, class U>
MSL_UNWATCHED inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, U desired,
                                                                memory_order, memory_order, MSL_SITE) {
  msl::msl_atomic(object, sizeof(T), true, site);
  T x = object->value;
  bool same = x == *expected;
  if (same) object->value = (T)desired;
  *expected = x;
  return same;
}

// ---- simdgroup_matrix: a lane holds two neighbouring elements of one row of 8x8

template <class T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "simdgroup_matrix is 8x8");
  vec<T, 2> pair;
  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T value) : pair(value) {}
  MSL_INLINE vec<T, 2>& thread_elements() { return pair; }
  MSL_INLINE const vec<T, 2>& thread_elements() const { return pair; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal

namespace msl {
template <class T>
using Matrix = metal::simdgroup_matrix<T, 8, 8>;
MSL_INLINE int row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
MSL_INLINE int column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <class D, class A, class B, class C>
struct Product {
  Matrix<D>* d;
  const Matrix<A>* a;
  const Matrix<B>* b;
  const Matrix<C>* c;
};
template <class D, class A, class B, class C>
MSL_UNWATCHED void multiply(void* const* operands, const uint32_t*, uint32_t lanes) {
  if (lanes != ~0u) return msl_fail("simdgroup_matrix with fewer than 32 lanes");
  auto product = (Product<D, A, B, C>* const*)operands;
  float a[8][8], b[8][8];
  for (int i = 0; i < 32; i++)
    for (int e = 0; e < 2; e++) {
      a[row(i)][column(i) + e] = (float)product[i]->a->pair[e];
      b[row(i)][column(i) + e] = (float)product[i]->b->pair[e];
    }
  for (int i = 0; i < 32; i++)
    for (int e = 0; e < 2; e++) {
      float sum = product[i]->c ? (float)product[i]->c->pair[e] : 0.0f;
      for (int k = 0; k < 8; k++) sum += a[row(i)][k] * b[k][column(i) + e];
      product[i]->d->pair[e] = (D)sum;
    }
}
MSL_UNWATCHED inline void whole(void* const*, const uint32_t*, uint32_t lanes) {
  if (lanes != ~0u) msl_fail("simdgroup_matrix with fewer than 32 lanes");
}
}  // namespace msl

namespace metal {
template <class T, int ROWS = 8, int COLUMNS = 8>
MSL_INLINE simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, ROWS, COLUMNS>(value);
}
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(msl::Matrix<D>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              MSL_SITE) {
  msl::Product<D, A, B, C> product = {&d, &a, &b, &c};
  msl::msl_collective(&msl::multiply<D, A, B, C>, &product, 0, site);
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(msl::Matrix<D>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  msl::Product<D, A, B, D> product = {&d, &a, &b, nullptr};
  msl::msl_collective(&msl::multiply<D, A, B, D>, &product, 0, site);
}
#define MSL_ELEMENT(e) p[transpose ? (origin.y + msl::column(lane) + e) * stride + origin.x + msl::row(lane) \
                                   : (origin.y + msl::row(lane)) * stride + origin.x + msl::column(lane) + e]
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, ulong stride = 8, ulong2 origin = ulong2(0ul),
                               bool transpose = false, MSL_SITE) {
  msl::msl_collective(&msl::whole, nullptr, 0, site);
  int lane = msl::msl_thread()->lane;
  for (int e = 0; e < 2; e++) m.pair[e] = MSL_ELEMENT(e);
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* p, ulong stride = 8,
                                ulong2 origin = ulong2(0ul), bool transpose = false, MSL_SITE) {
  msl::msl_collective(&msl::whole, nullptr, 0, site);
  int lane = msl::msl_thread()->lane;
  for (int e = 0; e < 2; e++) MSL_ELEMENT(e) = m.pair[e];
}
#undef MSL_ELEMENT
}  // namespace metal
