// One threadgroup: one joint row of a block, differences of keys and, where values take part, of values times the gain,
// divided by its norm. norms * 2^exponents are the norms.
// k [B, H, N * S, D], v [B, H, N * S, Dv], gain [B, N] -> unit [B * N, S, H * (D + Dv)], norms, exponents [B * N, S]
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];
const int dim_v = params[4];  // 0 where values take no part

threadgroup float peaks[SIMDS];
threadgroup float highs[THREADS];
threadgroup float lows[THREADS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int row = threadgroup_position_in_grid.y;
const long block = threadgroup_position_in_grid.x;  // of all sequences
const long first_head = (block / blocks * heads * blocks + block % blocks) * size;  // its first row
const long next_head = long(blocks) * size;
const int keys = heads * dim;
const int width = keys + heads * dim_v;
const float factor = dim_v > 0 ? float(gain[block]) : 1.0f;

float most = farthest(k, first_head, next_head, heads, row, dim, index);
most = largest_of_all(peaks, metal::min(most, two_to(126)), simd, lane);
int exponent = norm_exponent(2.0f * most);
if (dim_v > 0) {
  float most_v = farthest(v, first_head, next_head, heads, row, dim_v, index);
  most_v = largest_of_all(peaks, metal::min(most_v, two_to(126)), simd, lane);
  const int of_values = norm_exponent(2.0f * most_v) + exponent_of(factor) + 1;
  exponent = metal::clamp(metal::max(exponent, of_values), -126, 126);
}
const float norm = two_to(-exponent);

Wide sum = Wide{0.0f, 0.0f};
for (int item = index; item < width; item += THREADS) {
  const Wide one = item < keys
      ? joint_at(k, first_head, next_head, row, dim, item, norm)
      : times(joint_at(v, first_head, next_head, row, dim_v, item - keys, norm), Wide{factor, 0.0f});
  sum = plus(sum, times(one, one));
}
sum = sum_of_all(highs, lows, sum, index);
const float smallest = 1e-5f * norm;
const float length = metal::max(sum.high > 0.0f ? root(sum).high : 0.0f, smallest);
const long place = block * size + row;
for (int item = index; item < width; item += THREADS) {
  const Wide one = item < keys
      ? joint_at(k, first_head, next_head, row, dim, item, norm)
      : times(joint_at(v, first_head, next_head, row, dim_v, item - keys, norm), Wide{factor, 0.0f});
  unit[place * width + item] = length > 0.0f ? one.high / length : 0.0f;
}
if (index == 0) {
  norms[place] = length;
  exponents[place] = exponent;
}
