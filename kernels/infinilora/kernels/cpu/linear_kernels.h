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
  for (int j = 0; j < kVecs; ++j) to[j] = load(w + j * kW);
}

IL_INLINE void load_panel_row(const bf16* w, vf* to) {
  for (int j = 0; j < kVecs / 2; ++j) {
    vu words = load_as<vu>(w + 2 * j * kW);
    to[j] = from_bits(words << 16);
    to[j + kVecs / 2] = from_bits(words & 0xffff0000u);
  }
}

template <class W, int Rows>
void linear_block(const float* x, int64_t x_stride, const W* w, int in, vf (*acc)[kVecs]) {
  // Few rows: several steps at once, each into sums of its own, so that no addition waits for the one before.
  constexpr int kSteps = Rows * kVecs >= 8 ? 1 : 8 / (Rows * kVecs);
  vf sums[kSteps][Rows][kVecs] = {};
  int k = 0;
  for (; k + kSteps <= in; k += kSteps) {
    for (int s = 0; s < kSteps; ++s) {
      vf row[kVecs];
      load_panel_row(w + (k + s) * kPanel, row);
      __builtin_prefetch(w + (k + s) * kPanel + 2048 / sizeof(W));
      for (int r = 0; r < Rows; ++r) {
        vf xv = splat(x[r * x_stride + k + s]);
        for (int j = 0; j < kVecs; ++j) sums[s][r][j] += xv * row[j];
      }
    }
  }
  for (; k < in; ++k) {
    vf row[kVecs];
    load_panel_row(w + k * kPanel, row);
    for (int r = 0; r < Rows; ++r)
      for (int j = 0; j < kVecs; ++j) sums[0][r][j] += splat(x[r * x_stride + k]) * row[j];
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < kVecs; ++j) {
      acc[r][j] = sums[0][r][j];
      for (int s = 1; s < kSteps; ++s) acc[r][j] += sums[s][r][j];
    }
}

IL_INLINE void store_block(const LinearChunk& c, int row, int rows, int column, vf (*acc)[kVecs]) {
  int columns = c.out - column < kPanel ? c.out - column : kPanel;
  for (int r = 0; r < rows; ++r) {
    alignas(64) float whole[kPanel];
    float* y = c.y + (row + r) * c.y_stride + column;
    float* to = columns == kPanel ? y : whole;
    for (int j = 0; j < kVecs; ++j) {
      vf v = acc[r][j];
      if (c.bias != nullptr) {
        int left = columns - j * kW;
        if (left >= kW) v += load(c.bias + column + j * kW);
        else if (left > 0) v += load_first(c.bias + column + j * kW, left);
      }
      store(to + j * kW, v);
    }
    if (to == whole) memcpy(y, whole, static_cast<size_t>(columns) * sizeof(float));
  }
}

template <class W, int Rows = kMaxRows>
IL_INLINE void linear_rows(const LinearChunk& c, int row, int rows, const W* w, int column) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return linear_rows<W, Rows - 1>(c, row, rows, w, column);
  }
  vf acc[Rows][kVecs];
  linear_block<W, Rows>(c.x + row * c.x_stride, c.x_stride, w, c.in, acc);
  store_block(c, row, Rows, column, acc);
}

template <class W>
void linear(const LinearChunk& c) {
  int blocks = (c.rows + kMaxRows - 1) / kMaxRows;
  for (int panel = c.panel; panel < c.panel + c.panels; ++panel) {
    const W* w = static_cast<const W*>(c.packed) + static_cast<int64_t>(panel) * c.in * kPanel;
    for (int b = 0, row = c.row; b < blocks; ++b) {  // blocks of nearly equal height
      int rows = (c.row + c.rows - row) / (blocks - b);
      linear_rows(c, row, rows, w, panel * kPanel);
      row += rows;
    }
  }
}

}  // namespace
}  // namespace il
