// Attention of a run of query rows over a paged cache, by online softmax. Included once for each set.
//
//   for each tile of kW positions:   scores = q K^T     kW dot products, summed together (vec.h: sum_each)
//                                    p = e^(scores - max so far),  out = out * e^(old max - new) + p V
//
// Positions beyond a row's own are masked, and beyond the last row's are never read.
#pragma once

#include "elementwise_kernels.h"
#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

// Of one query: its running output, then max, sum and the factor of the last tile, then that tile's p.
struct QueryState {
  float* out;
  float max, sum, keep;
  alignas(64) float p[kW];
};

int64_t attention_work_floats(int queries, int head_dim) {
  int64_t state = (sizeof(QueryState) + 63) / 64 * 16, out = (head_dim + 15) / 16 * 16;
  return queries * (state + out);
}

IL_INLINE vf scores_of(const float* q, const float* const* k, int head_dim) {
  vf dots[kW] = {};
  int d = 0;
  for (; d + kW <= head_dim; d += kW) {
    vf qv = load(q + d);
    IL_UNROLL for (int p = 0; p < kW; ++p) dots[p] += qv * load(k[p] + d);
  }
  if (int left = head_dim - d; left > 0) {
    vf qv = load_first(q + d, left);
    IL_UNROLL for (int p = 0; p < kW; ++p) dots[p] += qv * load_first(k[p] + d, left);
  }
  sum_each(dots);
  return dots[0];
}

// `visible`: how many of the tile's positions this query sees; at least one of the first tile's.
IL_INLINE void softmax_tile(QueryState& state, vf scores, int visible) {
  vi seen = first_lanes(visible);
  float found = largest(seen ? scores : splat(state.max));
  float max = found > state.max ? found : state.max;
  vf p = seen ? exponential(scores - max) : vf{};
  store(state.p, p);
  state.keep = max == state.max ? 1.0f : exponential(splat(state.max - max))[0];
  state.sum = state.sum * state.keep + sum(p);
  state.max = max;
}

template <int Queries, int Vecs>
IL_INLINE void add_values(QueryState* state, const float* const* v, int positions, int d) {
  vf out[Queries][Vecs];
  IL_UNROLL for (int i = 0; i < Queries; ++i)
    IL_UNROLL for (int j = 0; j < Vecs; ++j) out[i][j] = load(state[i].out + d + j * kW) * state[i].keep;
  for (int p = 0; p < positions; ++p) {
    vf value[Vecs];
    IL_UNROLL for (int j = 0; j < Vecs; ++j) value[j] = load(v[p] + d + j * kW);
    IL_UNROLL for (int i = 0; i < Queries; ++i)
      IL_UNROLL for (int j = 0; j < Vecs; ++j) out[i][j] += splat(state[i].p[p]) * value[j];
  }
  IL_UNROLL for (int i = 0; i < Queries; ++i)
    IL_UNROLL for (int j = 0; j < Vecs; ++j) store(state[i].out + d + j * kW, out[i][j]);
}

template <int Queries>
IL_INLINE void values_tile(QueryState* state, const float* const* v, int positions, int head_dim) {
  int d = 0;
  for (; d + 4 * kW <= head_dim; d += 4 * kW) add_values<Queries, 4>(state, v, positions, d);
  for (; d + kW <= head_dim; d += kW) add_values<Queries, 1>(state, v, positions, d);
  for (; d < head_dim; ++d)
    IL_UNROLL for (int i = 0; i < Queries; ++i) {
      float out = state[i].out[d] * state[i].keep;
      for (int p = 0; p < positions; ++p) out += state[i].p[p] * v[p][d];
      state[i].out[d] = out;
    }
}

// Where the keys and values of a tile are. Rows beyond `positions` repeat the first: masked, but readable.
struct Tile {
  const float* k[kW];
  const float* v[kW];
  int positions;
};

IL_INLINE Tile tile_at(const AttentionChunk& c, int start, int end) {
  Tile tile;
  tile.positions = end - start < kW ? end - start : kW;
  for (int p = 0; p < kW; ++p) {
    int position = start + (p < tile.positions ? p : 0);
    int64_t block = c.block_table[position / c.block_size];
    int64_t at = block * c.block_stride + position % c.block_size * c.position_stride;
    tile.k[p] = c.k + at;
    tile.v[p] = c.v + at;
  }
  return tile;
}

// Heads of one position lie side by side, so one head's rows are far apart: no pattern that is foreseen.
IL_INLINE void prefetch(const Tile& tile, int head_dim) {
  for (int p = 0; p < tile.positions; ++p)
    for (int d = 0; d < head_dim; d += 16) {
      __builtin_prefetch(tile.k[p] + d);
      __builtin_prefetch(tile.v[p] + d);
    }
}

void attention(const AttentionChunk& c) {
  int queries = c.rows * c.group;
  auto* states = reinterpret_cast<QueryState*>(c.work);
  float* outs = c.work + attention_work_floats(queries, 0);
  int out_floats = (c.head_dim + 15) / 16 * 16;
  for (int i = 0; i < queries; ++i) {
    states[i].out = outs + static_cast<int64_t>(i) * out_floats;
    states[i].max = -3.4e38f;
    states[i].sum = 0.0f;
    memset(states[i].out, 0, static_cast<size_t>(out_floats) * sizeof(float));
  }

  int end = c.first_position + c.rows;  // the last row sees positions [0, end)
  Tile next = tile_at(c, 0, end);
  for (int start = 0; start < end; start += kW) {
    const Tile tile = next;
    const int positions = tile.positions;
    if (start + kW < end) {
      next = tile_at(c, start + kW, end);
      prefetch(next, c.head_dim);
    }
    int first_row = start > c.first_position ? start - c.first_position : 0;  // earlier rows see none of this tile
    for (int i = first_row * c.group; i < queries; ++i) {
      int row = i / c.group, seen = c.first_position + row + 1 - start;
      const float* q = c.q + row * c.q_row_stride + i % c.group * c.head_dim;
      softmax_tile(states[i], scores_of(q, tile.k, c.head_dim) * c.scale, seen < positions ? seen : positions);
    }
    int i = first_row * c.group;
    for (; i + 2 <= queries; i += 2) values_tile<2>(states + i, tile.v, positions, c.head_dim);
    if (i < queries) values_tile<1>(states + i, tile.v, positions, c.head_dim);
  }
  for (int i = 0; i < queries; ++i) {
    float* out = c.out + i / c.group * c.out_row_stride + i % c.group * c.head_dim;
    for (int d = 0; d < c.head_dim; ++d) out[d] = states[i].out[d] / states[i].sum;
  }
}

}  // namespace
}  // namespace il
