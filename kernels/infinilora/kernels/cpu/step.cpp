// A site call from its plan to its delta without Python (step.h).
//
//   busy = 1; is the version still the plan's?   --no-->  busy = 0, Python looks        il_step_compute
//   version moves; wait until busy is 0                                                 il_step_shut
//
// Both orders are sequentially consistent: either the kernel sees the new version, or the waiter sees the kernel.
#include "step.h"

#include <cstring>

#include <sched.h>

#include "pool.h"

namespace il {
namespace {

constexpr int kSites = 16, kMoeGateUp = 4, kMoeDown = 5, kEmbed = 10;  // batch.py
constexpr int kMaxSegments = 512;                                      // of one call; more are left to Python

// The segments within rows [first, first + rows), counted from `first`. -1 where there are too many.
int cut(const il_step& step, int first, int rows, il_segment* to) {
  int n = 0;
  for (int s = 0; s < step.num_segments; ++s) {
    const il_segment& from = step.segments[s];
    const int begin = from.row_start > first ? from.row_start : first;
    const int from_end = from.row_start + from.rows, end = from_end < first + rows ? from_end : first + rows;
    if (begin >= end) continue;
    if (n == kMaxSegments) return -1;
    to[n++] = {begin - first, end - begin, from.slot};
  }
  return n;
}

// The same for rows that are named, in order: row r of the call is row heads[r * stride] of the step.
int cut_named(const il_step& step, const int32_t* heads, int stride, int rows, il_segment* to) {
  for (int r = 1; r < rows; ++r)
    if (heads[int64_t(r) * stride] < heads[int64_t(r - 1) * stride]) return -1;
  int n = 0, r = 0;
  for (int s = 0; s < step.num_segments && r < rows; ++s) {
    const il_segment& from = step.segments[s];
    while (r < rows && heads[int64_t(r) * stride] < from.row_start) ++r;
    const int begin = r;
    while (r < rows && heads[int64_t(r) * stride] < from.row_start + from.rows) ++r;
    if (begin == r) continue;
    if (n == kMaxSegments) return -1;
    to[n++] = {begin, r - begin, from.slot};
  }
  return n;
}

// A table [rows, columns] of 32-bit words without its first column, written to `to`; null where there is no table.
template <class T>
const T* tail(const T* table, int64_t rows, int64_t columns, T* to) {
  static_assert(sizeof(T) == 4);
  if (table == nullptr) return nullptr;
  const int64_t kept = columns - 1;
  for (int64_t r = 0; r < rows; ++r) memcpy(to + r * kept, table + r * columns + 1, size_t(kept) * 4);
  return to;
}

struct Call {
  int32_t site, rows, in, out, first_input, topk;
  const float* x;
  const int32_t* ids;
  const float* weights;
  float* to;
  const uint32_t* runs;
  uint32_t num_runs;
};

// The runs of a dense site's columns that the call asks for, each to its place in a row of out. A run that is none is
// refused by the launch; columns that no run fills would be sent as they are.
int32_t launch_runs(il_launch& l, const Call& c) {
  int64_t at = 0;
  for (uint32_t r = 0; r < c.num_runs; ++r) {
    const int64_t begin = c.runs[2 * r], columns = c.runs[2 * r + 1] - begin;
    if (columns < 1 || columns > c.out - at || begin > INT32_MAX - columns) return kBadSite;
    l.first_column = int32_t(begin);
    l.out_dim = int32_t(columns);
    if (int32_t wrong = il_lora_dense(&l, c.x, c.in, c.to + at, c.out)) return wrong;
    at += columns;
  }
  return at == c.out ? 0 : kBadSite;
}

int32_t launch(const il_step& step, int64_t place, const il_segment* segments, int num_segments, const Call& c) {
  il_launch l{.sites = step.table + place, .slot_stride = step.slot_stride, .segments = segments,
              .num_segments = num_segments, .num_slots = step.num_slots, .rows = c.rows, .topk = 1,
              .in_dim = c.in, .out_dim = c.out, .accumulate = 0, .first_column = kWhole,
              .first_input = c.first_input};
  const bool is_moe = c.site == kMoeGateUp || c.site == kMoeDown;
  if ((c.num_runs || c.first_input != kWhole) && (is_moe || c.site == kEmbed)) return kBadSite;
  if (c.num_runs) return launch_runs(l, c);
  if (c.site == kEmbed) return c.ids == nullptr || c.topk != 1 ? kBadSite : il_lora_embed(&l, c.ids, c.to, c.out);
  if (!is_moe) return il_lora_dense(&l, c.x, c.in, c.to, c.out);
  const int32_t routed = c.site == kMoeGateUp ? c.out : c.in;
  if (c.ids == nullptr || c.topk < 1 || routed % c.topk) return kBadSite;
  l.topk = c.topk;
  if (c.site == kMoeGateUp) {
    l.out_dim = c.out / c.topk;
    return il_lora_moe_gate_up(&l, c.x, c.in, c.ids, c.to, c.out);
  }
  if (c.weights == nullptr) return kBadSite;
  l.in_dim = c.in / c.topk;
  return il_lora_moe_down(&l, c.x, c.in, c.ids, c.weights, c.to, c.out);
}

int32_t compute(const il_step& step, uint32_t layer, uint32_t row_start, const Call& c) {
  const int64_t place = int64_t(layer) * kSites + c.site;
  if (place >= step.slot_stride || step.left_to_python[place]) return kDeclined;
  il_segment segments[kMaxSegments];
  const int n = cut(step, int(row_start), c.rows, segments);
  return n < 0 || launch(step, place, segments, n, c) ? kDeclined : kComputed;
}

int32_t compute_named(const il_step& step, uint32_t layer, Call c) {
  const int64_t place = int64_t(layer) * kSites + c.site;
  if (place >= step.slot_stride || step.left_to_python[place] || c.ids == nullptr || c.topk < 2) return kDeclined;
  il_segment segments[kMaxSegments];
  const int n = cut_named(step, c.ids, c.topk, c.rows, segments);
  if (n < 0) return kDeclined;
  const int64_t words = int64_t(c.rows) * (c.topk - 1);
  auto* ids = static_cast<int32_t*>(scratch(size_t(words) * 8, kOfTables));
  c.ids = tail(c.ids, c.rows, c.topk, ids);
  c.weights = tail(c.weights, c.rows, c.topk, reinterpret_cast<float*>(ids + words));
  --c.topk;
  return launch(step, place, segments, n, c) ? kDeclined : kComputed;
}

}  // namespace
}  // namespace il

