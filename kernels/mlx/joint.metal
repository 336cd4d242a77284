// The sum of squares of the differences to the anchor of all heads of a block, times 4^exponent
template <typename X>
inline Wide energy(
    thread int& exponent, X x, long first_head, long next_head, int heads, int size, int dim, threadgroup float* peaks,
    threadgroup float* highs, threadgroup float* lows, int index, int simd, int lane) {
  float most = 0.0f;
  for (int item = index; item < heads * dim; item += THREADS) {
    const long at = (first_head + item / dim * next_head) * dim + item % dim;
    const float anchor = 0.5f * float(x[at]);  // the difference may be beyond any float
    for (int row = 1; row < size; row++) {
      most = metal::max(most, metal::abs(0.5f * float(x[at + long(row) * dim]) - anchor));
    }
  }
  exponent = norm_exponent(2.0f * metal::min(largest_of_all(peaks, most, simd, lane), two_to(126)));
  const float norm = two_to(-exponent);
  Wide sum = Wide{0.0f, 0.0f};
  for (int item = index; item < heads * dim; item += THREADS) {
    const long at = (first_head + item / dim * next_head) * dim + item % dim;
    const float anchor = float(x[at]);
    for (int row = 1; row < size; row++) {
      const Wide one = difference(float(x[at + long(row) * dim]), anchor, norm);
      sum = plus(sum, times(one, one));
    }
  }
  return sum_of_all(highs, lows, sum, index);
}

// The largest half difference of one row [dim] of all heads to its anchor, as this thread sees it
template <typename X>
inline float farthest(X x, long first_head, long next_head, int heads, int row, int dim, int index) {
  float most = 0.0f;
  for (int item = index; item < heads * dim; item += THREADS) {
    const long at = (first_head + item / dim * next_head) * dim + item % dim;
    most = metal::max(most, metal::abs(0.5f * float(x[at + long(row) * dim]) - 0.5f * float(x[at])));
  }
  return most;
}

// One number of a joint row, scaled
template <typename X>
inline Wide joint_at(X x, long first_head, long next_head, int row, int dim, int item, float norm) {
  const long at = (first_head + item / dim * next_head) * dim + item % dim;
  return difference(float(x[at + long(row) * dim]), float(x[at]), norm);
}
