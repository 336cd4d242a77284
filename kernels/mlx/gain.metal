// One threadgroup: the value gain of one block, what keeps either half of its joint rows from drowning the other.
// k [B, H, N * S, D], v [B, H, N * S, Dv] -> gain [B, N]
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];
const int dim_v = params[4];

threadgroup float peaks[SIMDS];
threadgroup float highs[THREADS];
threadgroup float lows[THREADS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const long block = threadgroup_position_in_grid.x;  // of all sequences
const long first_head = (block / blocks * heads * blocks + block % blocks) * size;  // its first row
const long next_head = long(blocks) * size;

int exponent_k, exponent_v;
const Wide keys = energy(
    exponent_k, k, first_head, next_head, heads, size, dim, peaks, highs, lows, index, simd, lane);
const Wide values = energy(
    exponent_v, v, first_head, next_head, heads, size, dim_v, peaks, highs, lows, index, simd, lane);
if (index == 0) {
  const float floor = 1e-6f;  // the root of the smallest energy that counts
  const bool defined = metal::sqrt(keys.high) * two_to(exponent_k) >= floor &&
      metal::sqrt(values.high) * two_to(exponent_v) >= floor;
  float found = 1.0f;
  if (defined) {
    const Wide ratio = root(over(keys, values));
    found = ratio.high * two_to(metal::clamp(exponent_k - exponent_v, -60, 60));
  }
  gain[block] = metal::clamp(found, 1.0f, 1e4f);
}