int32_t il_step_compute(il_step* step, uint64_t step_id, uint32_t layer, uint32_t site, uint32_t row_start,
                        uint32_t rows, uint32_t in_cols, uint32_t out_cols, uint32_t in_begin, uint32_t in_end,
                        uint32_t topk, uint32_t has_rows, const uint32_t* runs, uint32_t num_runs, const float* x,
                        const int32_t* ids, const float* weights, float* out) {
  if (step->step_id != step_id || site >= uint32_t(il::kSites)) return kDeclined;
  if (int64_t(layer) >= step->ready_layers || uint64_t(row_start) + rows > INT32_MAX) return kDeclined;
  if (in_end && (in_end > INT32_MAX || in_begin >= in_end || in_end - in_begin != in_cols)) return kDeclined;
  const il::Call call{.site = int32_t(site), .rows = int32_t(rows), .in = int32_t(in_cols), .out = int32_t(out_cols),
                      .first_input = in_end ? int32_t(in_begin) : kWhole, .topk = int32_t(topk), .x = x, .ids = ids,
                      .weights = weights, .to = out, .runs = runs, .num_runs = num_runs};
  __atomic_store_n(&step->busy, 1u, __ATOMIC_SEQ_CST);
  int32_t status = kDeclined;
  if (__atomic_load_n(&step->version, __ATOMIC_SEQ_CST) == step->granted_version)
    status = has_rows ? il::compute_named(*step, layer, call) : il::compute(*step, layer, row_start, call);
  __atomic_store_n(&step->busy, 0u, __ATOMIC_RELEASE);
  return status;
}

void il_step_shut(il_step* step, uint64_t version) {
  __atomic_store_n(&step->version, version, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&step->busy, __ATOMIC_SEQ_CST)) sched_yield();
}
