// Join logits [ROWS] to a thread's running log-sum-exp or, where `largest`, to a maximum whose total counts NaN
template <int ROWS>
inline void join_logits(thread float* peak, thread float* total, const thread float* logits, bool largest) {
  for (int m = 0; m < ROWS; m++) {
    const float top = metal::max(peak[m], logits[m]);
    if (largest) {
      total[m] += metal::isnan(logits[m]) ? 1.0f : 0.0f;
    } else {
      const float base = top == -INFINITY ? 0.0f : top;
      total[m] = total[m] * metal::precise::exp(peak[m] - base) + metal::precise::exp(logits[m] - base);
    }
    peak[m] = top;
  }
}
