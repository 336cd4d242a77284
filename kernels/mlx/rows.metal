// What route and decode share. A threadgroup of TILE threads takes ROWS rows of queries of one kv head; a thread scores
// one stored row of a tile. Lengths, widths and offsets are run-time numbers, so one build serves all of them.

static constant constexpr const int TILE = 128;  // a scale group of residual rows
static constant constexpr const int SIMDS = 4;

// A part of a run of channels of coded rows: [runs, 6] integers that say where it lies; see the law, "Packing"
enum { RUN_FIRST_BYTE, RUN_BYTES, RUN_WIDTH, RUN_LEFT, RUN_FIRST_CHANNEL, RUN_CHANNELS, RUN_SIZE };

inline uint code_of(uchar byte) {
  return byte;
}

template <typename T>
inline uint code_of(T) {
  return 0;  // rows that are not coded
}

// rows first .. of q [rows, dim] times scale -> queries [dim, ROWS], zero where there is no row
template <int ROWS, typename Q>
inline void load_queries(
    threadgroup float* queries, Q q, long first, int rows, int dim, float scale, int index) {
  for (int place = index; place < ROWS * dim; place += TILE) {
    const int row = place / dim;
    const int d = place % dim;
    queries[d * ROWS + row] = row < rows ? float(q[(first + row) * dim + d]) * scale : 0.0f;
  }
}

// queries . stored [dim] -> products [ROWS], in all lanes of a simd-group
template <int ROWS, typename P>
inline void project(
    thread float* products, const threadgroup float* queries, P stored, long at, int dim, int lane) {
  for (int m = 0; m < ROWS; m++) {
    products[m] = 0.0f;
  }
  for (int d = lane; d < dim; d += 32) {
    const float x = float(stored[at + d]);
    for (int m = 0; m < ROWS; m++) {
      products[m] += queries[d * ROWS + m] * x;
    }
  }
  for (int m = 0; m < ROWS; m++) {
    products[m] = simd_sum(products[m]);
  }
}

// queries in the rank space of a block, basis [rank, dim] -> ranked [rank, ROWS]
template <int ROWS, typename B, typename S>
inline void rank_queries(
    threadgroup float* ranked, const threadgroup float* queries, B basis, long at, S scale, long scale_at, bool scaled,
    float unit, int rank, int dim, int simd, int lane) {
  float products[ROWS];
  for (int e = simd; e < rank; e += SIMDS) {
    project<ROWS>(products, queries, basis, at + long(e) * dim, dim, lane);
    const float factor = scaled ? unit * scale[scale_at + e] : unit;
    if (lane == 0) {
      for (int m = 0; m < ROWS; m++) {
        ranked[e * ROWS + m] = products[m] * factor;
      }
    }
  }
}

// Logits [ROWS] of one low-rank row, u [rank]
template <int ROWS, typename U>
inline void lowrank_logits(
    thread float* logits, const threadgroup float* ranked, const threadgroup float* anchors, U u, long at, int rank,
    float step) {
  for (int m = 0; m < ROWS; m++) {
    logits[m] = 0.0f;
  }
  for (int e = 0; e < rank; e++) {
    const float x = float(u[at + e]);
    for (int m = 0; m < ROWS; m++) {
      logits[m] += ranked[e * ROWS + m] * x;
    }
  }
  for (int m = 0; m < ROWS; m++) {
    logits[m] = anchors[m] + step * logits[m];
  }
}

// Logits [ROWS] of one plain row, k [dim]
template <int ROWS, typename K>
inline void plain_logits(thread float* logits, const threadgroup float* queries, K k, long at, int dim) {
  for (int m = 0; m < ROWS; m++) {
    logits[m] = 0.0f;
  }
  for (int d = 0; d < dim; d++) {
    const float x = float(k[at + d]);
    for (int m = 0; m < ROWS; m++) {
      logits[m] += queries[d * ROWS + m] * x;
    }
  }
}

// Queries that meet the codes of a scale group -> coded [dim, ROWS] in stored order, and the constant of its rows'
// logits -> constants [ROWS]. scale, low and order [dim] start at `at` and `order_at`.
template <int ROWS, typename S, typename O>
inline void code_queries(
    threadgroup float* coded, threadgroup float* constants, const threadgroup float* queries,
    const threadgroup float* anchors, S scale, S low, long at, float unit, O order, long order_at, bool ordered,
    int dim, int simd, int lane) {
  for (int m = simd; m < ROWS; m += SIMDS) {
    float bias = 0.0f;
    for (int s = lane; s < dim; s += 32) {
      const float x = queries[(ordered ? int(order[order_at + s]) : s) * ROWS + m];
      coded[s * ROWS + m] = x * unit * float(scale[at + s]);
      bias += x * unit * float(low[at + s]);
    }
    bias = simd_sum(bias);
    if (lane == 0) {
      constants[m] = anchors[m] + bias;
    }
  }
}

// Logits [ROWS] of one coded row, codes [bytes]; a part's field goes in at its place of the code
template <int ROWS, typename K, typename R>
inline void coded_logits(
    thread float* logits, const threadgroup float* coded, const threadgroup float* constants, K codes, long at, R runs,
    int first_run, int count) {
  for (int m = 0; m < ROWS; m++) {
    logits[m] = 0.0f;
  }
  for (int run = 0; run < count; run++) {
    const int entry = first_run + run * RUN_SIZE;
    const int bytes = runs[entry + RUN_BYTES];
    const int width = runs[entry + RUN_WIDTH];
    const int left = runs[entry + RUN_LEFT];
    const int first = runs[entry + RUN_FIRST_CHANNEL];
    const int channels = runs[entry + RUN_CHANNELS];
    const long start = at + runs[entry + RUN_FIRST_BYTE];
    const uint mask = (1u << width) - 1u;
    for (int b = 0; b < bytes; b++) {
      uint byte = code_of(codes[start + b]);
      for (int channel = b; channel < channels; channel += bytes) {
        const float x = float((byte & mask) << left);
        byte >>= width;
        for (int m = 0; m < ROWS; m++) {
          logits[m] += coded[(first + channel) * ROWS + m] * x;
        }
      }
    }
  }
  for (int m = 0; m < ROWS; m++) {
    logits[m] += constants[m];
  }
}

// Whether a row is among positions [count], which ascend
template <typename P>
inline bool is_kept(P positions, long at, int count, int row) {
  int low = 0;
  int high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (int(positions[at + middle]) < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && int(positions[at + low]) == row;
}

inline float capped(float logit, float softcap) {
  return softcap > 0.0f ? softcap * metal::precise::tanh(logit / softcap) : logit;
}
