// One simd-group: the bound of the logits of one block for ROWS rows of queries of one kv head.
// q [B, H * G * Sq, D], k_min and k_max [B, N, H, D] -> scores [B, H, G * Sq, N]
const int heads = sizes[0];
const int rows = sizes[1];  // G * Sq
const int dim = sizes[2];
const int blocks = sizes[3];
const bool counted = sizes[4];
const float sm_scale = as_type<float>(sizes[5]);
const int lane = thread_index_in_simdgroup;
const int block = thread_position_in_grid.y;
const int tiles = (rows + ROWS - 1) / ROWS;
const long pair = thread_position_in_grid.z / tiles;  // of sequence and kv head
const int first = thread_position_in_grid.z % tiles * ROWS;  // of the rows of queries
const int sequence = int(pair / heads);
const int head = int(pair % heads);
const bool valid = !counted || block < int(block_counts[sequence]);
const long at = ((long(sequence) * blocks + block) * heads + head) * dim;

for (int m = 0; m < metal::min(ROWS, rows - first); m++) {
  const long query = pair * rows + first + m;
  float bound = 0.0f;
  if (valid) {
    for (int d = lane; d < dim; d += 32) {
      const float x = float(q[query * dim + d]);
      const float low = x * float(k_min[at + d]);
      const float high = x * float(k_max[at + d]);
      bound += low > high ? low : high;
    }
    bound = simd_sum(bound);
  }
  if (lane == 0) {
    scores[query * blocks + block] = valid ? bound * sm_scale : -INFINITY;
  }
}
