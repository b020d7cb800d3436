// Groups of rows that share one A and one Bt, and how their work is cut into chunks.
//
// Groups that write apart from one another run shrink and expand in one chunk, no barrier: the usual case of
// many adapters with few rows each. A group with many rows is cut along them; where that leaves threads idle
// (one adapter, few rows), all are cut along their ranks in a first job and their columns in a second. Where groups
// meet in one row of the output (the experts of one token), the second job is cut by segment and columns, and nobody
// shares a cell.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace il {
namespace {

struct Group {
  const void* a;          // [rank, in], a_stride apart
  const void* bt;         // [rank, columns], bt_stride apart
  const float* bias;      // [columns] or null
  const float* const* x;  // [rows]
  float* const* out;      // [rows]
  const float* weight;    // [rows] or null: router weights
  float* v;               // [rows, rank]
  int64_t a_stride, bt_stride;
  int32_t dtype, in, rank, columns, out_offset, rows, segment;
  float scale;
};

constexpr int kRowChunk = 48;   // rows of a prefill that one chunk takes
constexpr int kLeastRows = 16;  // rows from which on a chunk multiplies for longer than its weights take to come
constexpr int kColumnStep = 64, kRankStep = 4;
// Of a job cut along ranks or columns, at most: the last to finish is not waited for long. Each begins in memory that
// nobody has asked for.
constexpr int kChunksPerThread = 3;

// What a core does in a nanosecond, roughly: weighs chunks against one another and against the cost of waiting.
constexpr int64_t kBytesPerNs = 25, kMacsPerNs = 100;
constexpr int64_t kJoinNs = 1000;   // a job more
constexpr int64_t kLeastChunkNs = 1500;
constexpr int64_t kAloneNs = 1500;  // over before a thread that is awake could help
constexpr int64_t kWakeNs = 8000;   // over before a thread that sleeps could help

int min(int a, int b) { return a < b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }
int64_t longer(int64_t a, int64_t b) { return a > b ? a : b; }
int ceil_div(int a, int b) { return (a + b - 1) / b; }
int width(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

// What `rows` of the rows of a group cost one core.
int64_t cost_ns(const Group& g, int rows) {
  int64_t weights = static_cast<int64_t>(g.rank) * (g.in + g.columns);
  return longer(weights * width(g.dtype) / kBytesPerNs, weights * rows / kMacsPerNs) + 50;
}

Region rows_of_a(const Group& g, int rank) {
  const int64_t stride = g.a_stride * width(g.dtype);
  return {static_cast<const char*>(g.a) + rank * stride, stride, min(kRankStep, g.rank - rank), g.in * width(g.dtype)};
}

// Where expand begins to read.
Region start_of_bt(const Group& g, int column, int rows) {
  const int size = width(g.dtype);
  const char* at = static_cast<const char*>(g.bt) + static_cast<int64_t>(column) * size;
  if (rows >= kLeastTiled) return {at, g.bt_stride * size, g.rank, min(kAheadBytes, (g.columns - column) * size)};
  return {at, g.bt_stride * size, min(kRankStep, g.rank), (g.columns - column) * size};
}

void shrink(const Group& g, int row, int rows, int rank, int ranks, const Region& next) {
  float* v = g.v + static_cast<int64_t>(row) * g.rank;
  kernels().shrink[g.dtype]({g.x + row, g.a, v, g.a_stride, g.rank, g.in, rows, rank, ranks, next});
  for (int i = 0; i < rows; ++i) {
    float scale = g.weight == nullptr ? g.scale : g.scale * g.weight[row + i];
    for (int r = rank; r < rank + ranks; ++r) v[static_cast<int64_t>(i) * g.rank + r] *= scale;
  }
}

void expand(const Group& g, int row, int rows, int column, int columns, bool accumulate, const Region& next) {
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
                             .columns = columns, .accumulate = accumulate, .next = next});
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

