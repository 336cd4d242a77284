// One threadgroup: how far the value of each token of one block and kv head points from their mean, 1 - cos.
// v [B, H, N * S, Dv] -> apart [B * N, H, S]
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];

threadgroup float peaks[SIMDS];
threadgroup float highs[WIDTH];  // the sum of all rows
threadgroup float lows[WIDTH];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const long place = threadgroup_position_in_grid.x;  // of sequence, block and kv head
const int head = int(place % heads);
const long block = place / heads;  // of all sequences
const long at = ((block / blocks * heads + head) * blocks + block % blocks) * size * dim;

float most = 0.0f;
for (int item = index; item < size * dim; item += THREADS) {
  most = metal::max(most, metal::abs(float(v[at + item])));
}
const float norm = two_to(-norm_exponent(largest_of_all(peaks, most, simd, lane)));
float largest = 0.0f;
for (int channel = index; channel < dim; channel += THREADS) {
  Wide sum = Wide{0.0f, 0.0f};
  for (int row = 0; row < size; row++) {
    sum = plus(sum, Wide{float(v[at + row * dim + channel]) * norm, 0.0f});
  }
  highs[channel] = sum.high;
  lows[channel] = sum.low;
  largest = metal::max(largest, metal::abs(sum.high));
}
const float mean_norm = two_to(-norm_exponent(largest_of_all(peaks, largest, simd, lane)));
Wide mean_square = Wide{0.0f, 0.0f};
for (int channel = 0; channel < dim; channel++) {
  const Wide mean = scaled(Wide{highs[channel], lows[channel]}, mean_norm);
  mean_square = plus(mean_square, times(mean, mean));
}

for (int row = index; row < size; row += THREADS) {
  float own = 0.0f;
  for (int channel = 0; channel < dim; channel++) {
    own = metal::max(own, metal::abs(float(v[at + row * dim + channel])));
  }
  const float row_norm = two_to(-norm_exponent(own));
  Wide square = Wide{0.0f, 0.0f}, product = Wide{0.0f, 0.0f};
  for (int channel = 0; channel < dim; channel++) {
    const Wide one = Wide{float(v[at + row * dim + channel]) * row_norm, 0.0f};
    square = plus(square, times(one, one));
    product = plus(product, times(one, scaled(Wide{highs[channel], lows[channel]}, mean_norm)));
  }
  Wide cosine = Wide{0.0f, 0.0f};
  if (square.high > 0.0f && mean_square.high > 0.0f) {
    cosine = over(product, root(times(square, mean_square)));
  }
  apart[place * size + row] = plus(Wide{1.0f, 0.0f}, negative(cosine)).high;
}
