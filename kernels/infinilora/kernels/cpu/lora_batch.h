// A launch of one site: what is wrong with it, its groups of rows that share weights (lora_groups.h), and the zeros
// where nothing is added.
//
//   dense     one bundle of rows for each segment
//   MoE       one for each (segment, expert) that some token of the segment chose: a virtual expert
//
// Each bundle gives one group for each part of its site.
#pragma once

#include <cstddef>
#include <cstring>

#include "lora.h"
#include "lora_groups.h"

namespace il {
namespace {

const void* element(const void* weights, int64_t index, int32_t dtype) {
  return static_cast<const char*>(weights) + static_cast<size_t>(index) * width(dtype);
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

// Of a slice of the inputs that begins later: null. It comes with the first of them.
const float* bias_of(const il_part& part, const il_launch& l) { return l.first_input > 0 ? nullptr : part.bias; }

// What a part adds to in a launch: columns [first, first + count) of the part, from column `at` of out on.
struct Place {
  int first, count, at;
};

Place place_of(const il_part& part, const il_launch& l) {
  if (part.rank == 0 && bias_of(part, l) == nullptr) return {};
  int from = l.first_column == kWhole ? 0 : l.first_column;
  int begin = max(part.out_offset, from), end = min(part.out_offset + part.out, from + l.out_dim);
  return {begin - part.out_offset, max(end - begin, 0), begin - from};
}

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
      return groups * (sizeof(Group) + 2 * sizeof(int)) + rows * 20 + v * 4 + 64 + padding;
    }
  };

  explicit Batch(const Size& size, size_t extra = 0) : arena(size.bytes() + extra) {
    list = arena.take<Group>(size.groups);
    first = arena.take<int>(2 * (size.groups + 1));
  }

  Bundle bundle(int rows, bool weighted) {
    return {arena.take<const float*>(rows), arena.take<float*>(rows), weighted ? arena.take<float>(rows) : nullptr,
            rows};
  }

  void add(const il_launch& l, const il_site& site, int expert, int segment, const Bundle& b) {
    const bool has_all_inputs = l.first_input == kWhole;
    for (int p = 0; p < site.num_parts; ++p) {
      const il_part& part = site.parts[p];
      const Place place = place_of(part, l);
      if (place.count == 0) continue;
      const int64_t a_start = expert * part.a_expert_stride + (has_all_inputs ? 0 : l.first_input);
      const int64_t bt_start = expert * part.bt_expert_stride + place.first;
      const float* bias = bias_of(part, l);
      list[count++] = {.a = element(part.a, a_start, site.dtype),
                       .bt = element(part.bt, bt_start, site.dtype),
                       .bias = bias == nullptr ? nullptr : bias + place.first,
                       .x = b.x, .out = b.out, .weight = b.weight,
                       .v = arena.take<float>(static_cast<size_t>(b.rows) * part.rank),
                       .a_stride = site.in, .bt_stride = part.out, .dtype = site.dtype,
                       .in = has_all_inputs ? site.in : l.in_dim, .rank = part.rank, .columns = place.count,
                       .out_offset = place.at, .rows = b.rows, .segment = segment, .scale = part.scale};
    }
  }

  Groups groups() const { return {list, count, first}; }
};

void zero(float* to, int64_t n) { memset(to, 0, static_cast<size_t>(n) * sizeof(float)); }

// Zeros the columns of one output row that no part writes. Parts do not overlap.
void zero_gaps(const il_launch& l, const il_site& site, float* row) {
  int filled = 0;
  for (int p = 0; p < site.num_parts; ++p) filled += place_of(site.parts[p], l).count;
  for (int at = 0; at < l.out_dim && filled < l.out_dim;) {
    int end = at, next = l.out_dim;
    for (int p = 0; p < site.num_parts; ++p) {
      const Place place = place_of(site.parts[p], l);
      if (place.count == 0) continue;
      if (place.at == at) end = at + place.count;
      else if (place.at > at) next = min(next, place.at);
    }
    if (end == at) zero(row + at, (end = next) - at);
    at = end;
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

constexpr int kAnyWidth = -1;

// 0, or the first thing wrong with the launch, whose input is `in` wide.
int32_t fault(const il_launch& l, int in, bool is_moe) {
  int at = 0;
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    bool inside = segment.rows >= 0 && segment.row_start >= at && segment.rows <= l.rows - segment.row_start;
    if (!inside || segment.slot < 0 || segment.slot >= l.num_slots) return kBadSegment + 4 * s;
    at = segment.row_start + segment.rows;
    const il_site* site = site_of(l, segment);
    if (site == nullptr) continue;
    bool covers = l.first_column == kWhole
                      ? site->out == l.out_dim
                      : l.first_column >= 0 && l.out_dim > 0 && l.out_dim <= site->out - l.first_column;
    bool takes = l.first_input == kWhole ? in == kAnyWidth || site->in == in
                                         : l.first_input >= 0 && in > 0 && in <= site->in - l.first_input;
    if (!takes || !covers || (site->num_experts > 0) != is_moe) return kBadSite + 4 * s;
  }
  return 0;
}

}  // namespace
}  // namespace il
