// Coded rows of one block and kv head: where they are read, and the ranges that their scales cover.

// A part of a run of channels: [runs, 6] integers that say where it lies; see the law, "Packing"
enum { RUN_FIRST_BYTE, RUN_BYTES, RUN_WIDTH, RUN_LEFT, RUN_FIRST_CHANNEL, RUN_CHANNELS, RUN_SIZE };

// The width of a place of the stored order; segments are pairs of channels and bits
template <typename P>
inline int bits_of(P params, int first_segment, int segments, int place) {
  int end = 0;
  for (int segment = 0; segment < segments; segment++) {
    end += params[first_segment + 2 * segment];
    if (place < end) {
      return params[first_segment + 2 * segment + 1];
    }
  }
  return 0;
}

// The kept row of that index, as an offset into x; every row but the anchor is kept where positions are not stored
template <typename P>
inline long row_at(P positions, long positions_at, bool every, int row, int dim) {
  return long(every ? row + 1 : int(positions[positions_at + row])) * dim;
}

// Smallest and largest scaled difference of rows first .. stop of one channel, whose anchor is at x[at]
template <typename X, typename P>
inline void range_of(
    thread Wide& low, thread Wide& high, X x, long at, float anchor, float scale, P positions, long positions_at,
    bool every, int first, int stop, int dim) {
  for (int row = first; row < stop; row++) {
    const Wide one = difference(float(x[at + row_at(positions, positions_at, every, row, dim)]), anchor, scale);
    low = row == first || below(one, low) ? one : low;
    high = row == first || below(high, one) ? one : high;
  }
}

// The code of an exact number; 0 where the step is 0
inline float code_for(Wide exact, float low, float step, float levels) {
  if (step == 0.0f) {
    return 0.0f;
  }
  return metal::clamp(nearest(over(plus(exact, Wide{-low, 0.0f}), Wide{step, 0.0f})), 0.0f, levels);
}
