// Shares of blocks from their scores.

static constant constexpr const int SELECT_THREADS = 256;
static constant constexpr const int SELECT_SIMDS = 8;

inline float scored(float score) {
  return metal::isnan(score) ? -INFINITY : score;
}

// Weight of a score before it is divided by the sum of its row
inline float weight_of(float score, float peak) {
  const float base = peak == -INFINITY ? 0.0f : peak;
  return score == base ? 1.0f : metal::precise::exp(score - base);  // inf - inf would be NaN
}

// What orders blocks: 0 where none is, above it NaN and -inf, on top the pinned ones
inline uint order_of(float share, bool valid, bool pinned) {
  const float x = metal::isnan(share) ? -INFINITY : (share == 0.0f ? 0.0f : share);
  const uint bits = as_type<uint>(x);
  const uint order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return !valid ? 0u : (pinned ? 0xFFFFFFFFu : order);
}
