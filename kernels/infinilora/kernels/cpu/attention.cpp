// Paged attention: one chunk for each (sequence, key/value head, run of query rows).
#include <cstddef>

#include "kernels.h"
#include "pool.h"

namespace {

constexpr int kQueriesPerChunk = 48;  // rows x heads that share each tile of keys while it is in the first cache

}  // namespace

// A struct, since a call has too many numbers to pass in order. Strides are in floats.
extern "C" struct il_attention {
  const float* q;  // [rows, heads, head_dim], heads contiguous
  const float* k;  // [blocks, block, kv_heads, head_dim], contiguous, as v
  const float* v;
  float* out;                    // [rows, heads, head_dim], contiguous
  const int32_t* block_tables;   // [sequences, max_blocks]
  const int32_t* query_start;    // [sequences + 1]
  const int32_t* context_len;    // [sequences], with the query rows
  int64_t q_row_stride;
  int32_t sequences, max_blocks, block_size, heads, kv_heads, head_dim;
  float scale;
};

extern "C" void il_paged_attention(const il_attention* call) {
  using namespace il;
  const il_attention& c = *call;
  int group = c.heads / c.kv_heads;
  int step = kQueriesPerChunk / group > 0 ? kQueriesPerChunk / group : 1;
  int threads = num_threads();

  auto runs_of = [&](int s) { return (c.query_start[s + 1] - c.query_start[s] + step - 1) / step; };
  int chunks = 0, longest = 0;
  int64_t work = 0;
  for (int s = 0; s < c.sequences; ++s) {
    int rows = c.query_start[s + 1] - c.query_start[s];
    chunks += runs_of(s) * c.kv_heads;
    longest = rows > longest ? rows : longest;
    work += static_cast<int64_t>(rows) * c.context_len[s] * c.heads * c.head_dim;
  }
  int64_t work_floats = (kernels().attention_work_floats((longest < step ? longest : step) * group, c.head_dim) + 15) / 16 * 16;
  size_t map_ints = static_cast<size_t>(c.sequences + 16) / 16 * 16;
  auto* memory = static_cast<float*>(scratch((map_ints + work_floats * threads) * sizeof(float)));
  auto* first = reinterpret_cast<int32_t*>(memory);  // the first chunk of each sequence
  float* works = memory + map_ints;
  for (int s = 0, chunk = 0; s < c.sequences; ++s) {
    first[s] = chunk;
    chunk += runs_of(s) * c.kv_heads;
  }

  const int64_t position_stride = static_cast<int64_t>(c.kv_heads) * c.head_dim;
  auto body = [&](int chunk, int thread) {
    int low = 0, high = c.sequences - 1;
    while (low < high) {
      int middle = (low + high + 1) / 2;
      if (first[middle] <= chunk) low = middle;
      else high = middle - 1;
    }
    int s = low, head = (chunk - first[s]) % c.kv_heads, row = (chunk - first[s]) / c.kv_heads * step;
    int rows = c.query_start[s + 1] - c.query_start[s];
    int64_t at = c.query_start[s] + row, heads_at = static_cast<int64_t>(head) * group * c.head_dim;
    kernels().attention({
        .q = c.q + at * c.q_row_stride + heads_at, .q_row_stride = c.q_row_stride,
        .out = c.out + at * c.heads * c.head_dim + heads_at,
        .out_row_stride = static_cast<int64_t>(c.heads) * c.head_dim,
        .k = c.k + head * c.head_dim, .v = c.v + head * c.head_dim,
        .block_stride = position_stride * c.block_size, .position_stride = position_stride,
        .block_table = c.block_tables + static_cast<int64_t>(s) * c.max_blocks,
        .block_size = c.block_size, .head_dim = c.head_dim, .group = group,
        .rows = rows - row < step ? rows - row : step, .first_position = c.context_len[s] - rows + row,
        .scale = c.scale, .work = works + thread * work_floats});
  };
  if (work < 100000) {
    for (int chunk = 0; chunk < chunks; ++chunk) body(chunk, 0);
    return;
  }
  parallel_chunks(chunks, body);
}