  int64_t cost_ns() const {
    int64_t cost = 0;
    for (int g = 0; g < count; ++g) cost += il::cost_ns(list[g], list[g].rows);
    return cost;
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

  // pieces(group) >= 1: into how many chunks each group is cut.
  template <class Pieces>
  void cut(const Pieces& pieces) const {
    first[0] = 0;
    for (int g = 0; g < count; ++g) first[g + 1] = first[g] + pieces(list[g]);
  }

  // body(group, index, pieces, the group of the chunk that this thread probably takes next) for each chunk of `cut`.
  template <class Body>
  void run(int64_t cost, const Body& body) const {
    if (count == 0) return;
    auto chunk = [&](int index) {
      int g = group_of(index), after = index + 1 < first[count] ? group_of(index + 1) : g;
      body(list[g], index - first[g], first[g + 1] - first[g], list[after]);
    };
    in_shares(first[count], cost, chunk);
  }

  // chunk(index) for each of the chunks, by as many threads as are worth it.
  template <class Chunk>
  static void in_shares(int chunks, int64_t cost, const Chunk& chunk) {
    const int threads = num_threads();
    if (threads == 1 || chunks == 1 || cost < kAloneNs) {
      for (int index = 0; index < chunks; ++index) chunk(index);
      return;
    }
    Shares shares(chunks, threads);
    parallel_chunks(chunks, [&](int, int thread) { chunk(shares.take(thread)); }, cost >= kWakeNs);
  }
};

// What a chunk of a job cut along ranks or columns may cost: as many for each thread as are worth taking.
int64_t share_ns(int64_t cost) {
  const int64_t each = cost / num_threads() + 1;
  return each / max(1, min(kChunksPerThread, static_cast<int>(each / kLeastChunkNs)));
}

// v of every group; `cost` of them all is half of what they cost with expand.
void shrink_all(const Groups& groups, int64_t cost) {
  const int64_t share = share_ns(cost);
  groups.cut([&](const Group& g) {
    if (g.rows > kRowChunk) return ceil_div(g.rows, kRowChunk);
    return max(1, min(ceil_div(g.rank, kRankStep), static_cast<int>(cost_ns(g, g.rows) / 2 / share)));
  });
  groups.run(cost, [](const Group& g, int index, int pieces, const Group&) {
    bool by_rows = g.rows > kRowChunk;
    Range part = by_rows ? piece(g.rows, 1, index, pieces) : piece(g.rank, kRankStep, index, pieces);
    Region next = start_of_bt(g, 0, g.rows);
    if (by_rows) shrink(g, part.start, part.count, 0, g.rank, next);
    else shrink(g, 0, g.rows, part.start, part.count, next);
  });
}

// Shrink and expand of some rows by one thread after the other.
void run_fused(const Groups& groups, int64_t cost, bool accumulate) {
  groups.run(cost, [&](const Group& g, int index, int pieces, const Group& after) {
    Range rows = piece(g.rows, 1, index, pieces);
    shrink(g, rows.start, rows.count, 0, g.rank, start_of_bt(g, 0, rows.count));
    expand(g, rows.start, rows.count, 0, g.columns, accumulate, rows_of_a(after, 0));
  });
}

void run_by_ranks_and_columns(const Groups& groups, int64_t cost, bool accumulate) {
  shrink_all(groups, cost / 2);
  const int64_t share = share_ns(cost / 2);
  groups.cut([&](const Group& g) {
    return max(1, min(ceil_div(g.columns, kColumnStep), static_cast<int>(cost_ns(g, g.rows) / 2 / share)));
  });
  groups.run(cost / 2, [&](const Group& g, int index, int pieces, const Group& after) {
    Range columns = piece(g.columns, kColumnStep, index, pieces);
    Region next = start_of_bt(after, &after == &g ? columns.start + columns.count : 0, after.rows);
    expand(g, 0, g.rows, columns.start, columns.count, accumulate, next);
  });
}

// Groups whose outputs lie apart.
[[maybe_unused]] void run_apart(const Groups& groups, bool accumulate) {
  const int threads = num_threads();
  const int64_t cost = groups.cost_ns(), share = cost / (2 * threads) + 1;
  groups.cut([&](const Group& g) {
    int wanted = static_cast<int>(cost_ns(g, g.rows) / share), most = g.rows / kLeastRows;
    return max(ceil_div(g.rows, kRowChunk), threads == 1 ? 1 : min(wanted, most));
  });
  // Chunks that are much alike end in rounds; of others the last may be waited for.
  int64_t largest = 0, chunks = groups.first[groups.count];
  for (int g = 0; g < groups.count; ++g)
    largest = longer(largest, cost_ns(groups.list[g], ceil_div(groups.list[g].rows, groups.first[g + 1] - groups.first[g])));
  int64_t rounds = (chunks + threads - 1) / threads * largest, waited = cost / threads + largest * (threads - 1) / threads;
  int64_t fused = rounds < waited ? rounds : waited;
  if (threads == 1 || cost < kAloneNs || fused <= cost / threads + kJoinNs) return run_fused(groups, cost, accumulate);
  run_by_ranks_and_columns(groups, cost, accumulate);
}

// Groups of which those of one segment add into the same rows. They come segment by segment.
[[maybe_unused]] void run_meeting(const Groups& groups) {
  if (groups.count == 0) return;
  const int64_t cost = groups.cost_ns() / 2;
  shrink_all(groups, cost);
  int runs = 0;
  int* first = groups.first;  // free again: now the first group of each run of groups with one segment
  for (int g = 0; g < groups.count; ++g)
    if (g == 0 || groups.list[g].segment != groups.list[g - 1].segment) first[runs++] = g;
  first[runs] = groups.count;
  int pieces = runs >= num_threads() * 4 ? 1 : num_threads() * 4;
  Groups::in_shares(runs * pieces, cost, [&](int index) {
    for (int i = first[index / pieces]; i < first[index / pieces + 1]; ++i) {
      const Group& g = groups.list[i];
      Range columns = piece(g.columns, kColumnStep, index % pieces, pieces);
      const Group& after = i + 1 < first[index / pieces + 1] ? groups.list[i + 1] : g;
      Region next = start_of_bt(after, columns.start, after.rows);
      if (columns.count > 0) expand(g, 0, g.rows, columns.start, columns.count, true, next);
    }
  });
}

}  // namespace
}  // namespace il
