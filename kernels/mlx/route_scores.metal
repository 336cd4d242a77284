// One threadgroup: the scores of one block for ROWS rows of queries of one kv head. A thread joins its rows of the block
// to a running log-sum-exp or, where `largest`, to a maximum whose total counts NaN.
// q [B, H * G * Sq, D], parts of blocks [B, N, ...] -> scores [B, H, G * Sq, N]
const int heads = params[0];
const int rows = params[1];  // G * Sq
const int dim = params[2];
const int blocks = params[3];
const int block_size = params[4];
const int rank = params[5];
const int kept = params[6];
const bool counted = params[7];
const bool lowrank = params[8];  // rows in the rank space, but for residual ones where these are read; else the anchor
const bool stored = params[9];  // residual rows are read
const bool largest = params[10];
const bool scaled = params[11];  // factors are int8
const bool coded_rows = params[12];
const bool ordered = params[13];
const int key_bytes = params[14];
const int key_runs = params[15];
const float sm_scale = as_type<float>(params[16]);
const int first_run = 17;

threadgroup float queries[WIDTH * ROWS];
threadgroup float coded[WIDTH * ROWS];
threadgroup float ranked[RANKS * ROWS];
threadgroup float anchors[ROWS];
threadgroup float constants[ROWS];
threadgroup float peaks[SIMDS * ROWS];
threadgroup float totals[SIMDS * ROWS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const long place = threadgroup_position_in_grid.x;  // of sequence and block
const int sequence = int(place / blocks);
const int block = int(place % blocks);
const int head = threadgroup_position_in_grid.y;
const int first = threadgroup_position_in_grid.z * ROWS;  // of the rows of queries
const long pair = long(sequence) * heads + head;
const long here = place * heads + head;
const bool valid = !counted || block < int(block_counts[sequence]);

float peak[ROWS], total[ROWS], logits[ROWS];
for (int m = 0; m < ROWS; m++) {
  peak[m] = -INFINITY;
  total[m] = 0.0f;
}

if (valid) {
  load_queries<ROWS>(queries, q, pair * rows + first, rows - first, dim, sm_scale, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == SIMDS - 1) {
    project<ROWS>(logits, queries, anchor_k, here * dim, dim, lane);
    if (lane == 0) {
      for (int m = 0; m < ROWS; m++) {
        anchors[m] = logits[m];
      }
    }
  }
  if (lowrank && rank > 0) {
    rank_queries<ROWS>(
        ranked, queries, basis_k, here * rank * dim, basis_k_scale, place * rank, scaled, u_unit[place], rank, dim,
        simd, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int low_rows = lowrank ? block_size : 1;
  for (int row = index; row < low_rows; row += TILE) {
    if (lowrank && stored && is_kept(positions, place * kept, kept, row)) {
      continue;
    }
    const float step = lowrank && scaled && rank > 0 ? float(u_scale[place * block_size + row]) : 1.0f;
    const long at = (place * block_size + row) * rank;
    lowrank_logits<ROWS>(logits, ranked, anchors, u, at, lowrank ? rank : 0, step);
    join_logits<ROWS>(peak, total, logits, largest);
  }

  if (stored) {
    const int groups = (kept + TILE - 1) / TILE;
    for (int group = 0; group < groups; group++) {
      const int row = group * TILE + index;
      if (coded_rows) {
        if (group > 0) {
          threadgroup_barrier(mem_flags::mem_threadgroup);  // the last group's queries are read
        }
        code_queries<ROWS>(
            coded, constants, queries, anchors, k_scale, k_low, (here * groups + group) * dim, k_unit[here], k_order,
            here * dim, ordered, dim, simd, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (row < kept) {
        if (coded_rows) {
          coded_logits<ROWS>(
              logits, coded, constants, residual_k, (here * kept + row) * key_bytes, params, first_run, key_runs);
        } else {
          plain_logits<ROWS>(logits, queries, residual_k, (here * kept + row) * dim, dim);
        }
        join_logits<ROWS>(peak, total, logits, largest);
      }
    }
  }

  // Join the threads: those of a simd-group, then the simd-groups
  for (int m = 0; m < ROWS; m++) {
    const float top = simd_max(peak[m]);
    const float base = top == -INFINITY ? 0.0f : top;
    const float sum = simd_sum(largest ? total[m] : total[m] * metal::precise::exp(peak[m] - base));
    if (lane == 0) {
      peaks[simd * ROWS + m] = top;
      totals[simd * ROWS + m] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

if (index < metal::min(ROWS, rows - first)) {
  float score = -INFINITY;
  if (valid) {
    float top = -INFINITY;
    for (int s = 0; s < SIMDS; s++) {
      top = metal::max(top, peaks[s * ROWS + index]);
    }
    const float base = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
    for (int s = 0; s < SIMDS; s++) {
      const float one = totals[s * ROWS + index];
      sum += largest ? one : one * metal::precise::exp(peaks[s * ROWS + index] - base);
    }
    if (largest) {
      score = sum > 0.0f ? -INFINITY : top;  // what NaN counts as
    } else {
      score = top == INFINITY ? top : top + metal::precise::log(sum);
    }
  }
  scores[(pair * rows + first + index) * blocks + block] = score;
}
