// Groups of rows that share one A and one Bt, and how their work is cut into chunks.
//
// Groups that write apart from one another run shrink and expand in one chunk, no barrier: the usual case of
// many adapters with few rows each. A group too big for that is cut along its rows, or, with few rows, along
// its ranks in a first job and its columns in a second. Where groups meet in one row of the output (the
// experts of one token), the second job is cut by segment and columns, and nobody shares a cell.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace il {
namespace {

struct Group {
  const void* a;          // [rank, in]
  const void* bt;         // [rank, columns], bt_stride apart
  const float* bias;      // [columns] or null
  const float* const* x;  // [rows]
  float* const* out;      // [rows]
  const float* weight;    // [rows] or null: router weights
  float* v;               // [rows, rank]
  int64_t bt_stride;
  int32_t dtype, in, rank, columns, out_offset, rows, segment;
  float scale;

  int64_t work() const { return static_cast<int64_t>(rank) * (in + columns) * rows; }  // multiply-adds
};

constexpr int kRowChunk = 48;           // rows of a prefill that one chunk takes
constexpr int64_t kAloneWork = 100000;  // multiply-adds that are over before another thread has woken
constexpr int kChunksPerThread = 6;     // enough that the last one to finish is not waited for long
constexpr int kColumnStep = 64, kRankStep = 4;

int min(int a, int b) { return a < b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }
int ceil_div(int a, int b) { return (a + b - 1) / b; }

void shrink(const Group& g, int row, int rows, int rank, int ranks) {
  float* v = g.v + static_cast<int64_t>(row) * g.rank;
  kernels().shrink[g.dtype]({g.x + row, g.a, v, g.rank, g.in, rows, rank, ranks, g.bt});
  for (int i = 0; i < rows; ++i) {
    float scale = g.weight == nullptr ? g.scale : g.scale * g.weight[row + i];
    for (int r = rank; r < rank + ranks; ++r) v[static_cast<int64_t>(i) * g.rank + r] *= scale;
  }
}

void expand(const Group& g, int row, int rows, int column, int columns, bool accumulate) {
  const float* v = g.v + static_cast<int64_t>(row) * g.rank;
  if (g.bias != nullptr) {
    for (int i = row; i < row + rows; ++i) {
      float* out = g.out[i] + g.out_offset;
      for (int c = column; c < column + columns; ++c) out[c] = accumulate ? out[c] + g.bias[c] : g.bias[c];
    }
    accumulate = true;
  }
  kernels().expand[g.dtype]({.v = v, .v_stride = g.rank, .bt = g.bt, .out = g.out + row, .bt_stride = g.bt_stride,
                             .out_offset = g.out_offset, .rank = g.rank, .rows = rows, .column = column,
                             .columns = columns, .accumulate = accumulate});
}

struct Range {
  int start, count;
};

// Piece `index` of `pieces` of [0, n), in whole steps.
Range piece(int n, int step, int index, int pieces) {
  int64_t steps = ceil_div(n, step);
  int start = static_cast<int>(steps * index / pieces) * step;
  int end = min(n, static_cast<int>(steps * (index + 1) / pieces) * step);
  return {start, end - start};
}

// Groups and the scratch that says which chunk belongs to which: chunks [first[g], first[g + 1]) to group g.
struct Groups {
  const Group* list;
  int count;
  int* first;  // [count + 1]

  int64_t work() const {
    int64_t work = 0;
    for (int g = 0; g < count; ++g) work += list[g].work();
    return work;
  }

