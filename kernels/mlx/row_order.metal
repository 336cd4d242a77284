// One threadgroup: the channels of the keys of one block and kv head by descending importance; a thread has a channel.
// x [B, H, N * S, D], positions [B * N, R], weight [H, D] -> order [B, N, H, D]
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];
const int kept = params[4];
const bool every = params[5];

threadgroup int powers[WIDTH];  // importance = (high + low) * 2^power, high in 1..2 or 0
threadgroup float highs[WIDTH];
threadgroup float lows[WIDTH];

const int channel = thread_index_in_threadgroup;
const long place = threadgroup_position_in_grid.x;  // of sequence, block and kv head
const int head = int(place % heads);
const long block = place / heads;  // of all sequences
const long at = ((block / blocks * heads + head) * blocks + block % blocks) * size * dim;

Wide own = Wide{0.0f, 0.0f};
int power = -100000;
if (channel < dim) {
  float most = 0.0f;
  for (int row = 0; row < kept; row++) {
    most = metal::max(most, metal::abs(float(x[at + row_at(positions, block * kept, every, row, dim) + channel])));
  }
  const int exponent = norm_exponent(most);
  for (int first = 0; first < kept; first += GROUP) {
    Wide low = Wide{0.0f, 0.0f}, high = Wide{0.0f, 0.0f};
    range_of(
        low, high, x, at + channel, 0.0f, two_to(-exponent), positions, block * kept, every, first,
        metal::min(first + GROUP, kept), dim);
    const Wide spread = plus(high, negative(low));  // the anchor takes no part in it
    own = plus(own, times(spread, spread));
  }
  float factor = weight[head * dim + channel];
  if (own.high > 0.0f && factor > 0.0f) {
    power = 2 * exponent;
    if (factor < two_to(-100)) {
      factor *= two_to(64);
      power -= 64;
    }
    const int of_factor = metal::min(exponent_of(factor), 126);
    const int of_own = exponent_of(own.high);
    own = times(scaled(own, two_to(-of_own)), Wide{factor * two_to(-of_factor), 0.0f});
    const int rest = exponent_of(own.high);
    own = scaled(own, two_to(-rest));
    power += of_factor + of_own + rest;
  } else {
    own = Wide{0.0f, 0.0f};
  }
  powers[channel] = power;
  highs[channel] = own.high;
  lows[channel] = own.low;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (channel < dim) {
  int before = 0;
  for (int other = 0; other < dim; other++) {
    const Wide theirs = Wide{highs[other], lows[other]};
    const bool same = powers[other] == power && theirs.high == own.high && theirs.low == own.low;
    const bool more = powers[other] > power || (powers[other] == power && below(own, theirs));
    before += more || (same && other < channel) ? 1 : 0;
  }
  order[place * dim + before] = uchar(channel);
}
