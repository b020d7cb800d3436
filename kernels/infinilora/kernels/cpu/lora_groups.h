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
constexpr int64_t kBytesPerNs = 25, kMacsPerNs = 60;
constexpr int64_t kJoinNs = 800;    // a job more
constexpr int64_t kLeastChunkNs = 1000;
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

// Rows of weights that are asked for before `rows` rows of a group begin to read them, of `left`.
int first_ranks(int left, int row_bytes, int rows) {
  return min(left, rows == 1 ? max(kRankStep, ceil_div(kAheadBytes, max(row_bytes, 1))) : kRankStep);
}

Region rows_of_a(const Group& g, int rank) {
  const int bytes = g.in * width(g.dtype);
  const int64_t stride = g.a_stride * width(g.dtype);
  return {static_cast<const char*>(g.a) + rank * stride, stride, first_ranks(g.rank - rank, bytes, g.rows), bytes};
}

// Where expand begins to read.
Region start_of_bt(const Group& g, int column, int rows) {
  const int size = width(g.dtype);
  const char* at = static_cast<const char*>(g.bt) + static_cast<int64_t>(column) * size;
  if (rows >= kLeastTiled) return {at, g.bt_stride * size, g.rank, min(kPanelBytes, (g.columns - column) * size)};
  const int bytes = (g.columns - column) * size;
  return {at, g.bt_stride * size, first_ranks(g.rank, bytes, rows), bytes};
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

// A piece of a group's work.
struct Chunk {
  const Group& group;
  int index, pieces;

  Range rows() const { return piece(group.rows, 1, index, pieces); }
  Range ranks() const { return piece(group.rank, kRankStep, index, pieces); }
  Range columns() const { return piece(group.columns, kColumnStep, index, pieces); }
};

// How the work of groups is cut: chunks [first[g], first[g + 1]) belong to group g.
struct Cut {
  const Group* list;
  int groups;
  int* first;  // [groups + 1]

  // pieces(group) >= 1: into how many chunks each group is cut.
  template <class Pieces>
  Cut(const Group* list, int groups, int* first, const Pieces& pieces) : list(list), groups(groups), first(first) {
    first[0] = 0;
    for (int g = 0; g < groups; ++g) first[g + 1] = first[g] + pieces(list[g]);
  }

  int count() const { return first[groups]; }

  Chunk at(int chunk) const {
    int low = 0, high = groups - 1;
    while (low < high) {
      int middle = (low + high + 1) / 2;
      if (first[middle] <= chunk) low = middle;
      else high = middle - 1;
    }
    return {list[low], chunk - first[low], first[low + 1] - first[low]};
  }
};

// Where a thread stands in a job: the chunk it takes, and the one it probably takes next, or -1.
struct Turn {
  int chunk, thread, coming;
};

// run(turn) for each of the chunks, by as many threads as are worth it.
template <class Run>
void in_shares(int chunks, int64_t cost, const Run& run) {
  if (num_threads() == 1 || chunks <= 1 || cost < kAloneNs) {
    for (int chunk = 0; chunk < chunks; ++chunk) run({chunk, 0, chunk + 1 < chunks ? chunk + 1 : -1});
    return;
  }
  const int threads = num_threads();
  auto take = [&](int chunk, int thread) {
    bool is_last = false;
    for (int t = 1; t <= threads; ++t) is_last |= chunk + 1 == Shares::first_of(chunks, t, threads);
    run({chunk, thread, is_last ? -1 : chunk + 1});
  };
  parallel_shares(chunks, take, cost < kWakeNs);
}

// Groups and the scratch that says how they are cut.
struct Groups {
  const Group* list;
  int count;
  int* first;  // [2 * (count + 1)]

  template <class Pieces>
  Cut cut(const Pieces& pieces) const { return Cut(list, count, first, pieces); }
  template <class Pieces>
  Cut cut_again(const Pieces& pieces) const { return Cut(list, count, first + count + 1, pieces); }

  int64_t cost_ns() const {
    int64_t cost = 0;
    for (int g = 0; g < count; ++g) cost += il::cost_ns(list[g], list[g].rows);
    return cost;
  }
};

// Into how many chunks of about `share` a job is cut that costs so much.
int chunks_of(int64_t cost, int64_t share) { return static_cast<int>((cost + share / 2) / share); }

// What a chunk of a job cut along ranks or columns may cost: as many for each thread as are worth taking.
int64_t share_ns(int64_t cost) {
  const int64_t each = cost / num_threads() + 1;
  return each / max(1, min(kChunksPerThread, static_cast<int>(each / kLeastChunkNs)));
}

bool by_rows(const Group& g) { return g.rows > kRowChunk; }

Region start_of_a(const Chunk& chunk) {
  return rows_of_a(chunk.group, by_rows(chunk.group) ? 0 : chunk.ranks().start);
}

Cut cut_ranks(const Groups& groups, int64_t cost) {
  const int64_t share = share_ns(cost);
  return groups.cut([&](const Group& g) {
    if (by_rows(g)) return ceil_div(g.rows, kRowChunk);
    return max(1, min(ceil_div(g.rank, kRankStep), chunks_of(cost_ns(g, g.rows) / 2, share)));
  });
}

// v of every group; next(thread): what a thread reads when it has done its share.
template <class Next>
void shrink_all(const Cut& cut, int64_t cost, const Next& next) {
  in_shares(cut.count(), cost, [&](const Turn& turn) {
    const Chunk chunk = cut.at(turn.chunk);
    const Group& g = chunk.group;
    const Region after = turn.coming < 0 ? next(turn.thread) : start_of_a(cut.at(turn.coming));
    if (by_rows(g)) shrink(g, chunk.rows().start, chunk.rows().count, 0, g.rank, after);
    else shrink(g, 0, g.rows, chunk.ranks().start, chunk.ranks().count, after);
  });
}

// Shrink and expand of some rows by one thread after the other.
void run_fused(const Cut& cut, int64_t cost, bool accumulate) {
  in_shares(cut.count(), cost, [&](const Turn& turn) {
    const Chunk chunk = cut.at(turn.chunk);
    const Group& g = chunk.group;
    const Range rows = chunk.rows();
    shrink(g, rows.start, rows.count, 0, g.rank, start_of_bt(g, 0, rows.count));
    const Region after = turn.coming < 0 ? Region{} : rows_of_a(cut.at(turn.coming).group, 0);
    expand(g, rows.start, rows.count, 0, g.columns, accumulate, after);
  });
}

Region start_of_bt(const Chunk& chunk) { return start_of_bt(chunk.group, chunk.columns().start, chunk.group.rows); }

void run_by_ranks_and_columns(const Groups& groups, int64_t cost, bool accumulate) {
  const int64_t share = share_ns(cost / 2);
  const Cut columns_cut = groups.cut_again([&](const Group& g) {
    return max(1, min(ceil_div(g.columns, kColumnStep), chunks_of(cost_ns(g, g.rows) / 2, share)));
  });
  const int count = columns_cut.count();
  shrink_all(cut_ranks(groups, cost / 2), cost / 2, [&](int thread) {
    return start_of_bt(columns_cut.at(min(Shares::first_of(count, thread, num_threads()), count - 1)));
  });
  in_shares(count, cost / 2, [&](const Turn& turn) {
    const Chunk chunk = columns_cut.at(turn.chunk);
    const Range columns = chunk.columns();
    const Region after = turn.coming < 0 ? Region{} : start_of_bt(columns_cut.at(turn.coming));
    expand(chunk.group, 0, chunk.group.rows, columns.start, columns.count, accumulate, after);
  });
}

// Groups whose outputs lie apart.
[[maybe_unused]] void run_apart(const Groups& groups, bool accumulate) {
  const int threads = num_threads();
  const int64_t cost = groups.cost_ns(), share = cost / (2 * threads) + 1;
  const Cut cut = groups.cut([&](const Group& g) {
    int wanted = chunks_of(cost_ns(g, g.rows), share), most = g.rows / kLeastRows;
    return max(ceil_div(g.rows, kRowChunk), threads == 1 ? 1 : min(wanted, most));
  });
  // Chunks that are much alike end in rounds; of others the last may be waited for.
  int64_t largest = 0, chunks = cut.count();
  for (int g = 0; g < groups.count; ++g)
    largest = longer(largest, cost_ns(groups.list[g], ceil_div(groups.list[g].rows, cut.first[g + 1] - cut.first[g])));
  int64_t rounds = (chunks + threads - 1) / threads * largest, waited = cost / threads + largest * (threads - 1) / threads;
  int64_t fused = rounds < waited ? rounds : waited;
  if (threads == 1 || cost < kAloneNs || fused <= cost / threads + kJoinNs) return run_fused(cut, cost, accumulate);
  run_by_ranks_and_columns(groups, cost, accumulate);
}

// Groups of which those of one segment add into the same rows. They come segment by segment.
[[maybe_unused]] void run_meeting(const Groups& groups) {
  if (groups.count == 0) return;
  const int64_t cost = groups.cost_ns() / 2;
  shrink_all(cut_ranks(groups, cost), cost, [&](int) { return start_of_bt(groups.list[0], 0, groups.list[0].rows); });
  int runs = 0;
  int* first = groups.first;  // free again: now the first group of each run of groups with one segment
  for (int g = 0; g < groups.count; ++g)
    if (g == 0 || groups.list[g].segment != groups.list[g - 1].segment) first[runs++] = g;
  first[runs] = groups.count;
  int pieces = runs >= num_threads() * 4 ? 1 : num_threads() * 4;
  in_shares(runs * pieces, cost, [&](const Turn& turn) {
    const int index = turn.chunk;
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
