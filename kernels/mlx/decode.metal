// One threadgroup: ROWS rows of queries of one kv head, over one split of what they attend: some slots of block_indices,
// or a stretch of the window. WIDTH is at least D and Dv, RANKS at least the rank.
// q [B, H * G * Sq, D], block_indices [B, H, W], parts of blocks [B, N, ...], k_window [B, H, keys, D]
// -> out [splits, B, H * G * Sq, Dv], lse [splits, B, H * G * Sq]
const int heads = params[0];
const int rows = params[1];  // G * Sq
const int length = params[2];  // Sq
const int dim = params[3];
const int dim_v = params[4];
const int blocks = params[5];
const int block_size = params[6];
const int rank = params[7];
const int kept = params[8];
const int slot_count = params[9];  // W
const int slot_splits = params[10];
const int slots = params[11];  // of a split
const int keys = params[12];
const int window = params[13];  // 0 is none
const int window_rows = params[14];  // of a split
const bool counted = params[15];
const bool ragged = params[16];
const bool sinks = params[17];
const bool causal = params[18];
const bool lowrank = params[19];
const bool residual = params[20];
const bool every = params[21];  // row of a block is residual, but for the anchor
const bool scaled = params[22];  // factors are int8
const bool coded_rows = params[23];
const bool ordered = params[24];
const int key_bytes = params[25];
const int key_runs = params[26];
const int value_bytes = params[27];
const int value_runs = params[28];
const float sm_scale = as_type<float>(params[29]);
const float softcap = as_type<float>(params[30]);  // 0 is none
const int first_run = 31;
const int first_value_run = first_run + key_runs * RUN_SIZE;

constexpr int CHANNELS = WIDTH < TILE ? WIDTH : TILE;  // of a thread's part; WIDTH is 32, 64, 128 or 256
constexpr int PARTS = TILE / CHANNELS;
constexpr int RANK_PARTS = TILE / RANKS;
constexpr int SLICES = (WIDTH + TILE - 1) / TILE;  // channels of a thread

