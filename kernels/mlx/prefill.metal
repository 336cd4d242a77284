// One threadgroup: ROWS queries of one query head and one query block, over the key blocks that were chosen for it.
// WIDTH is at least D and Dv.
// q [B, Hq, Sq, D], k [B, H, Sk, D], v [B, H, Sk, Dv], block_indices [B, H, query blocks, W], sink [Hq]
// -> out [B, Hq, Sq, Dv], lse [B, Hq, Sq]
const int heads = params[0];  // Hq
const int group = params[1];  // Hq / H
const int length = params[2];  // Sq
const int keys = params[3];  // Sk
const int dim = params[4];
const int dim_v = params[5];
const int blocks = params[6];
const int block_size = params[7];
const int query_blocks = params[8];
const int prefill_block = params[9];
const int slot_count = params[10];  // W
const bool sinks = params[11];
const float sm_scale = as_type<float>(params[12]);
const float softcap = as_type<float>(params[13]);  // 0 is none

constexpr int CHANNELS = WIDTH < TILE ? WIDTH : TILE;  // of a thread's part; WIDTH is 32, 64, 128 or 256
constexpr int PARTS = TILE / CHANNELS;
constexpr int SLICES = (WIDTH + TILE - 1) / TILE;  // channels of a thread

threadgroup float queries[ROWS * WIDTH];
threadgroup float weights[TILE * ROWS];
threadgroup float peaks[SIMDS * ROWS];
threadgroup float masses[SIMDS * ROWS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int channel = index % CHANNELS;
const int part = index / CHANNELS;

const int query_head = threadgroup_position_in_grid.x;  // of all sequences
const int pair = query_head / heads * (heads / group) + query_head % heads / group;  // of sequence and kv head
const int tiles = (prefill_block + ROWS - 1) / ROWS;
const int query_block = threadgroup_position_in_grid.y / tiles;
const int first = query_block * prefill_block + threadgroup_position_in_grid.y % tiles * ROWS;
const int count = metal::min(metal::min(first + ROWS, (query_block + 1) * prefill_block), length) - first;
if (count <= 0) {
  return;  // all threads: the last tile of a query block may have no queries
}
const int first_position = keys - length + first;

load_queries<ROWS>(queries, q, long(query_head) * length + first, count, dim, sm_scale, index);
threadgroup_barrier(mem_flags::mem_threadgroup);

float peak[ROWS], total[ROWS], keep[ROWS], logits[ROWS], sums[SLICES * ROWS];
for (int m = 0; m < ROWS; m++) {
  peak[m] = -INFINITY;
  total[m] = 0.0f;
}
for (int i = 0; i < SLICES * ROWS; i++) {
  sums[i] = 0.0f;
}

const long chosen = (long(pair) * query_blocks + query_block) * slot_count;
for (int slot = 0; slot < slot_count; slot++) {
  const long block = block_indices[chosen + slot];
  uint again = 0;  // a repeated block counts once
  for (int other = lane; other < slot; other += 32) {
    again |= long(block_indices[chosen + other]) == block ? 1u : 0u;
  }
  if (block < 0 || block >= blocks || simd_or(again) > 0) {
    continue;
  }
  const int begin = int(block) * block_size;
  const int stop = metal::min(metal::min(begin + block_size, keys), first_position + count);
  for (int start = begin; start < stop; start += TILE) {
    const int row = start + index;
    const bool live = row < stop;
    for (int m = 0; m < ROWS; m++) {
      logits[m] = -INFINITY;
    }
    if (live) {
      plain_logits<ROWS>(logits, queries, k, (long(pair) * keys + row) * dim, dim);
      for (int m = 0; m < ROWS; m++) {
        logits[m] = m < count && row <= first_position + m ? capped(logits[m], softcap) : -INFINITY;
      }
    }
    tile_weights<ROWS>(weights, peaks, peak, keep, logits, live, index, simd, lane);
    scale_sums<ROWS, WIDTH>(sums, total, keep);
    add_plain<ROWS, WIDTH, PARTS>(
        sums, total, weights, v, (long(pair) * keys + start) * dim_v, metal::min(TILE, stop - start), dim_v, channel,
        part);
  }
}
if (sinks) {
  for (int m = 0; m < ROWS; m++) {
    logits[m] = float(sink[query_head % heads]);
  }
  join_one<ROWS, WIDTH>(sums, total, peak, logits, v, 0, 0, channel, part == 0);
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
  for (int m = 0; m < count; m++) {
    const long at = long(query_head) * length + first + m;
    const bool empty = total[m] == 0.0f;
    for (int j = 0; j < SLICES; j++) {
      const int c = channel + j * TILE;
      if (c < dim_v) {
        out[at * dim_v + c] = saturated<T>(empty ? 0.0f : sums[j * ROWS + m] / total[m]);
      }
    }
    if (channel == 0) {
      lse[at] = empty ? -INFINITY : peak[m] + metal::precise::log(total[m] / SHRINK);
    }
  }
}
