// One thread: one number of out. sizes: parts, rows, columns.
// outs [parts, rows, columns], lses [parts, rows] -> out [rows, columns], lse [rows]
const int parts = sizes[0];
const long rows = sizes[1];
const long columns = sizes[2];
const long column = thread_position_in_grid.x;
const long row = thread_position_in_grid.y;

float peak = -INFINITY;
for (int part = 0; part < parts; part++) {
  const float one = lses[part * rows + row];
  peak = one == INFINITY ? peak : metal::max(peak, one);  // drops NaN, which reaches the sum below
}
const float base = peak == -INFINITY ? 0.0f : peak;

float total = 0.0f;
for (int part = 0; part < parts; part++) {
  const float one = lses[part * rows + row];
  total += metal::precise::exp((one == INFINITY ? -INFINITY : one) - base);
}
const bool empty = total == 0.0f;
const float whole = empty ? 1.0f : total;

float joined = -0.0f;  // adds nothing to -0, which one state alone gives back
for (int part = 0; part < parts; part++) {
  const float one = lses[part * rows + row];
  const float weight = metal::precise::exp((one == INFINITY ? -INFINITY : one) - base) / whole;  // no sum overflows
  // an empty state may hold anything
  joined += weight == 0.0f ? -0.0f : weight * float(outs[(part * rows + row) * columns + column]);
}
out[row * columns + column] = saturated<T>(empty ? 0.0f : joined);
if (column == 0) {
  lse[row] = empty ? -INFINITY : base + metal::precise::log(whole);
}