threadgroup float queries[WIDTH * ROWS];
threadgroup float coded[WIDTH * ROWS];
threadgroup float ranked[RANKS * ROWS];
threadgroup float anchors[ROWS];
threadgroup float constants[ROWS];
threadgroup float weights[TILE * ROWS];
threadgroup float peaks[SIMDS * ROWS];
threadgroup float masses[SIMDS * ROWS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int channel = index % CHANNELS;
const int part = index / CHANNELS;
const int e = index % RANKS;  // of the rank space
const int rank_part = index / RANKS;

const long pair = threadgroup_position_in_grid.x;  // of sequence and kv head
const int sequence = int(pair / heads);
const int head = int(pair % heads);
const int first = threadgroup_position_in_grid.y * ROWS;  // of the rows of queries
const int split = threadgroup_position_in_grid.z;

load_queries<ROWS>(queries, q, pair * rows + first, rows - first, dim, sm_scale, index);
threadgroup_barrier(mem_flags::mem_threadgroup);

float peak[ROWS], total[ROWS], keep[ROWS], logits[ROWS], sums[SLICES * ROWS];
for (int m = 0; m < ROWS; m++) {
  peak[m] = -INFINITY;
  total[m] = 0.0f;
}
for (int i = 0; i < SLICES * ROWS; i++) {
  sums[i] = 0.0f;
}

if (split < slot_splits) {
  const long chosen = pair * slot_count;
  const int count = counted ? metal::min(int(block_counts[sequence]), blocks) : blocks;
  const int last_slot = metal::min(split * slots + slots, slot_count);
  for (int slot = split * slots; slot < last_slot; slot++) {
    const long block = block_indices[chosen + slot];
    uint again = 0;  // a repeated block counts once
    for (int other = lane; other < slot; other += 32) {
      again |= long(block_indices[chosen + other]) == block ? 1u : 0u;
    }
    if (block < 0 || block >= count || simd_or(again) > 0) {
      continue;
    }
    const long place = long(sequence) * blocks + block;
    const long here = place * heads + head;

    // The anchor's logits, and the queries in the block's rank space
    const bool factors = lowrank && !every && rank > 0;
    if (simd == SIMDS - 1) {
      project<ROWS>(logits, queries, anchor_k, here * dim, dim, lane);
      if (lane == 0) {
        for (int m = 0; m < ROWS; m++) {
          anchors[m] = logits[m];
        }
      }
    }
    if (factors) {
      rank_queries<ROWS>(
          ranked, queries, basis_k, here * rank * dim, basis_k_scale, place * rank, scaled, u_unit[place], rank, dim,
          simd, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (lowrank && every) {
      for (int m = 0; m < ROWS; m++) {
        logits[m] = capped(anchors[m], softcap);
      }
      join_one<ROWS, WIDTH>(sums, total, peak, logits, anchor_v, here * dim_v, dim_v, channel, part == 0);
    }

    if (lowrank && !every) {
      float ranks[ROWS], mass[ROWS];
      for (int m = 0; m < ROWS; m++) {
        ranks[m] = 0.0f;
        mass[m] = 0.0f;
      }
      for (int start = 0; start < block_size; start += TILE) {
        const int row = start + index;
        const bool live = row < block_size && !is_kept(positions, place * kept, kept, row);
        for (int m = 0; m < ROWS; m++) {
          logits[m] = -INFINITY;
        }
        if (live) {
          const float step = scaled && rank > 0 ? float(u_scale[place * block_size + row]) : 1.0f;
          lowrank_logits<ROWS>(logits, ranked, anchors, u, (place * block_size + row) * rank, rank, step);
          for (int m = 0; m < ROWS; m++) {
            logits[m] = capped(logits[m], softcap);
          }
        }
        tile_weights<ROWS>(weights, peaks, peak, keep, logits, live, index, simd, lane);
        scale_sums<ROWS, WIDTH>(sums, total, keep);
        for (int m = 0; m < ROWS; m++) {
          ranks[m] *= keep[m];
          mass[m] *= keep[m];
        }
        add_ranked<ROWS, RANK_PARTS>(
            ranks, mass, weights, u, (place * block_size + start) * rank, rank, u_scale, place * block_size + start,
            scaled && rank > 0, metal::min(TILE, block_size - start), e, rank_part);
      }

      // From the rank space to the channels: add up the parts of each rank, then take the sums by the basis
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int m = 0; m < ROWS; m++) {
        weights[m * TILE + index] = ranks[m];
        if (e == 0) {
          masses[rank_part * ROWS + m] = mass[m];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int cell = index; cell < ROWS * RANKS; cell += TILE) {
        float sum = 0.0f;
        if (cell / ROWS < rank) {
          for (int p = 0; p < RANK_PARTS; p++) {
            sum += weights[cell % ROWS * TILE + p * RANKS + cell / ROWS];
          }
          const float unit = scaled ? u_unit[place] * basis_v_scale[place * rank + cell / ROWS] : u_unit[place];
          sum *= unit / v_gain[place];
        }
        ranked[cell] = sum;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (part == 0) {
        for (int m = 0; m < ROWS; m++) {
          mass[m] = 0.0f;
          for (int p = 0; p < RANK_PARTS; p++) {
            mass[m] += masses[p * ROWS + m];
          }
          total[m] += mass[m];
        }
      }
      for (int j = 0; j < SLICES; j++) {
        const int c = channel + j * TILE;
        if (c < dim_v) {
          if (part == 0) {
            const float value = float(anchor_v[here * dim_v + c]);
            for (int m = 0; m < ROWS; m++) {
              sums[j * ROWS + m] += mass[m] * value;
            }
          }
          for (int row = part; row < rank; row += PARTS) {
            const float x = float(basis_v[(here * rank + row) * dim_v + c]);
            for (int m = 0; m < ROWS; m++) {
              sums[j * ROWS + m] += ranked[row * ROWS + m] * x;
            }
          }
        }
      }
    }

    if (residual) {
      const int groups = (kept + TILE - 1) / TILE;
      for (int group = 0; group < groups; group++) {
        const int start = group * TILE;
        const int row_count = metal::min(TILE, kept - start);
        const bool live = index < row_count;
        const long at = here * kept + start;
        const long scales = here * groups + group;
        if (coded_rows) {
          code_queries<ROWS>(
              coded, constants, queries, anchors, k_scale, k_low, scales * dim, k_unit[here], k_order, here * dim,
              ordered, dim, simd, lane);
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (int m = 0; m < ROWS; m++) {
          logits[m] = -INFINITY;
        }
        if (live) {
          if (coded_rows) {
            coded_logits<ROWS>(
                logits, coded, constants, residual_k, (at + index) * key_bytes, params, first_run, key_runs);
          } else {
            plain_logits<ROWS>(logits, queries, residual_k, (at + index) * dim, dim);
          }
          for (int m = 0; m < ROWS; m++) {
            logits[m] = capped(logits[m], softcap);
          }
        }
        tile_weights<ROWS>(weights, peaks, peak, keep, logits, live, index, simd, lane);
        scale_sums<ROWS, WIDTH>(sums, total, keep);
        if (coded_rows) {
          add_coded<ROWS, WIDTH, PARTS>(
              sums, total, weights, residual_v, at * value_bytes, value_bytes, v_scale, v_low, scales * dim_v,
              v_unit[here], params, first_value_run, value_runs, row_count, dim_v, channel, part);
        } else {
          add_plain<ROWS, WIDTH, PARTS>(
              sums, total, weights, residual_v, at * dim_v, row_count, dim_v, channel, part);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next block's queries take the place of these
  }
} else {
  const int first_row = (split - slot_splits) * window_rows;
  const int end = ragged ? int(seq_lens[sequence]) : keys;
  int begin = metal::min(first_row + window_rows, keys);
  int stop = 0;
  int earliest[ROWS], latest[ROWS];
  for (int m = 0; m < ROWS; m++) {
    const int position = end - length + (first + m) % length;
    latest[m] = causal ? metal::min(position, end - 1) : end - 1;
    latest[m] = metal::min(latest[m], metal::min(first_row + window_rows, keys) - 1);
    earliest[m] = window > 0 ? metal::max(position - window + 1, first_row) : first_row;
    begin = metal::min(begin, earliest[m]);
    stop = metal::max(stop, latest[m] + 1);
  }
  for (int start = begin; start < stop; start += TILE) {
    const int row = start + index;
    bool live = false;
    for (int m = 0; m < ROWS; m++) {
      live = live || (earliest[m] <= row && row <= latest[m]);
      logits[m] = -INFINITY;
    }
    if (live) {
      plain_logits<ROWS>(logits, queries, k_window, (pair * keys + row) * dim, dim);
      for (int m = 0; m < ROWS; m++) {
        logits[m] = earliest[m] <= row && row <= latest[m] ? capped(logits[m], softcap) : -INFINITY;
      }
    }
    tile_weights<ROWS>(weights, peaks, peak, keep, logits, live, index, simd, lane);
    scale_sums<ROWS, WIDTH>(sums, total, keep);
    add_plain<ROWS, WIDTH, PARTS>(
        sums, total, weights, v_window, (pair * keys + start) * dim_v, metal::min(TILE, stop - start), dim_v, channel,
        part);
  }
  if (sinks && split == slot_splits) {
    for (int m = 0; m < ROWS; m++) {
      logits[m] = first + m < rows ? float(sink[head * (rows / length) + (first + m) / length]) : -INFINITY;
    }
    join_one<ROWS, WIDTH>(sums, total, peak, logits, v_window, 0, 0, channel, part == 0);
  }
}

// Add up the parts of each channel
if (PARTS > 1) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int m = 0; m < ROWS; m++) {
    weights[m * TILE + index] = sums[m];
    if (channel == 0) {
      masses[part * ROWS + m] = total[m];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int m = 0; m < ROWS; m++) {
    for (int p = 1; p < PARTS; p++) {
      sums[m] += weights[m * TILE + p * CHANNELS + channel];
      total[m] += masses[p * ROWS + m];
    }
  }
}
if (part == 0) {
  const long pairs = threadgroups_per_grid.x;
  for (int m = 0; m < metal::min(ROWS, rows - first); m++) {
    const long at = (split * pairs + pair) * rows + first + m;
    const bool empty = total[m] == 0.0f;
    for (int j = 0; j < SLICES; j++) {
      const int c = channel + j * TILE;
      if (c < dim_v) {
        out[at * dim_v + c] = empty ? 0.0f : sums[j * ROWS + m] / total[m];
      }
    }
    if (channel == 0) {
      lse[at] = empty ? -INFINITY : peak[m] + metal::precise::log(total[m] / SHRINK);
    }
  }
}
