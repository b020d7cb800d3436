// Shrink and expand of an adapter with one row, as most have at decode.
//
// Nothing of the weights is used twice, so they are read as they lie, one rank after the other, and asked for a fixed
// distance ahead. Where memory is slower than that, the reader waits and asks for no more meanwhile: a processor that
// is asked for more than it has buffers for drops what it is asked for. It comes into the second cache: the first has
// few such buffers, and a core took twice as long for 16-bit weights as without asking (a Zen 4 core, 2026-12-01).
#pragma once

#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

// Vectors of weights between two questions: whole lines of 16-bit weights, and sums that do not wait for one another.
constexpr int kRowVecs = kW >= 8 ? 4 : 8;

// Asks for the lines of a region kAheadBytes before they are read, then for those of what is read next. Its first
// bytes were asked for by whoever was told that it comes next.
class Ahead {
 public:
  Ahead(const Region& now, const Region& next) : next_(next) {
    enter(now);
    if (kAheadBytes >= rows_ * row_bytes_) {
      rows_ = 0;  // all of it was asked for
    } else {
      begin_row(kAheadBytes / row_bytes_);
      at_ += kAheadBytes % row_bytes_ / 64 * 64;
    }
  }

  template <int Lines>
  IL_INLINE void take() {
    if (__builtin_expect(end_ - at_ < Lines * 64, 0)) return take_over_an_end(Lines);
    IL_UNROLL for (int i = 0; i < Lines; ++i) __builtin_prefetch(at_ + i * 64, 0, kSecondCache);
    at_ += Lines * 64;
  }

 private:
  // Rows that lie end to end are one.
  void enter(const Region& r) {
    const bool is_one = r.stride == r.row_bytes;
    start_ = at_ = end_ = static_cast<const char*>(r.start);
    stride_ = r.stride;
    rows_ = is_one ? 1 : r.rows;
    row_bytes_ = is_one ? static_cast<int64_t>(r.rows) * r.row_bytes : r.row_bytes;
  }

  // Passes over `skipped` rows to the start of another.
  void begin_row(int64_t skipped) {
    at_ = start_ + skipped * stride_;
    end_ = at_ + row_bytes_;
    start_ = at_ + stride_;
    rows_ -= static_cast<int>(skipped) + 1;
  }

  void take_over_an_end(int lines) {
    for (; lines > 0; --lines, at_ += 64) {
      if (at_ >= end_) {
        if (rows_ == 0) {
          if (next_.rows == 0) return;
          enter(next_);
          next_.rows = 0;
        }
        begin_row(0);
      }
      __builtin_prefetch(at_, 0, kSecondCache);
    }
  }

  const char *at_, *end_;
  const char* start_;  // of the row after this
  int64_t stride_, row_bytes_;
  int rows_;  // after this
  Region next_;
};

// v[rank] = x . a[rank], for ranks [c.rank, c.rank + c.ranks).
template <class W>
void shrink_row(const ShrinkChunk& c) {
  constexpr int kStep = kRowVecs * kW, kLines = kStep * sizeof(W) / 64;
  const float* x = c.x[0];
  const W* a = static_cast<const W*>(c.a) + c.rank * c.a_stride;
  const int64_t in = c.in, width = sizeof(W);
  Ahead ahead({a, c.a_stride * width, c.ranks, static_cast<int32_t>(in * width)}, c.next);
  for (int r = 0; r < c.ranks; ++r, a += c.a_stride) {
    vf sums[kRowVecs] = {};
    int64_t k = 0;
    for (; k + kStep <= in; k += kStep) {
      ahead.take<kLines>();
      IL_UNROLL for (int j = 0; j < kRowVecs; ++j) sums[j] += load(x + k + j * kW) * load(a + k + j * kW);
    }
    if (k < in) ahead.take<kLines>();
    for (; k + kW <= in; k += kW) sums[0] += load(x + k) * load(a + k);
    if (int left = static_cast<int>(in - k); left > 0) sums[1] += load_first(x + k, left) * load_first(a + k, left);
    IL_UNROLL for (int j = 1; j < kRowVecs; ++j) sums[0] += sums[j];
    c.v[c.rank + r] = sum(sums[0]);
  }
}

// out[columns] (+)= v[rank] * bt[rank, columns].
template <class W, bool Add>
void add_rank(const ExpandChunk& c, int rank, Ahead& ahead) {
  constexpr int kStep = kRowVecs * kW, kLines = kStep * sizeof(W) / 64;
  const W* bt = static_cast<const W*>(c.bt) + rank * c.bt_stride + c.column;
  float* out = c.out[0] + c.out_offset + c.column;
  const vf scale = splat(c.v[rank]);
  const int64_t columns = c.columns;
  auto add = [&](int64_t n) __attribute__((always_inline)) {
    store(out + n, (Add ? load(out + n) : vf{}) + scale * load(bt + n));
  };
  int64_t n = 0;
  for (; n + kStep <= columns; n += kStep) {
    ahead.take<kLines>();
    IL_UNROLL for (int j = 0; j < kRowVecs; ++j) add(n + j * kW);
  }
  if (n < columns) ahead.take<kLines>();
  for (; n + kW <= columns; n += kW) add(n);
  if (int left = static_cast<int>(columns - n); left > 0)
    store_first(out + n, (Add ? load_first(out + n, left) : vf{}) + scale * load_first(bt + n, left), left);
}

template <class W>
void expand_row(const ExpandChunk& c) {
  const int64_t width = sizeof(W);
  Ahead ahead({static_cast<const W*>(c.bt) + c.column, c.bt_stride * width, c.rank,
               static_cast<int32_t>(c.columns * width)}, c.next);
  for (int rank = 0; rank < c.rank; ++rank) {
    if (c.accumulate || rank > 0) add_rank<W, true>(c, rank, ahead);
    else add_rank<W, false>(c, rank, ahead);
  }
}

}  // namespace
}  // namespace il
