// The value side of decode: the running softmax of ROWS rows of queries, and sums over the rows of a tile. Every thread
// knows the peaks; its sums are those of its channels, or of its rank, over its part of the rows.

// Of all weights: so many rows of the largest numbers may be summed before they are divided by the sum of the weights
static constant constexpr const float SHRINK = 0x1p-16f;

// Weights of a tile from each thread's logits -> weights [TILE, ROWS], negative where the thread has no row. What was
// summed so far is to be multiplied by keep [ROWS].
template <int ROWS>
inline void tile_weights(
    threadgroup float* weights, threadgroup float* peaks, thread float* peak, thread float* keep,
    const thread float* logits, bool live, int index, int simd, int lane) {
  for (int m = 0; m < ROWS; m++) {
    const float top = simd_max(logits[m]);
    if (lane == 0) {
      peaks[simd * ROWS + m] = top;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int m = 0; m < ROWS; m++) {
    float top = peak[m];
    for (int s = 0; s < SIMDS; s++) {
      top = metal::max(top, peaks[s * ROWS + m]);
    }
    const float base = top == -INFINITY ? 0.0f : top;
    keep[m] = metal::precise::exp(peak[m] - base);
    peak[m] = top;
    weights[index * ROWS + m] = live ? metal::precise::exp(logits[m] - base) * SHRINK : -1.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Join one row to the running softmax: value [dim] from `at` for one part's threads, or none where `dim` is 0
template <int ROWS, int WIDTH, typename V>
inline void join_one(
    thread float* sums, thread float* total, thread float* peak, const thread float* logits, V value, long at, int dim,
    int channel, bool first_part) {
  for (int m = 0; m < ROWS; m++) {
    const float top = metal::max(peak[m], logits[m]);
    const float base = top == -INFINITY ? 0.0f : top;
    const float keep = metal::precise::exp(peak[m] - base);
    const float weight = first_part ? metal::precise::exp(logits[m] - base) * SHRINK : 0.0f;
    peak[m] = top;
    total[m] = total[m] * keep + weight;
    for (int j = 0; j * TILE < WIDTH; j++) {
      const int c = channel + j * TILE;
      const float x = first_part && c < dim ? weight * float(value[at + c]) : 0.0f;
      sums[j * ROWS + m] = sums[j * ROWS + m] * keep + x;
    }
  }
}

template <int ROWS, int WIDTH>
inline void scale_sums(thread float* sums, thread float* total, const thread float* keep) {
  for (int m = 0; m < ROWS; m++) {
    total[m] *= keep[m];
    for (int j = 0; j * TILE < WIDTH; j++) {
      sums[j * ROWS + m] *= keep[m];
    }
  }
}

// Add plain rows v [count, dim] by their weights, one of PARTS of them
template <int ROWS, int WIDTH, int PARTS, typename V>
inline void add_plain(
    thread float* sums, thread float* total, const threadgroup float* weights, V v, long at, int count, int dim,
    int channel, int part) {
  float mass[ROWS];  // of the tile: sums of many tiles stay as exact as those of few
  for (int m = 0; m < ROWS; m++) {
    mass[m] = 0.0f;
  }
  for (int row = part; row < count; row += PARTS) {
    for (int m = 0; m < ROWS; m++) {
      mass[m] += weights[row * ROWS + m] < 0.0f ? 0.0f : weights[row * ROWS + m];  // NaN stays
    }
  }
  for (int m = 0; m < ROWS; m++) {
    total[m] += mass[m];
  }
  for (int j = 0; j * TILE < WIDTH; j++) {
    const int c = channel + j * TILE;
    float products[ROWS];
    for (int m = 0; m < ROWS; m++) {
      products[m] = 0.0f;
    }
    for (int row = part; row < count; row += PARTS) {
      if (weights[row * ROWS] < 0.0f) {
        continue;  // may hold anything
      }
      if (c < dim) {
        const float x = float(v[at + long(row) * dim + c]);
        for (int m = 0; m < ROWS; m++) {
          products[m] += weights[row * ROWS + m] * x;
        }
      }
    }
    for (int m = 0; m < ROWS; m++) {
      sums[j * ROWS + m] += products[m];
    }
  }
}

// Add coded rows [count, row_bytes] of one scale group by their weights; scale and low [dim] from `scale_at`
template <int ROWS, int WIDTH, int PARTS, typename V, typename S, typename R>
inline void add_coded(
    thread float* sums, thread float* total, const threadgroup float* weights, V codes, long at, int row_bytes, S scale,
    S low, long scale_at, float unit, R runs, int first_run, int runs_count, int count, int dim, int channel,
    int part) {
  float mass[ROWS];
  for (int m = 0; m < ROWS; m++) {
    mass[m] = 0.0f;
  }
  for (int row = part; row < count; row += PARTS) {
    for (int m = 0; m < ROWS; m++) {
      mass[m] += weights[row * ROWS + m];
    }
  }
  for (int j = 0; j * TILE < WIDTH; j++) {
    const int c = channel + j * TILE;
    if (c < dim) {
      float products[ROWS];
      for (int m = 0; m < ROWS; m++) {
        products[m] = 0.0f;
      }
      for (int run = 0; run < runs_count; run++) {
        const int entry = first_run + run * RUN_SIZE;
        const int bytes = runs[entry + RUN_BYTES];
        const int width = runs[entry + RUN_WIDTH];
        const int left = runs[entry + RUN_LEFT];
        const long start = at + runs[entry + RUN_FIRST_BYTE] + c % bytes;
        const int shift = width * (c / bytes);
        const uint mask = (1u << width) - 1u;
        for (int row = part; row < count; row += PARTS) {
          const float x = float(((code_of(codes[start + long(row) * row_bytes]) >> shift) & mask) << left);
          for (int m = 0; m < ROWS; m++) {
            products[m] += weights[row * ROWS + m] * x;
          }
        }
      }
      const float step = float(scale[scale_at + c]);
      const float bias = float(low[scale_at + c]);
      for (int m = 0; m < ROWS; m++) {
        sums[j * ROWS + m] += (mass[m] * bias + products[m] * step) * unit;
      }
    }
  }
  for (int m = 0; m < ROWS; m++) {
    total[m] += mass[m];
  }
}

// Add rows u [count, rank] to the sums of a thread's rank, and their weights to mass [ROWS]
template <int ROWS, int PARTS, typename U, typename S>
inline void add_ranked(
    thread float* ranks, thread float* mass, const threadgroup float* weights, U u, long at, int rank, S step,
    long step_at, bool scaled, int count, int e, int part) {
  for (int row = part; row < count; row += PARTS) {
    if (weights[row * ROWS] < 0.0f) {
      continue;
    }
    float x = 0.0f;
    if (e < rank) {
      x = float(u[at + long(row) * rank + e]);
      x = scaled ? x * float(step[step_at + row]) : x;
    }
    for (int m = 0; m < ROWS; m++) {
      mass[m] += weights[row * ROWS + m];
      ranks[m] += weights[row * ROWS + m] * x;
    }
  }
}
