// What each instruction set implements, and who chooses. A chunk function does one chunk of a parallel job;
// how jobs are cut is the same for all (linear.cpp, lora_groups.h, attention.cpp, elementwise.cpp).
#pragma once

#include <cstdint>

namespace il {

enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr int kPanel = 32;  // outputs in a packed panel, whatever the instruction set

// y[t, panel columns] = x[t] . w + bias, for rows [row, row + rows) and panels [panel, panel + panels).
struct LinearChunk {
  const float* x;
  int64_t x_stride;
  const void* packed;
  const float* bias;  // or null
  float* y;
  int64_t y_stride;
  int32_t in, out;
  int32_t row, rows, panel, panels;
};

// Memory that is read soon: `rows` runs of row_bytes, `stride` bytes apart. Any address is allowed.
struct Region {
  const void* start;
  int64_t stride;
  int32_t rows, row_bytes;
};

// Rows from which on expand reads Bt in panels of columns, so many bytes of each of its rows; fewer read it by rows.
// The next panel is asked for meanwhile.
constexpr int kLeastTiled = 5, kPanelBytes = 512;  // of 5, 9, 17 and 256..2048, the best on a Zen 5 core, 2026-12-01

// So long before their turn the weights of a single row are asked for. Of 2048..16384 the best on a Zen 5 core,
// 2026-12-01.
constexpr int kAheadBytes = 8192;
constexpr int kSecondCache = 2;  // as __builtin_prefetch counts

// A core's nearest cache for data; 32 KiB where nobody says.
int first_cache_bytes();

// v[i, rank] = x[i] . a[rank], for rows [0, rows) and ranks [rank, rank + ranks).
struct ShrinkChunk {
  const float* const* x;  // one pointer for each row
  const void* a;          // [r, in], rows a_stride elements apart
  float* v;
  int64_t a_stride, v_stride;
  int32_t in;
  int32_t rows, rank, ranks;
  Region next;            // asked for while the last of A is worked on
};

// out[i, c] (+)= sum over ranks of v[i, rank] * bt[rank, c], for rows [0, rows), c in [column, column + columns).
struct ExpandChunk {
  const float* v;
  int64_t v_stride;
  const void* bt;        // [r, bt_stride]
  float* const* out;     // one pointer for each row, all different
  int64_t bt_stride;
  int32_t out_offset;    // where column 0 of bt belongs in a row
  int32_t rank;
  int32_t rows, column, columns;
  bool accumulate;
  Region next;           // asked for while the last of Bt is worked on
};

// One run of query rows of one sequence against one key/value head.
struct AttentionChunk {
  const float* q;        // row 0, first query head of this key/value head
  int64_t q_row_stride;  // heads lie head_dim apart
  float* out;
  int64_t out_row_stride;
  const float* k;  // cache, at this key/value head
  const float* v;
  int64_t block_stride, position_stride;
  const int32_t* block_table;
  int32_t block_size, head_dim, group, rows;
  int32_t first_position;  // of row 0: it sees positions 0..first_position
  float scale;
  float* work;             // attention_work_floats(rows * group, head_dim) of them
};

struct Kernels {
  const char* name;
  void (*linear[2])(const LinearChunk&);        // by Dtype: fp32, bf16
  void (*shrink[3])(const ShrinkChunk&);        // by Dtype
  void (*expand[3])(const ExpandChunk&);
  int64_t (*attention_work_floats)(int queries, int head_dim);
  void (*attention)(const AttentionChunk&);
  void (*rms_norm)(const float* x, float* residual, const float* weight, float eps, float* y, int n);
  void (*silu_mul)(const float* gate, const float* up, float* y, int n);
  void (*rope)(float* head, const float* cos, const float* sin, int half);
  float (*read_all)(const float* x, int64_t n);
  float (*multiply_add)(int64_t steps, float by);
  int64_t (*multiply_add_flops)(int64_t steps);
};

// The strongest set of this processor, no stronger than the limit.
const Kernels& kernels();

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace il
