// Shrink and expand of one adapter's rows; of a single one: lora_row.h. Included once for each instruction set.
//
// Both read their half of the adapter once, a block of ranks or a panel of columns at a time, and let all rows pass
// over it while it is near. What will be read next is asked for meanwhile, spread over those rows: rows of A and Bt
// are short, and a stream that has just begun is not yet foreseen by the processor. It is asked for as it lies in
// memory, in runs as long as can be, and no faster than it comes: a processor drops what it has no buffer left for.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "lora_row.h"
#include "vec.h"

namespace il {
namespace {

// In registers at once: kRowBlock * kRankBlock sums of shrink, kRowBlock of x, one of A; kTileRows * kTileVecs sums of
// a tile of expand, kTileVecs of Bt, a coefficient; kStreamRows * kRankBlock coefficients of a stream of expand.
#if defined(__AVX512F__)
constexpr int kRowBlock = 4;
constexpr int kTileRows = 6, kTileVecs = 4;
constexpr int kStreamRows = 4;
#elif defined(__AVX2__)
constexpr int kRowBlock = 3;
constexpr int kTileRows = 6, kTileVecs = 2;
constexpr int kStreamRows = 2;
#else
constexpr int kRowBlock = 2;
constexpr int kTileRows = 4, kTileVecs = 2;
constexpr int kStreamRows = 2;
#endif
constexpr int kRankBlock = 4;
// Inputs of a block of ranks that all rows pass over before the next ones; three times as many of 16-bit weights. Of
// 400..2560 the best at 4096 inputs on a Zen 5 core, 2026-11-30.
constexpr int kMostInputs = 768;
constexpr int kTileColumns = kTileVecs * kW;
// From so many rows on expand copies a tile's columns of Bt side by side, widened, before the rows pass over them: as
// they lie, a power of two apart, they share few places of the first cache, and each block of rows would widen them
// again. 1.4 times as fast for 32 rows 4096 wide, slower for 8 (a Zen 3 core, 2026-12-01); unmeasured with AVX-512.
constexpr int kLeastCopied = kW == 8 ? 16 : 1 << 30, kMostCopiedRank = 256;

// f(integral_constant of n), 1 <= n <= Most.
template <int Most, class F>
IL_INLINE void with_count(int n, const F& f) {
  if constexpr (Most > 1) {
    if (n < Most) return with_count<Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>{});
}

// What is asked for at once goes into the first cache; more than that only into the second, or it would push out more
// useful lines and take all buffers. Of 0, 4, 6, 10 and 16 KiB of 32 the best on a Zen 4 core, 2026-12-01.
const int kMostFirstBytes = first_cache_bytes() * 3 / 16;

// Asks for the lines of a region, row after row.
class Fetcher {
 public:
  explicit Fetcher(const Region& r)
      : at_(static_cast<const char*>(r.start)), end_(at_ + r.row_bytes), stride_(r.stride),
        gap_(r.stride - lines_of(r) * 64), lines_(r.rows * lines_of(r)), is_small_(lines_ * 64 <= kMostFirstBytes) {}

  // How many to take at each of so many steps.
  int each(int steps) const { return steps == 0 ? 0 : (lines_ + steps - 1) / steps; }

  IL_INLINE void take(int count) {
    for (; count > 0 && lines_ > 0; --count, --lines_) {
      if (is_small_) __builtin_prefetch(at_);
      else __builtin_prefetch(at_, 0, kSecondCache);
      at_ += 64;
      if (at_ >= end_) {
        at_ += gap_;
        end_ += stride_;
      }
    }
  }

 private:
  static int lines_of(const Region& r) { return (r.row_bytes + 63) / 64; }

