// One thread: one byte of a coded row; see the law, "Packing". The tables of segments and of runs follow the numbers.
// x [B, H, N * S, C], positions [B * N, R], order [B, N, H, C], scale, low [B, N, H, Q, C], unit [B, N, H]
// -> codes [B, N, H, R, bytes]
const int heads = params[0];
const int blocks = params[1];
const int size = params[2];
const int dim = params[3];
const int kept = params[4];
const bool every = params[5];
const bool differences = params[6];  // to the anchor
const bool ordered = params[7];
const int row_bytes = params[8];
const int segments = params[9];
const int first_segment = 10;

const int byte = thread_position_in_grid.x;
const int row = thread_position_in_grid.y;
const long place = thread_position_in_grid.z;  // of sequence, block and kv head
const int head = int(place % heads);
const long block = place / heads;  // of all sequences
const long at = ((block / blocks * heads + head) * blocks + block % blocks) * size * dim;
const long row_place = at + row_at(positions, block * kept, every, row, dim);
const int groups = (kept + GROUP - 1) / GROUP;
const long scales = (place * groups + row / GROUP) * dim;
const float whole = two_to(-exponent_of(unit[place]));

int run = first_segment + 2 * segments;
while (byte >= params[run + RUN_FIRST_BYTE] + params[run + RUN_BYTES]) {
  run += RUN_SIZE;
}
const int width = params[run + RUN_WIDTH];
const int left = params[run + RUN_LEFT];
const int first = params[run + RUN_FIRST_CHANNEL];
const int channels = params[run + RUN_CHANNELS];
const float levels = float((1 << bits_of(params, first_segment, segments, first)) - 1);
uint packed = 0;
int shift = 0;
for (int i = byte - params[run + RUN_FIRST_BYTE]; i < channels; i += params[run + RUN_BYTES]) {
  const int stored = first + i;  // place in the stored order
  const int channel = ordered ? int(order[place * dim + stored]) : stored;
  const float anchor = differences ? float(x[at + channel]) : 0.0f;
  const Wide exact = difference(float(x[row_place + channel]), anchor, whole);
  const uint code = uint(code_for(exact, float(low[scales + stored]), float(scale[scales + stored]), levels));
  packed |= ((code >> left) & ((1u << width) - 1u)) << shift;
  shift += width;
}
codes[(place * kept + row) * row_bytes + byte] = uchar(packed);
