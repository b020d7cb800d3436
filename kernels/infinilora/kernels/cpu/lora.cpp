// LoRA deltas of a batch: from segments of rows to groups of rows that share weights (lora_groups.h).
//
//   dense     one bundle of rows for each segment
//   MoE       one for each (segment, expert) that some token of the segment chose: a virtual expert
//
// Each bundle gives one group for each part of its site.
#include "lora.h"

#include <cstddef>
#include <cstring>

#include "lora_groups.h"

namespace il {
namespace {

size_t width(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

const void* expert_of(const void* weights, int64_t stride, int expert, int32_t dtype) {
  return static_cast<const char*>(weights) + static_cast<size_t>(expert * stride) * width(dtype);
}

const il_site* site_of(const il_launch& l, const il_segment& s) {
  return s.rows > 0 ? l.sites[s.slot * l.slot_stride] : nullptr;
}

// Scratch memory of the calling thread, handed out in pieces; `room` was counted before.
struct Arena {
  char* at;
  char* end;

  explicit Arena(size_t room) : at(static_cast<char*>(scratch(room))), end(at + room) {}

  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  template <class T>
  T* take(size_t n) {
    char* taken = at;
    at += padded(n * sizeof(T));
    if (at > end) __builtin_trap();  // counted wrongly: stop before memory is damaged
    return reinterpret_cast<T*>(taken);
  }
};

// Rows of one segment that use the same weights.
struct Bundle {
  const float** x;
  float** out;
  float* weight;  // or null
  int rows;
};

// Collects groups, within a room counted before for so many rows and bundles.
struct Batch {
  Arena arena;
  Group* list;
  int* first;
  int count = 0;

  struct Size {
    size_t rows = 0, bundles = 0, groups = 0, v = 0;

    // `rows` more rows of `site`, in at most `bundles` bundles.
    void add(const il_site& site, size_t more_rows, size_t more_bundles) {
      rows += more_rows;
      bundles += more_bundles;
      groups += more_bundles * site.num_parts;
      for (int p = 0; p < site.num_parts; ++p) v += more_rows * site.parts[p].rank;
    }

    size_t bytes() const {
      size_t padding = 64 * (bundles * 3 + groups + 4);
      return groups * (sizeof(Group) + sizeof(int)) + rows * 20 + v * 4 + 64 + padding;
    }
  };

  explicit Batch(const Size& size, size_t extra = 0) : arena(size.bytes() + extra) {
    list = arena.take<Group>(size.groups);
    first = arena.take<int>(size.groups + 1);
  }

  Bundle bundle(int rows, bool weighted) {
    return {arena.take<const float*>(rows), arena.take<float*>(rows), weighted ? arena.take<float>(rows) : nullptr,
            rows};
  }

  void add(const il_site& site, int expert, int segment, const Bundle& b) {
    for (int p = 0; p < site.num_parts; ++p) {
      const il_part& part = site.parts[p];
      if (part.rank == 0) continue;
      list[count++] = {.a = expert_of(part.a, part.a_expert_stride, expert, site.dtype),
                       .bt = expert_of(part.bt, part.bt_expert_stride, expert, site.dtype),
                       .x = b.x, .out = b.out, .weight = b.weight,
                       .v = arena.take<float>(static_cast<size_t>(b.rows) * part.rank),
                       .dtype = site.dtype, .in = site.in, .rank = part.rank, .columns = part.out,
                       .out_offset = part.out_offset, .rows = b.rows, .segment = segment, .scale = part.scale};
    }
  }

  Groups groups() const { return {list, count, first}; }
};

void zero(float* to, int64_t n) { memset(to, 0, static_cast<size_t>(n) * sizeof(float)); }

// Zeros the columns of one output row that no part writes. Parts do not overlap.
void zero_gaps(const il_site& site, float* row, int out_dim) {
  int filled = 0;
  for (int p = 0; p < site.num_parts; ++p) filled += site.parts[p].rank > 0 ? site.parts[p].out : 0;
  if (filled == out_dim) return;
  for (int at = 0; at < out_dim;) {
    int part_end = -1, next_part = out_dim;
    for (int p = 0; p < site.num_parts; ++p) {
      const il_part& part = site.parts[p];
      if (part.rank == 0) continue;
      if (part.out_offset == at) part_end = at + part.out;
      else if (part.out_offset > at) next_part = min(next_part, part.out_offset);
    }
    if (part_end < 0) zero(row + at, next_part - at);
    at = part_end < 0 ? next_part : part_end;
  }
}

// Before a launch that does not accumulate: `rows_of(segment or null, row, end)` for every run of rows, in order.
template <class Rows>
void for_all_rows(const il_launch& l, const Rows& rows_of) {
  int at = 0;
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    if (segment.row_start > at) rows_of(nullptr, at, segment.row_start);
    rows_of(site_of(l, segment), segment.row_start, segment.row_start + segment.rows);
    at = segment.row_start + segment.rows;
  }
  if (at < l.rows) rows_of(nullptr, at, l.rows);
}

// The (token, choice) pairs of a segment in order of expert: pairs[starts[e] .. starts[e + 1]).
void sort_by_expert(const int32_t* ids, int pairs, int experts, int32_t* starts, int32_t* sorted) {
  memset(starts, 0, static_cast<size_t>(experts + 2) * sizeof(int32_t));
  auto valid = [&](int i) { return ids[i] >= 0 && ids[i] < experts; };
  for (int i = 0; i < pairs; ++i)
    if (valid(i)) ++starts[ids[i] + 2];
  for (int e = 0; e < experts; ++e) starts[e + 2] += starts[e + 1];
  for (int i = 0; i < pairs; ++i)
    if (valid(i)) sorted[starts[ids[i] + 1]++] = i;
}

// row(pair index in the launch, x, out, weight) fills one row of a bundle.
template <class Row>
void add_experts(Batch& batch, const il_launch& l, const int32_t* ids, int32_t* starts, int32_t* sorted,
                 bool weighted, const Row& row) {
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    const il_site* site = site_of(l, segment);
    if (site == nullptr) continue;
    int base = segment.row_start * l.topk;
    sort_by_expert(ids + base, segment.rows * l.topk, site->num_experts, starts, sorted);
    for (int e = 0; e < site->num_experts; ++e) {
      for (int at = starts[e]; at < starts[e + 1];) {
        // A token that names an expert twice has its second delta in a bundle of its own.
        int end = at + 1;
        while (end < starts[e + 1] && sorted[end] / l.topk != sorted[end - 1] / l.topk) ++end;
        Bundle b = batch.bundle(end - at, weighted);
        for (int i = at; i < end; ++i) row(base + sorted[i], b, i - at);
        batch.add(*site, e, s, b);
        at = end;
      }
    }
  }
}

struct MoeSize {
  Batch::Size batch;
  size_t experts = 0, pairs = 0;

