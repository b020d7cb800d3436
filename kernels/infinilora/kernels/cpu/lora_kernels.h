// Shrink and expand of one adapter's rows. Included once for each instruction set.
//
// Few rows (decode): both read their half of the adapter once, in order, and the rest stays in registers and
// the first cache. Many rows (prefill): register-blocked products; A and Bt stay in the second cache.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

// Rows x ranks in registers: kRowBlock * 4 sums, 4 vectors of A or Bt, kRowBlock of x or coefficients.
#if defined(__AVX512F__)
constexpr int kRowBlock = 4;
constexpr int kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX2__)
constexpr int kRowBlock = 2;
constexpr int kTileRows = 5, kTileVecs = 2;
#else
constexpr int kRowBlock = 2;
constexpr int kTileRows = 4, kTileVecs = 2;
#endif
constexpr int kRankBlock = 4;

// Rows of A and Bt are short, and a stream that has just begun is not yet foreseen by the processor: while some
// rows are read, the next ones are asked for. `next`: those rows, `in` apart; any address is allowed.
template <class W, int Rows, int Ranks>
void shrink_block(const float* const* x, const W* a, int in, const W* next, float* v, int64_t v_stride) {
  vf sums[Rows][Ranks] = {};
  int k = 0;
  for (; k + kW <= in; k += kW) {
    vf xv[Rows];
    IL_UNROLL for (int i = 0; i < Rows; ++i) xv[i] = load(x[i] + k);
    IL_UNROLL for (int r = 0; r < Ranks; ++r) {
      vf av = load(a + static_cast<int64_t>(r) * in + k);
      __builtin_prefetch(next + static_cast<int64_t>(r) * in + k);
      IL_UNROLL for (int i = 0; i < Rows; ++i) sums[i][r] += xv[i] * av;
    }
  }
  if (k < in) {
    IL_UNROLL for (int r = 0; r < Ranks; ++r) {
      vf av = load_first(a + static_cast<int64_t>(r) * in + k, in - k);
      IL_UNROLL for (int i = 0; i < Rows; ++i) sums[i][r] += load_first(x[i] + k, in - k) * av;
    }
  }
  IL_UNROLL for (int i = 0; i < Rows; ++i)
    IL_UNROLL for (int r = 0; r < Ranks; ++r) v[i * v_stride + r] = sum(sums[i][r]);
}

template <class W, int Rows>
void shrink_rows(const ShrinkChunk& c, int row) {
  const W* a = static_cast<const W*>(c.a) + static_cast<int64_t>(c.rank) * c.in;
  float* v = c.v + row * c.v_stride + c.rank;
  int r = 0;
  for (; r + kRankBlock <= c.ranks; r += kRankBlock) {
    const W* block = a + static_cast<int64_t>(r) * c.in;
    bool is_last = r + 2 * kRankBlock > c.ranks;
    const W* next = is_last ? static_cast<const W*>(c.next) : block + kRankBlock * c.in;
    shrink_block<W, Rows, kRankBlock>(c.x + row, block, c.in, next, v + r, c.v_stride);
  }
  for (; r < c.ranks; ++r) {
    const W* one = a + static_cast<int64_t>(r) * c.in;
    shrink_block<W, Rows, 1>(c.x + row, one, c.in, one + c.in, v + r, c.v_stride);
  }
}

template <class W>
void shrink(const ShrinkChunk& c) {
  int row = 0;
  for (; row + kRowBlock <= c.rows; row += kRowBlock) shrink_rows<W, kRowBlock>(c, row);
  if constexpr (kRowBlock > 2) {
    if (c.rows - row == 3) return shrink_rows<W, 3>(c, row);
    if (c.rows - row == 2) return shrink_rows<W, 2>(c, row);
  }
  if (c.rows - row == 1) shrink_rows<W, 1>(c, row);
}

