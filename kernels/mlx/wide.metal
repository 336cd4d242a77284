// Numbers of 48 bits: what compression decides in float64 elsewhere, these decide here, so that the same bytes are stored.
// A product that is fused into a sum changes none of it.

enum { THREADS = 128, SIMDS = 4, GROUP = 128 };  // GROUP rows share their scales

struct Wide {
  float high;
  float low;  // at most half a unit in the last place of high
};

inline Wide exact_sum(float a, float b) {
  const float sum = a + b;
  const float other = sum - a;
  return Wide{sum, (a - (sum - other)) + (b - other)};
}

inline Wide joined(float high, float low) {
  const float sum = high + low;
  return Wide{sum, low - (sum - high)};
}

inline Wide plus(Wide a, Wide b) {
  const Wide high = exact_sum(a.high, b.high);
  const Wide low = exact_sum(a.low, b.low);
  const Wide sum = joined(high.high, high.low + low.high);
  return joined(sum.high, sum.low + low.low);
}

inline Wide negative(Wide a) {
  return Wide{-a.high, -a.low};
}

inline Wide scaled(Wide a, float power_of_two) {
  return Wide{a.high * power_of_two, a.low * power_of_two};
}

inline Wide times(Wide a, Wide b) {
  const float product = a.high * b.high;
  const float rest = metal::fma(a.high, b.high, -product);
  return joined(product, metal::fma(a.high, b.low, metal::fma(a.low, b.high, rest)));
}

inline Wide over(Wide a, Wide b) {
  const float first = a.high / b.high;
  const Wide left = plus(a, times(b, Wide{-first, 0.0f}));
  const float second = left.high / b.high;
  const Wide rest = plus(left, times(b, Wide{-second, 0.0f}));
  return plus(exact_sum(first, second), Wide{rest.high / b.high, 0.0f});
}

inline Wide root(Wide a) {
  const float first = metal::sqrt(a.high);
  const Wide left = plus(a, times(Wide{first, 0.0f}, Wide{-first, 0.0f}));
  return joined(first, left.high / (2.0f * first));
}

inline bool below(Wide a, Wide b) {
  return a.high < b.high || (a.high == b.high && a.low < b.low);
}

inline Wide magnitude(Wide a) {
  return a.high < 0.0f ? negative(a) : a;
}

// To the nearest integer, halves to even
inline float nearest(Wide a) {
  const float whole = metal::rint(a.high);
  const bool middle = metal::abs(a.high - whole) == 0.5f && a.low != 0.0f;
  return middle ? a.high + (a.low > 0.0f ? 0.5f : -0.5f) : whole;
}

// Floor of the binary logarithm of |x|; -127 where x is zero or smaller than any normal number
inline int exponent_of(float x) {
  return int((as_type<uint>(x) >> 23) & 255u) - 127;
}

// 2^exponent, -126 to 127
inline float two_to(int exponent) {
  return as_type<float>(uint(exponent + 127) << 23);
}

// a + off as float64 rounds it: off is beyond the precision of a, but decides where a lies halfway between two numbers
inline Wide nudged(Wide a, float off) {
  const float last = two_to(metal::max(exponent_of(a.high) - 52, -126));
  return a.low == 0.0f && metal::abs(off) > 0.5f * last ? Wide{a.high, off > 0.0f ? last : -last} : a;
}

// a without what float64 would not hold
inline Wide trimmed(Wide a) {
  return Wide{a.high, metal::abs(a.low) > two_to(metal::max(exponent_of(a.high) - 53, -126)) ? a.low : 0.0f};
}

// The exponent of the smallest power of two at or above a > 0
inline int exponent_above(Wide a) {
  const bool power = (as_type<uint>(a.high) & 0x7fffffu) == 0u && a.low <= 0.0f;
  return exponent_of(a.high) + (power ? 0 : 1);
}

// a as the nearest float16 number, halves to even
inline float nearest_half(Wide a) {
  const int quantum = metal::max(exponent_of(a.high) - 10, -24);
  return nearest(scaled(a, two_to(-quantum))) * two_to(quantum);
}

// A power of two that brings numbers up to `most` near 1
inline int norm_exponent(float most) {
  return metal::clamp(exponent_of(most) + 1, -126, 126);
}

// (x - anchor) * scale; equal numbers may be beyond any scale
inline Wide difference(float x, float anchor, float scale) {
  return x == anchor ? Wide{0.0f, 0.0f} : exact_sum(x * scale, -anchor * scale);
}

// The largest x of the threadgroup
inline float largest_of_all(threadgroup float* peaks, float x, int simd, int lane) {
  x = simd_max(x);
  if (lane == 0) {
    peaks[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int s = 0; s < SIMDS; s++) {
    x = metal::max(x, peaks[s]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x;
}

// The sum of the x of the threadgroup, in the same order for every thread; a barrier comes before the next one
inline Wide sum_of_all(threadgroup float* highs, threadgroup float* lows, Wide x, int index) {
  highs[index] = x.high;
  lows[index] = x.low;
  for (int step = THREADS / 2; step > 0; step /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < step) {
      const Wide sum = plus(Wide{highs[index], lows[index]}, Wide{highs[index + step], lows[index + step]});
      highs[index] = sum.high;
      lows[index] = sum.low;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return Wide{highs[0], lows[0]};
}