  const char *at_, *end_;
  int64_t stride_, gap_;
  int lines_;
  bool is_small_;
};

IL_INLINE int least(int a, int b) { return a < b ? a : b; }
IL_INLINE int parts_of(int n, int most) { return (n + most - 1) / most; }

// to[i] (+)= the sum of of[i], for one vector or kRankBlock of them; destroys them.
template <int Count>
IL_INLINE void store_sums(vf* of, float* to, bool add) {
  if constexpr (Count == 1) {
    to[0] = sum(of[0]) + (add ? to[0] : 0);
  } else {
    sum_each<Count>(of);
    if constexpr (kW > Count) of[0] += shuffle(of[0], of[0], Across<Count>{}, Lanes{});
    if constexpr (kW > 2 * Count) of[0] += shuffle(of[0], of[0], Across<2 * Count>{}, Lanes{});
    IL_UNROLL for (int i = 0; i < Count; ++i) to[i] = add ? to[i] + of[0][i] : of[0][i];
  }
}

// v[i, Ranks] (+)= x[i][first..end) . a[Ranks], rows of a a_stride apart; `lines` of what comes next at each step.
// With `Ahead`, also the same inputs of the rows behind these.
template <class W, int Rows, int Ranks, bool Ahead>
void shrink_block(const ShrinkChunk& c, int row, int rank, int first, int end, Fetcher& next, int lines) {
  const W* a = static_cast<const W*>(c.a) + rank * c.a_stride;
  const float *x[Rows], *behind[Rows];
  IL_UNROLL for (int i = 0; i < Rows; ++i) {
    x[i] = c.x[row + i];
    behind[i] = c.x[least(row + Rows + i, c.rows - 1)];
  }
  vf sums[Rows][Ranks] = {};
  int k = first;
  for (; k + kW <= end; k += kW) {
    next.take(lines);
    vf xv[Rows];
    IL_UNROLL for (int i = 0; i < Rows; ++i) xv[i] = load(x[i] + k);
    if constexpr (Ahead) {
      IL_UNROLL for (int i = 0; i < Rows; ++i) __builtin_prefetch(behind[i] + k);
    }
    IL_UNROLL for (int r = 0; r < Ranks; ++r) {
      vf av = load(a + r * c.a_stride + k);
      IL_UNROLL for (int i = 0; i < Rows; ++i) sums[i][r] += xv[i] * av;
    }
  }
  if (k < end) {
    IL_UNROLL for (int r = 0; r < Ranks; ++r) {
      vf av = load_first(a + r * c.a_stride + k, end - k);
      IL_UNROLL for (int i = 0; i < Rows; ++i) sums[i][r] += load_first(x[i] + k, end - k) * av;
    }
  }
  float* v = c.v + row * c.v_stride + rank;
  IL_UNROLL for (int i = 0; i < Rows; ++i) store_sums<Ranks>(sums[i], v + i * c.v_stride, first > 0);
}

// Ranks that are taken at once from `rank` on: kRankBlock, or one of the last few.
IL_INLINE int ranks_from(int rank, int end) { return end - rank >= kRankBlock ? kRankBlock : 1; }

// All rows pass over ranks [rank, rank + ranks) of inputs [first, end).
template <class W, int Ranks>
void shrink_ranks(const ShrinkChunk& c, int rank, int first, int end, const Region& after) {
  Fetcher next(after);
  int blocks = parts_of(c.rows, kRowBlock), lines = next.each(blocks * ((end - first) / kW));
  for (int b = 0; b < blocks; ++b) {
    int row = c.rows * b / blocks;
    with_count<kRowBlock>(c.rows * (b + 1) / blocks - row, [&](auto rows) {
      // x comes from another core's cache: only the first ranks find the rows behind unread.
      const bool is_unread = rank == c.rank && b + 1 < blocks;
      if (is_unread) shrink_block<W, rows.value, Ranks, true>(c, row, rank, first, end, next, lines);
      else shrink_block<W, rows.value, Ranks, false>(c, row, rank, first, end, next, lines);
    });
  }
}

template <class W>
void shrink(const ShrinkChunk& c) {
  if (c.rows == 1) return shrink_row<W>(c);
  constexpr int kMost = sizeof(W) == 4 ? kMostInputs : 3 * kMostInputs;
  const int end_rank = c.rank + c.ranks;
  const int panel = parts_of(parts_of(c.in, parts_of(c.in, kMost)), 64) * 64;
  auto block = [&](int rank, int first) {
    return Region{static_cast<const W*>(c.a) + rank * c.a_stride + first,
                  static_cast<int64_t>(c.a_stride * sizeof(W)), ranks_from(rank, end_rank),
                  static_cast<int32_t>(least(panel, c.in - first) * sizeof(W))};
  };
  for (int first = 0, end; first < c.in; first = end) {
    end = least(first + panel, c.in);
    for (int rank = c.rank, ranks; rank < end_rank; rank += ranks) {
      ranks = ranks_from(rank, end_rank);
      bool is_last = rank + ranks == end_rank;
      Region after = !is_last ? block(rank + ranks, first) : end < c.in ? block(c.rank, end) : c.next;
      if (ranks == 1) shrink_ranks<W, 1>(c, rank, first, end, after);
      else shrink_ranks<W, kRankBlock>(c, rank, first, end, after);
    }
  }
}

// out[i, columns] (+)= the part of `Ranks` rows of Bt, read side by side along the columns.
template <class W, int Rows, int Ranks>
void add_ranks(const ExpandChunk& c, int row, int rank, bool accumulate, Fetcher& next, int lines) {
  const W* bt = static_cast<const W*>(c.bt) + rank * c.bt_stride + c.column;
  vf scale[Rows][Ranks];
  float* out[Rows];
  IL_UNROLL for (int i = 0; i < Rows; ++i) {
    out[i] = c.out[row + i] + c.out_offset + c.column;
    IL_UNROLL for (int r = 0; r < Ranks; ++r) scale[i][r] = splat(c.v[(row + i) * c.v_stride + rank + r]);
  }
  int n = 0;
  for (; n + kW <= c.columns; n += kW) {
    next.take(lines);
    vf b[Ranks];
    IL_UNROLL for (int r = 0; r < Ranks; ++r) b[r] = load(bt + r * c.bt_stride + n);
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

// Few rows: a block of ranks after the other, along all columns.
template <class W>
void expand_stream(const ExpandChunk& c) {
  int blocks = parts_of(c.rows, kStreamRows), steps = blocks * (c.columns / kW);
  for (int rank = 0, ranks; rank < c.rank; rank += ranks) {
    ranks = ranks_from(rank, c.rank);
    int after = rank + ranks;
    Region block{static_cast<const W*>(c.bt) + after * c.bt_stride + c.column,
                 static_cast<int64_t>(c.bt_stride * sizeof(W)), ranks_from(after, c.rank),
                 static_cast<int32_t>(c.columns * sizeof(W))};
    Fetcher next(after < c.rank ? block : c.next);
    int lines = next.each(steps);
    bool accumulate = c.accumulate || rank > 0;
    for (int b = 0; b < blocks; ++b) {
      int row = c.rows * b / blocks;
      with_count<kStreamRows>(c.rows * (b + 1) / blocks - row, [&](auto rows) {
        if (ranks == kRankBlock) add_ranks<W, rows.value, kRankBlock>(c, row, rank, accumulate, next, lines);
        else add_ranks<W, rows.value, 1>(c, row, rank, accumulate, next, lines);
      });
    }
  }
}

// out[i, a tile's columns from n on] (+)= all ranks, of which bt holds these columns; `lines` of what comes next at
// each of them.
template <class W, int Rows>
void expand_tile(const ExpandChunk& c, const W* bt, int64_t bt_stride, int row, int n, Fetcher& next, int lines) {
  vf sums[Rows][kTileVecs];
  float* out[Rows];
  IL_UNROLL for (int i = 0; i < Rows; ++i) {
    out[i] = c.out[row + i] + c.out_offset + c.column + n;
    IL_UNROLL for (int j = 0; j < kTileVecs; ++j) sums[i][j] = c.accumulate ? load(out[i] + j * kW) : vf{};
  }
  // Written at the end, when the lines have come from the last cache.
  IL_UNROLL for (int i = 0; i < Rows; ++i)
    IL_UNROLL for (int j = 0; j < kTileColumns; j += 16) __builtin_prefetch(out[i] + j, 1);
  const float* v = c.v + row * c.v_stride;
  for (int r = 0; r < c.rank; ++r) {
    next.take(lines);
    vf b[kTileVecs];
    IL_UNROLL for (int j = 0; j < kTileVecs; ++j) b[j] = load(bt + r * bt_stride + j * kW);
    IL_UNROLL for (int i = 0; i < Rows; ++i) {
      vf scale = splat(v[i * c.v_stride + r]);
      IL_UNROLL for (int j = 0; j < kTileVecs; ++j) sums[i][j] += scale * b[j];
    }
  }
  IL_UNROLL for (int i = 0; i < Rows; ++i)
    IL_UNROLL for (int j = 0; j < kTileVecs; ++j) store(out[i] + j * kW, sums[i][j]);
}

// All rows over a tile.
template <class W>
void expand_rows(const ExpandChunk& c, const W* bt, int64_t bt_stride, int n, Fetcher& next, int lines) {
  const int blocks = parts_of(c.rows, kTileRows);
  for (int b = 0; b < blocks; ++b) {
    int row = c.rows * b / blocks;
    with_count<kTileRows>(c.rows * (b + 1) / blocks - row,
                          [&](auto rows) { expand_tile<W, rows.value>(c, bt, bt_stride, row, n, next, lines); });
  }
}

// All rows over the tiles of columns [n, end).
template <class W>
void expand_panel(const ExpandChunk& c, int n, int end, const Region& after) {
  Fetcher next(after);
  const int lines = next.each(parts_of(c.rows, kTileRows) * c.rank * ((end - n) / kTileColumns));
  const W* bt = static_cast<const W*>(c.bt) + c.column;
  if (c.rows < kLeastCopied || c.rank > kMostCopiedRank) {
    for (; n < end; n += kTileColumns) expand_rows(c, bt + n, c.bt_stride, n, next, lines);
    return;
  }
  alignas(64) float tile[kMostCopiedRank * kTileColumns];
  for (; n < end; n += kTileColumns) {
    for (int r = 0; r < c.rank; ++r)
      IL_UNROLL for (int j = 0; j < kTileColumns; j += kW)
        store(tile + r * kTileColumns + j, load(bt + r * c.bt_stride + n + j));
    expand_rows(c, static_cast<const float*>(tile), kTileColumns, n, next, lines);
  }
}

template <class W>
void expand(const ExpandChunk& c) {
  if (c.rows == 1) return expand_row<W>(c);
  if (c.rows < kLeastTiled) return expand_stream<W>(c);
  constexpr int kColumns = kPanelBytes / sizeof(W);
  const int tiled = c.columns / kTileColumns * kTileColumns;
  const W* bt = static_cast<const W*>(c.bt) + c.column;
  for (int n = 0, end; n < tiled; n = end) {
    end = least(n + kColumns, tiled);
    int bytes = static_cast<int>(least(kColumns, c.columns - end) * sizeof(W));
    Region ahead{bt + end, static_cast<int64_t>(c.bt_stride * sizeof(W)), c.rank, bytes};
    expand_panel<W>(c, n, end, end < tiled ? ahead : c.next);
  }
  if (tiled == c.columns) return;
  ExpandChunk rest = c;  // the columns that fill no tile
  rest.column += tiled;
  rest.columns -= tiled;
  expand_stream<W>(rest);
}

}  // namespace
}  // namespace il