// out[i, columns] (+)= the part of `Ranks` rows of Bt, read side by side along the columns.
template <class W, int Rows, int Ranks>
void add_ranks(const ExpandChunk& c, int row, int rank, bool accumulate) {
  const W* bt = static_cast<const W*>(c.bt) + rank * c.bt_stride + c.column;
  vf scale[Rows][Ranks];
  float* out[Rows];
  IL_UNROLL for (int i = 0; i < Rows; ++i) {
    out[i] = c.out[row + i] + c.out_offset + c.column;
    IL_UNROLL for (int r = 0; r < Ranks; ++r) scale[i][r] = splat(c.v[(row + i) * c.v_stride + rank + r]);
  }
  int n = 0;
  for (; n + kW <= c.columns; n += kW) {
    vf b[Ranks];
    IL_UNROLL for (int r = 0; r < Ranks; ++r) {
      b[r] = load(bt + r * c.bt_stride + n);
      __builtin_prefetch(bt + (r + Ranks) * c.bt_stride + n);
    }
    IL_UNROLL for (int i = 0; i < Rows; ++i) {
      vf y = accumulate ? load(out[i] + n) : vf{};
      IL_UNROLL for (int r = 0; r < Ranks; ++r) y += scale[i][r] * b[r];
      store(out[i] + n, y);
    }
  }
  if (int left = c.columns - n; left > 0) {
    IL_UNROLL for (int i = 0; i < Rows; ++i) {
      vf y = accumulate ? load_first(out[i] + n, left) : vf{};
      IL_UNROLL for (int r = 0; r < Ranks; ++r) y += scale[i][r] * load_first(bt + r * c.bt_stride + n, left);
      store_first(out[i] + n, y, left);
    }
  }
}

template <class W, int Rows>
void expand_rows(const ExpandChunk& c, int row) {
  bool accumulate = c.accumulate;
  int r = 0;
  for (; r + kRankBlock <= c.rank; r += kRankBlock, accumulate = true)
    add_ranks<W, Rows, kRankBlock>(c, row, r, accumulate);
  for (; r < c.rank; ++r, accumulate = true) add_ranks<W, Rows, 1>(c, row, r, accumulate);
}

template <class W, int Rows, int Vecs>
void expand_tile(const ExpandChunk& c, int row, int n) {
  const W* bt = static_cast<const W*>(c.bt) + c.column + n;
  vf sums[Rows][Vecs];
  float* out[Rows];
  IL_UNROLL for (int i = 0; i < Rows; ++i) {
    out[i] = c.out[row + i] + c.out_offset + c.column + n;
    IL_UNROLL for (int j = 0; j < Vecs; ++j) sums[i][j] = c.accumulate ? load(out[i] + j * kW) : vf{};
  }
  for (int r = 0; r < c.rank; ++r) {
    vf b[Vecs];
    IL_UNROLL for (int j = 0; j < Vecs; ++j) b[j] = load(bt + r * c.bt_stride + j * kW);
    IL_UNROLL for (int i = 0; i < Rows; ++i) {
      vf scale = splat(c.v[(row + i) * c.v_stride + r]);
      IL_UNROLL for (int j = 0; j < Vecs; ++j) sums[i][j] += scale * b[j];
    }
  }
  IL_UNROLL for (int i = 0; i < Rows; ++i)
    IL_UNROLL for (int j = 0; j < Vecs; ++j) store(out[i] + j * kW, sums[i][j]);
}

template <class W>
void expand(const ExpandChunk& c) {
  int row = 0, tiled = c.rows / kTileRows * kTileRows;
  if (tiled > 0 && c.rank > 0) {
    ExpandChunk rest = c;  // the columns that fill no tile, of the rows that are tiled
    int n = 0;
    for (; n + kTileVecs * kW <= c.columns; n += kTileVecs * kW)
      for (row = 0; row < tiled; row += kTileRows) expand_tile<W, kTileRows, kTileVecs>(c, row, n);
    rest.column += n;
    rest.columns -= n;
    if (rest.columns > 0)
      for (row = 0; row < tiled; ++row) expand_rows<W, 1>(rest, row);
    row = tiled;
  }
  for (; row + kRowBlock <= c.rows; row += kRowBlock) expand_rows<W, kRowBlock>(c, row);
  if constexpr (kRowBlock > 2) {
    if (c.rows - row == 3) return expand_rows<W, 3>(c, row);
    if (c.rows - row == 2) return expand_rows<W, 2>(c, row);
  }
  if (c.rows - row == 1) expand_rows<W, 1>(c, row);
}

}  // namespace
}  // namespace il