  int group_of(int chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      int middle = (low + high + 1) / 2;
      if (first[middle] <= chunk) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // body(group, index, pieces) for each of the pieces(group) >= 1 pieces of each group.
  template <class Pieces, class Body>
  void run(bool alone, const Pieces& pieces, const Body& body) const {
    if (count == 0) return;
    first[0] = 0;
    for (int g = 0; g < count; ++g) first[g + 1] = first[g] + pieces(list[g]);
    auto chunk = [&](int index, int) {
      int g = group_of(index);
      body(list[g], index - first[g], first[g + 1] - first[g]);
    };
    if (!alone) return parallel_chunks(first[count], chunk);
    for (int index = 0; index < first[count]; ++index) chunk(index, 0);
  }
};

bool run_alone(int64_t work) { return num_threads() == 1 || work < kAloneWork; }

int64_t fair_share(int64_t work) { return work / (num_threads() * kChunksPerThread) + 1; }

// v of every group.
void shrink_all(const Groups& groups, int64_t work) {
  int64_t share = fair_share(work);
  auto pieces = [&](const Group& g) {
    if (g.rows > kRowChunk) return ceil_div(g.rows, kRowChunk);
    return max(1, min(ceil_div(g.rank, kRankStep), static_cast<int>(g.work() / share)));
  };
  groups.run(run_alone(work), pieces, [](const Group& g, int index, int pieces) {
    bool by_rows = g.rows > kRowChunk;
    Range part = by_rows ? piece(g.rows, 1, index, pieces) : piece(g.rank, kRankStep, index, pieces);
    if (by_rows) shrink(g, part.start, part.count, 0, g.rank);
    else shrink(g, 0, g.rows, part.start, part.count);
  });
}

void run_fused(const Groups& groups, int64_t work, bool accumulate) {
  auto pieces = [](const Group& g) { return ceil_div(g.rows, kRowChunk); };
  groups.run(run_alone(work), pieces, [&](const Group& g, int index, int pieces) {
    Range rows = piece(g.rows, 1, index, pieces);
    shrink(g, rows.start, rows.count, 0, g.rank);
    expand(g, rows.start, rows.count, 0, g.columns, accumulate);
  });
}

// Groups whose outputs lie apart.
void run_apart(const Groups& groups, bool accumulate) {
  int64_t work = groups.work(), largest = 0;
  for (int g = 0; g < groups.count; ++g) {
    int64_t chunk = groups.list[g].work() / ceil_div(groups.list[g].rows, kRowChunk);
    largest = chunk > largest ? chunk : largest;
  }
  // The last chunk may be waited for this long; with longer ones a barrier is cheaper.
  if (run_alone(work) || largest * num_threads() * 3 <= work) return run_fused(groups, work, accumulate);
  shrink_all(groups, work);
  int64_t share = fair_share(work);
  auto pieces = [&](const Group& g) {
    return max(1, min(ceil_div(g.columns, kColumnStep), static_cast<int>(g.work() / share)));
  };
  groups.run(false, pieces, [&](const Group& g, int index, int pieces) {
    Range columns = piece(g.columns, kColumnStep, index, pieces);
    expand(g, 0, g.rows, columns.start, columns.count, accumulate);
  });
}

// Groups of which those of one segment add into the same rows. They come segment by segment.
void run_meeting(const Groups& groups) {
  int64_t work = groups.work();
  shrink_all(groups, work);
  int runs = 0;
  int* first = groups.first;  // free again: now the first group of each run of groups with one segment
  for (int g = 0; g < groups.count; ++g)
    if (g == 0 || groups.list[g].segment != groups.list[g - 1].segment) first[runs++] = g;
  if (runs == 0) return;
  first[runs] = groups.count;
  int pieces = runs >= num_threads() * 4 ? 1 : num_threads() * 4;
  auto chunk = [&](int index, int) {
    for (int i = first[index / pieces]; i < first[index / pieces + 1]; ++i) {
      const Group& g = groups.list[i];
      Range columns = piece(g.columns, kColumnStep, index % pieces, pieces);
      if (columns.count > 0) expand(g, 0, g.rows, columns.start, columns.count, true);
    }
  };
  if (!run_alone(work)) return parallel_chunks(runs * pieces, chunk);
  for (int index = 0; index < runs * pieces; ++index) chunk(index, 0);
}

}  // namespace
}  // namespace il
