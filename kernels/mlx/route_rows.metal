// One simd-group: peak and sum of weights of one row of scores, over the valid blocks. NaN counts as -inf, and each
// +inf weighs 1.
// scores [rows, N], block_counts [B] -> stats [rows, 2]
const long rows = sizes[0];
const int blocks = sizes[1];
const bool counted = sizes[2];
const long per_sequence = sizes[3];  // rows
const int lane = thread_index_in_simdgroup;
const long row = thread_position_in_grid.y;
const int count = counted ? metal::min(int(block_counts[row / per_sequence]), blocks) : blocks;

float peak = -INFINITY;
for (int n = lane; n < count; n += 32) {
  peak = metal::max(peak, scored(scores[row * blocks + n]));
}
peak = simd_max(peak);
float mass = 0.0f;
for (int n = lane; n < count; n += 32) {
  mass += weight_of(scored(scores[row * blocks + n]), peak);
}
mass = simd_sum(mass);
if (lane == 0) {
  stats[row * 2] = peak;
  stats[row * 2 + 1] = mass;
}
