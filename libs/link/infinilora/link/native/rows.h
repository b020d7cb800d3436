// Moving rows between tensors and the rings, by threads of the kernels where there is enough to move.
#pragma once

#include "moves.h"

// Of the kernels, in the same library (kernels/cpu): 0 portable, 1 AVX2, 2 AVX-512; and their threads.
extern "C" int il_level();
namespace il {
void parallel_for(int num_chunks, const void* job, void (*run)(const void* job, int chunk, int thread));
}

namespace {

using namespace elements;

constexpr uint64_t kPieceBytes = 48 * 1024;  // a worker's part of a move: several times what handing it over costs

struct Target {  // where a delta goes: row r of the site call at out + r * stride
  char* out;
  int64_t stride;
  uint32_t dtype;
  bool add;
};

const moves::Table& best_moves() {
#if defined(__x86_64__)
  switch (il_level()) {
    case 2: return moves::kAvx512;
    case 1: return moves::kAvx2;
  }
#endif
  return moves::kPortable;
}

// move(first, rows) for all rows, in pieces that the kernels' threads share where there is enough to move: between two
// products they are awake and idle, and one core alone draws but a part of what the memory gives.
template <class Move> void share_rows(uint64_t rows, uint64_t row_bytes, const Move& move) {
  struct Job {
    const Move& move;
    uint64_t rows, pieces;
  };
  uint64_t pieces = rows * row_bytes / kPieceBytes;
  if (pieces > rows) pieces = rows;
  if (pieces < 2) return move(0, rows);
  const Job job{move, rows, pieces};
  il::parallel_for(int(pieces), &job, [](const void* data, int piece, int) {
    const Job& j = *static_cast<const Job*>(data);
    const uint64_t first = j.rows * piece / j.pieces, end = j.rows * (piece + 1) / j.pieces;
    j.move(first, end - first);
  });
}

void take_rows(const char* in, uint32_t dtype, const Target& to, uint64_t row0, uint64_t rows, uint64_t cols) {
  const auto take = best_moves().take[dtype][to.dtype][to.add];
  char* out = to.out + int64_t(row0) * to.stride;
  const uint64_t row_bytes = cols * width(dtype);
  const bool is_dense = to.stride == int64_t(cols * width(to.dtype));
  share_rows(rows, row_bytes, [&](uint64_t first, uint64_t count) {
    const char* from = in + first * row_bytes;
    char* at = out + int64_t(first) * to.stride;
    if (is_dense) return take(from, at, count * cols);
    for (uint64_t r = 0; r < count; ++r) take(from + r * row_bytes, at + int64_t(r) * to.stride, cols);
  });
}

void copy_rows(char* to, uint64_t from, uint64_t stride, uint64_t row_bytes, uint64_t row0, uint64_t rows) {
  const char* at = reinterpret_cast<const char*>(from) + row0 * stride;
  share_rows(rows, row_bytes, [&](uint64_t first, uint64_t count) {
    const char* in = at + first * stride;
    char* out = to + first * row_bytes;
    if (stride == row_bytes) return void(best_moves().copy(out, in, count * row_bytes));
    for (uint64_t r = 0; r < count; ++r) best_moves().copy(out + r * row_bytes, in + r * stride, row_bytes);
  });
}

}  // namespace
