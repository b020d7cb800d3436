// Register-blocked products with a packed weight. Included once for each instruction set.
//
//   packed weight, panel by panel:   fp32   [panel][in][32]
//                                    bf16   [panel][in][16 words]   word j: output j low, output j + 16 high
//
// so that one step over `in` reads the panel in order, and a word yields two floats by a shift and a mask.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

constexpr int kVecs = kPanel / kW;  // vectors in a row of a panel
// Best of 512..1024 and 32..192 steps on a Sapphire Rapids core, 2026-11-30.
constexpr int kRun = 768;   // steps of a panel that all rows pass over before the next ones
constexpr int kAhead = 96;  // steps: how far ahead weights are fetched that are read once only

// Rows in registers at once: kVecs * rows accumulators, and room for a weight and an activation.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;
#elif defined(__aarch64__)
constexpr int kMaxRows = 3;
#else
constexpr int kMaxRows = 1;
#endif

IL_INLINE void load_panel_row(const float* w, vf* to) {
  IL_UNROLL for (int j = 0; j < kVecs; ++j) to[j] = load(w + j * kW);
}

IL_INLINE void load_panel_row(const bf16* w, vf* to) {
  IL_UNROLL for (int j = 0; j < kVecs / 2; ++j) {
    vu words = load_as<vu>(w + 2 * j * kW);
    to[j] = from_bits(words << 16);
    to[j + kVecs / 2] = from_bits(words & 0xffff0000u);
  }
}

// Some steps of a panel, and where the weights lie that will be wanted next: step i fetches what is there from
// byte i * next_bytes on.
template <class W>
struct Steps {
  static constexpr int kBytes = kPanel * sizeof(W);  // of one step
  const W* w;
  int first, count;
  const char* next;
  int64_t next_bytes;
};

template <class W, int Rows>
IL_INLINE void linear_block(const float* x, int64_t x_stride, const Steps<W>& s, vf (*acc)[kVecs]) {
  // Few rows: several steps at once, each into sums of its own, so that no addition waits for the one before.
  constexpr int kUnroll = Rows * kVecs >= 8 ? 1 : 8 / (Rows * kVecs);
  vf sums[kUnroll][Rows][kVecs] = {};
  IL_UNROLL for (int r = 0; r < Rows; ++r)
    IL_UNROLL for (int j = 0; j < kVecs; ++j) sums[0][r][j] = acc[r][j];
  int k = 0;
  for (; k + kUnroll <= s.count; k += kUnroll) {
    IL_UNROLL for (int u = 0; u < kUnroll; ++u) {
      vf row[kVecs];
      load_panel_row(s.w + (k + u) * kPanel, row);
      IL_UNROLL for (int line = 0; line < Steps<W>::kBytes; line += 64)
        __builtin_prefetch(s.next + (k + u) * s.next_bytes + line);
      IL_UNROLL for (int r = 0; r < Rows; ++r) {
        vf xv = splat(x[r * x_stride + k + u]);
        IL_UNROLL for (int j = 0; j < kVecs; ++j) sums[u][r][j] += xv * row[j];
      }
    }
  }
  for (; k < s.count; ++k) {
    vf row[kVecs];
    load_panel_row(s.w + k * kPanel, row);
    IL_UNROLL for (int r = 0; r < Rows; ++r)
      IL_UNROLL for (int j = 0; j < kVecs; ++j) sums[0][r][j] += splat(x[r * x_stride + k]) * row[j];
  }
  IL_UNROLL for (int r = 0; r < Rows; ++r)
    IL_UNROLL for (int j = 0; j < kVecs; ++j) {
      acc[r][j] = sums[0][r][j];
      IL_UNROLL for (int u = 1; u < kUnroll; ++u) acc[r][j] += sums[u][r][j];
    }
}

// The sums of one row of a panel so far: what was stored, or the bias at the beginning.
IL_INLINE void start_row(const LinearChunk& c, const float* y, int column, int columns, bool is_first, vf* acc) {
  const float* from = is_first ? (c.bias == nullptr ? nullptr : c.bias + column) : y;
  IL_UNROLL for (int j = 0; j < kVecs; ++j) {
    int left = columns - j * kW;
    if (from == nullptr || left <= 0) acc[j] = vf{};
    else acc[j] = left >= kW ? load(from + j * kW) : load_first(from + j * kW, left);
  }
}

IL_INLINE void store_row(float* y, int columns, const vf* acc) {
  IL_UNROLL for (int j = 0; j < kVecs; ++j) {
    int left = columns - j * kW;
    if (left >= kW) store(y + j * kW, acc[j]);
    else if (left > 0) store_first(y + j * kW, acc[j], left);
  }
}

template <class W, int Rows = kMaxRows>
void linear_rows(const LinearChunk& c, int row, int rows, int column, const Steps<W>& s) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return linear_rows<W, Rows - 1>(c, row, rows, column, s);
  }
  vf acc[Rows][kVecs];
  float* y = c.y + row * c.y_stride + column;
  int columns = c.out - column < kPanel ? c.out - column : kPanel;
  IL_UNROLL for (int r = 0; r < Rows; ++r) start_row(c, y + r * c.y_stride, column, columns, s.first == 0, acc[r]);
  linear_block<W, Rows>(c.x + row * c.x_stride + s.first, c.x_stride, s, acc);
  IL_UNROLL for (int r = 0; r < Rows; ++r) store_row(y + r * c.y_stride, columns, acc[r]);
}

// A run of steps short enough that its weights stay near while all row blocks pass over them; meanwhile the
// next run's are fetched, so that memory and arithmetic overlap.
template <class W>
void linear(const LinearChunk& c) {
  constexpr int kBytes = Steps<W>::kBytes;
  const int blocks = (c.rows + kMaxRows - 1) / kMaxRows, runs = (c.in + kRun - 1) / kRun;
  const W* packed = static_cast<const W*>(c.packed);
  for (int panel = c.panel; panel < c.panel + c.panels; ++panel) {
    for (int run = 0, first = 0; run < runs; ++run) {  // runs and blocks of nearly equal size
      const int count = (c.in - first) / (runs - run);
      const W* w = packed + (static_cast<int64_t>(panel) * c.in + first) * kPanel;
      for (int b = 0, row = c.row; b < blocks; ++b) {
        const int rows = (c.row + c.rows - row) / (blocks - b);
        Steps<W> steps = {w, first, count, reinterpret_cast<const char*>(w + kAhead * kPanel), kBytes};
        if (blocks > 1) {  // each block fetches its share of the next run, evenly over its steps
          const int64_t share = (kBytes + blocks - 1) / blocks;
          steps.next = reinterpret_cast<const char*>(w + count * kPanel) + b * share * count;
          steps.next_bytes = share;
        }
        linear_rows<W>(c, row, rows, panel * kPanel, steps);
        row += rows;
      }
      first += count;
    }
  }
}

}  // namespace
}  // namespace il
