// One threadgroup: the best blocks of one problem, ties to the lowest. The largest share of `maxed` rows counts, its mean
// over `meaned`. A thread takes consecutive blocks, so places follow from sums over the threads before it.
// scores [P, maxed, meaned, N], stats [P, maxed, meaned, 2], block_counts [B]
// -> chosen [P, repeat, count], shares [P, N]
const int blocks = sizes[0];
const int maxed = sizes[1];  // 0: scores [P, N] are the shares
const int meaned = sizes[2];
const int per_sequence = sizes[3];  // problems
const int repeat = sizes[4];
const int top_k = sizes[5];
const int sink = sizes[6];
const int recent = sizes[7];
const int chosen_count = sizes[8];
const bool counted = sizes[9];

threadgroup uint sums[SELECT_SIMDS];
threadgroup uint equals[SELECT_SIMDS];

const int index = thread_index_in_threadgroup;
const int simd = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const long problem = threadgroup_position_in_grid.x;
const int count =
    counted ? metal::clamp(int(block_counts[problem / per_sequence]), 0, blocks) : blocks;
const int first_recent = metal::max(count - recent, metal::min(sink, count));
const uint wanted = metal::min(top_k, count);
const int each = (blocks + SELECT_THREADS - 1) / SELECT_THREADS;
const int begin = metal::min(index * each, blocks);
const int end = metal::min(begin + each, blocks);

for (int n = begin; n < end; n++) {
  float mean = 0.0f;
  for (int query = 0; query < meaned; query++) {
    float share = 0.0f;
    for (int head = 0; head < maxed; head++) {
      const long row = (problem * maxed + head) * meaned + query;
      const float mass = stats[row * 2 + 1];
      const float weight = weight_of(scored(scores[row * blocks + n]), stats[row * 2]);
      share = metal::max(share, mass > 0.0f ? weight / mass : 0.0f);
    }
    mean += share;
  }
  shares[problem * blocks + n] = maxed > 0 ? mean / float(meaned) : scores[problem * blocks + n];
}

// The largest number that as many blocks reach as are wanted, from its highest bit on
uint threshold = 0;
for (int bit = 31; bit >= 0; bit--) {
  const uint least = threshold | (1u << bit);
  uint reached = 0;
  for (int n = begin; n < end; n++) {
    const bool pinned = n < sink || n >= first_recent;
    reached += order_of(shares[problem * blocks + n], n < count, pinned) >= least ? 1u : 0u;
  }
  reached = simd_sum(reached);
  if (lane == 0) {
    sums[simd] = reached;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  reached = 0;
  for (int s = 0; s < SELECT_SIMDS; s++) {
    reached += sums[s];
  }
  threshold = reached >= wanted ? least : threshold;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Blocks above the threshold and at it: in this thread, and in all before it
uint above = 0;
uint equal = 0;
for (int n = begin; n < end; n++) {
  const uint order = order_of(shares[problem * blocks + n], n < count, n < sink || n >= first_recent);
  above += order > threshold ? 1u : 0u;
  equal += order == threshold ? 1u : 0u;
}
uint above_before = simd_prefix_exclusive_sum(above);
uint equal_before = simd_prefix_exclusive_sum(equal);
if (lane == 31) {
  sums[simd] = above_before + above;
  equals[simd] = equal_before + equal;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint above_all = 0;
for (int s = 0; s < SELECT_SIMDS; s++) {
  above_before += s < simd ? sums[s] : 0;
  equal_before += s < simd ? equals[s] : 0;
  above_all += sums[s];
}

const uint spare = wanted - above_all;  // of those at the threshold
for (int n = begin; n < end; n++) {
  const uint order = order_of(shares[problem * blocks + n], n < count, n < sink || n >= first_recent);
  if (order > threshold || (order == threshold && equal_before < spare)) {
    const uint place = above_before + metal::min(equal_before, spare);
    for (int copy = 0; copy < repeat; copy++) {
      chosen[(problem * repeat + copy) * chosen_count + place] = n;
    }
  }
  above_before += order > threshold ? 1u : 0u;
  equal_before += order == threshold ? 1u : 0u;
}
for (int place = int(wanted) + index; place < chosen_count; place += SELECT_THREADS) {
  for (int copy = 0; copy < repeat; copy++) {
    chosen[(problem * repeat + copy) * chosen_count + place] = -1;
  }
}
