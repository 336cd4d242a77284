// One threadgroup: the tokens of one block with the highest scores, the anchor left out, ties to the lowest; a thread
// has a token. A score is the mean over heads of `apart`, times the token's weight.
// apart [B * N, H, S], weight [B * N, S] -> positions [B * N, R], ascending
const int heads = params[0];
const int size = params[1];
const int kept = params[2];
const bool weighted = params[3];

threadgroup float scores[256];
threadgroup uchar chosen[256];

const int token = thread_index_in_threadgroup;
const long block = threadgroup_position_in_grid.x;  // of all sequences

float score = 0.0f;
if (token < size) {
  Wide sum = Wide{0.0f, 0.0f};
  for (int head = 0; head < heads; head++) {
    sum = plus(sum, Wide{apart[(block * heads + head) * size + token], 0.0f});
  }
  sum = over(sum, Wide{4.0f * float(heads), 0.0f});  // a quarter: no weight takes it beyond any float
  score = weighted ? times(sum, Wide{float(weight[block * size + token]), 0.0f}).high : sum.high;
  scores[token] = score;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
bool own = token > 0 && token < size;
if (own) {
  int before = 0;
  for (int other = 1; other < size; other++) {
    before += scores[other] > score || (scores[other] == score && other < token) ? 1 : 0;
  }
  own = before < kept;
}
chosen[token] = own ? 1 : 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (own) {
  int place = 0;
  for (int other = 0; other < token; other++) {
    place += chosen[other];
  }
  positions[block * kept + place] = uchar(token);
}