  explicit MoeSize(const il_launch& l) {
    for (int s = 0; s < l.num_segments; ++s) {
      const il_site* site = site_of(l, l.segments[s]);
      if (site == nullptr) continue;
      size_t here = static_cast<size_t>(l.segments[s].rows) * l.topk;
      batch.add(*site, here, here);
      experts = static_cast<size_t>(site->num_experts) > experts ? site->num_experts : experts;
      pairs = here > pairs ? here : pairs;
    }
  }

  size_t sort_bytes() const { return (experts + 2 + pairs) * sizeof(int32_t) + 128; }
};

// 0, or the first thing wrong with the launch.
int32_t fault(const il_launch& l, bool is_moe) {
  int at = 0;
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    bool inside = segment.rows >= 0 && segment.row_start >= at && segment.rows <= l.rows - segment.row_start;
    if (!inside || segment.slot < 0 || segment.slot >= l.num_slots) return kBadSegment + 4 * s;
    at = segment.row_start + segment.rows;
    const il_site* site = site_of(l, segment);
    if (site == nullptr) continue;
    bool fits = site->in == l.in_dim && site->out == l.out_dim && (site->num_experts > 0) == is_moe;
    if (!fits) return kBadSite + 4 * s;
  }
  return 0;
}

}  // namespace
}  // namespace il

using namespace il;

int32_t il_lora_dense(const il_launch* launch, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, false)) return wrong;
  if (!l.accumulate) {
    for_all_rows(l, [&](const il_site* site, int row, int end) {
      for (; row < end; ++row) {
        if (site == nullptr) zero(out + row * out_stride, l.out_dim);
        else zero_gaps(*site, out + row * out_stride, l.out_dim);
      }
    });
  }
  Batch::Size size;
  for (int s = 0; s < l.num_segments; ++s)
    if (const il_site* site = site_of(l, l.segments[s])) size.add(*site, l.segments[s].rows, 1);
  Batch batch(size);
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    const il_site* site = site_of(l, segment);
    if (site == nullptr) continue;
    Bundle b = batch.bundle(segment.rows, false);
    for (int i = 0; i < segment.rows; ++i) {
      b.x[i] = x + (segment.row_start + i) * x_stride;
      b.out[i] = out + (segment.row_start + i) * out_stride;
    }
    batch.add(*site, 0, s, b);
  }
  run_apart(batch.groups(), l.accumulate != 0);
  return 0;
}

int32_t il_lora_moe_gate_up(const il_launch* launch, const float* x, int64_t x_stride, const int32_t* topk_ids,
                            float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, true)) return wrong;
  auto out_of = [&](int pair) {
    return out + pair / l.topk * out_stride + static_cast<int64_t>(pair % l.topk) * l.out_dim;
  };
  if (!l.accumulate) {
    for_all_rows(l, [&](const il_site* site, int row, int end) {
      for (int pair = row * l.topk; pair < end * l.topk; ++pair) {
        bool chosen = site != nullptr && topk_ids[pair] >= 0 && topk_ids[pair] < site->num_experts;
        if (chosen) zero_gaps(*site, out_of(pair), l.out_dim);
        else zero(out_of(pair), l.out_dim);
      }
    });
  }
  MoeSize size(l);
  Batch batch(size.batch, size.sort_bytes());
  auto* starts = batch.arena.take<int32_t>(size.experts + 2);
  auto* sorted = batch.arena.take<int32_t>(size.pairs);
  add_experts(batch, l, topk_ids, starts, sorted, false, [&](int pair, Bundle& b, int i) {
    b.x[i] = x + pair / l.topk * x_stride;
    b.out[i] = out_of(pair);
  });
  run_apart(batch.groups(), l.accumulate != 0);
  return 0;
}

int32_t il_lora_moe_down(const il_launch* launch, const float* act, int64_t act_stride, const int32_t* topk_ids,
                         const float* topk_weights, float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, true)) return wrong;
  if (!l.accumulate)
    for (int row = 0; row < l.rows; ++row) zero(out + row * out_stride, l.out_dim);
  MoeSize size(l);
  Batch batch(size.batch, size.sort_bytes());
  auto* starts = batch.arena.take<int32_t>(size.experts + 2);
  auto* sorted = batch.arena.take<int32_t>(size.pairs);
  add_experts(batch, l, topk_ids, starts, sorted, true, [&](int pair, Bundle& b, int i) {
    b.x[i] = act + pair / l.topk * act_stride + static_cast<int64_t>(pair % l.topk) * l.in_dim;
    b.out[i] = out + pair / l.topk * out_stride;
    b.weight[i] = topk_weights[pair];
  });
  run_meeting(batch.groups());
  return 0;
}
