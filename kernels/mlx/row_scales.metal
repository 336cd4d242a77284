// One threadgroup: unit, scales and minima of the coded rows of one block and kv head; see the law, "Scales".
// x [B, H, N * S, C], positions [B * N, R], order [B, N, H, C] -> scale, low [B, N, H, Q, C], unit [B, N, H]
// clips: for each width 0..8 where its list starts and how long it is, then the parts of a range, each in hundredths
// and what float64 makes of it beyond them
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];
const int kept = params[4];
const bool every = params[5];
const bool differences = params[6];  // to the anchor
const bool ordered = params[7];
const int segments = params[8];
const int first_segment = 9;

threadgroup float peaks[SIMDS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const long place = threadgroup_position_in_grid.x;  // of sequence, block and kv head
const int head = int(place % heads);
const long block = place / heads;  // of all sequences
const long positions_at = block * kept;
const long at = ((block / blocks * heads + head) * blocks + block % blocks) * size * dim;
const int groups = (kept + GROUP - 1) / GROUP;
const int items = groups * dim;  // a channel of a group

float most = 0.0f;
for (int item = index; item < items; item += THREADS) {
  const int channel = item % dim;
  const float anchor = differences ? float(x[at + channel]) : 0.0f;
  const int first = item / dim * GROUP;
  for (int row = first; row < metal::min(first + GROUP, kept); row++) {
    const float one = float(x[at + row_at(positions, positions_at, every, row, dim) + channel]);
    most = metal::max(most, metal::abs(0.5f * one - 0.5f * anchor));  // the difference may be beyond any float
  }
}
const int exponent = norm_exponent(2.0f * metal::min(largest_of_all(peaks, most, simd, lane), two_to(126)));
const float norm = two_to(-exponent);

float reach = -1000.0f;  // an exponent
for (int item = index; item < items; item += THREADS) {
  const int stored = item % dim;  // place in the stored order
  const int channel = ordered ? int(order[place * dim + stored]) : stored;
  const int first = item / dim * GROUP;
  Wide bottom = Wide{0.0f, 0.0f}, top = Wide{0.0f, 0.0f};
  range_of(
      bottom, top, x, at + channel, differences ? float(x[at + channel]) : 0.0f, norm, positions, positions_at, every,
      first, metal::min(first + GROUP, kept), dim);
  const int bits = bits_of(params, first_segment, segments, stored);
  const float levels = float(bits == 0 ? 1 : (1 << bits) - 1);
  const Wide step = over(plus(top, negative(bottom)), Wide{levels, 0.0f});
  Wide longest = below(magnitude(bottom), magnitude(top)) ? magnitude(top) : magnitude(bottom);
  longest = below(longest, step) ? step : longest;
  reach = longest.high > 0.0f ? metal::max(reach, float(exponent_above(longest))) : reach;
}
reach = largest_of_all(peaks, reach, simd, lane);
const int of_unit = reach > -1000.0f ? metal::clamp(int(reach) + exponent - 14, -126, 127) : 0;
if (index == 0) {
  unit[place] = two_to(of_unit);
}

for (int item = index; item < items; item += THREADS) {
  const int stored = item % dim;
  const int channel = ordered ? int(order[place * dim + stored]) : stored;
  const float anchor = differences ? float(x[at + channel]) : 0.0f;
  const int first = item / dim * GROUP;
  const int stop = metal::min(first + GROUP, kept);
  const int bits = bits_of(params, first_segment, segments, stored);
  const float whole = two_to(-of_unit);
  float best_low = 0.0f, best_step = 0.0f;
  if (bits == 0) {
    Wide sum = Wide{0.0f, 0.0f};
    for (int row = first; row < stop; row++) {
      const float one = float(x[at + row_at(positions, positions_at, every, row, dim) + channel]);
      sum = plus(sum, difference(one, anchor, whole));
    }
    best_low = nearest_half(over(sum, Wide{float(stop - first), 0.0f}));
  } else {
    Wide bottom = Wide{0.0f, 0.0f}, top = Wide{0.0f, 0.0f};
    range_of(bottom, top, x, at + channel, anchor, whole, positions, positions_at, every, first, stop, dim);
    const Wide middle = scaled(plus(bottom, top), 0.5f);
    const Wide spread = plus(top, negative(bottom));
    const float levels = float((1 << bits) - 1);
    const int clip = clips[2 * bits];
    const int count = clips[2 * bits + 1];
    Wide least = Wide{0.0f, 0.0f};
    for (int i = 0; i < count; i++) {
      const Wide hundredths = Wide{float(clips[clip + 2 * i]), 0.0f};
      const float off = spread.high * as_type<float>(int(clips[clip + 2 * i + 1]));
      const Wide covered = nudged(over(times(spread, hundredths), Wide{100.0f, 0.0f}), off);
      const float tried_low = nearest_half(trimmed(plus(middle, scaled(covered, -0.5f))));
      const float tried_step = nearest_half(trimmed(over(covered, Wide{levels, 0.0f})));
      Wide error = Wide{0.0f, 0.0f};
      for (int row = first; row < stop && count > 1; row++) {
        const float one = float(x[at + row_at(positions, positions_at, every, row, dim) + channel]);
        const Wide exact = difference(one, anchor, whole);
        const float code = code_for(exact, tried_low, tried_step, levels);
        const Wide miss = plus(plus(Wide{tried_low, 0.0f}, Wide{tried_step * code, 0.0f}), negative(exact));
        error = plus(error, times(miss, miss));
      }
      if (i == 0 || below(error, least)) {
        least = error;
        best_low = tried_low;
        best_step = tried_step;
      }
    }
  }
  const long stored_at = (place * groups + item / dim) * dim + stored;
  low[stored_at] = half(best_low);
  scale[stored_at] = half(best_step);
}
