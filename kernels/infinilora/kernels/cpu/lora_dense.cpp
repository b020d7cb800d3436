// LoRA deltas of dense sites, whole or of a slice of their columns or inputs, and of the embedding.
#include "lora_batch.h"
#include "vec.h"

namespace il {
namespace {

// Every row that no segment names, or that has nothing here, and all columns that no part writes.
void zero_rest(const il_launch& l, float* out, int64_t out_stride) {
  for_all_rows(l, [&](const il_site* site, int row, int end) {
    for (; row < end; ++row) {
      if (site == nullptr) zero(out + row * out_stride, l.out_dim);
      else zero_gaps(l, *site, out + row * out_stride);
    }
  });
}

Batch::Size size_of(const il_launch& l) {
  Batch::Size size;
  for (int s = 0; s < l.num_segments; ++s)
    if (const il_site* site = site_of(l, l.segments[s])) size.add(*site, l.segments[s].rows, 1);
  return size;
}

// A bundle for each segment; x_of(row) is a row's input.
template <class X>
void add_segments(Batch& batch, const il_launch& l, float* out, int64_t out_stride, const X& x_of) {
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    const il_site* site = site_of(l, segment);
    if (site == nullptr) continue;
    Bundle b = batch.bundle(segment.rows, false);
    for (int i = 0; i < segment.rows; ++i) {
      b.x[i] = x_of(segment.row_start + i);
      b.out[i] = out + (segment.row_start + i) * out_stride;
    }
    batch.add(l, *site, 0, s, b);
  }
}

// Whether every token of the segment has a column in its site.
bool has_tokens(const il_site& site, const int32_t* token_ids, int rows) {
  for (int i = 0; i < rows; ++i)
    if (token_ids[i] < 0 || token_ids[i] >= site.in) return false;
  return true;
}

// v[i] = the column of A of row i's token: what shrink gives for a one-hot x.
template <class W>
void pick_columns(const Group& g, const int32_t* token_ids) {
  const W* a = static_cast<const W*>(g.a);
  for (int i = 0; i < g.rows; ++i)
    for (int r = 0; r < g.rank; ++r)
      g.v[static_cast<int64_t>(i) * g.rank + r] = g.scale * widen(a[r * g.a_stride + token_ids[i]]);
}

void pick_columns(const Group& g, const int32_t* token_ids) {
  switch (g.dtype) {
    case kF32: return pick_columns<float>(g, token_ids);
    case kBF16: return pick_columns<bf16>(g, token_ids);
    case kF16: return pick_columns<f16>(g, token_ids);
  }
}

}  // namespace
}  // namespace il

using namespace il;

int32_t il_lora_dense(const il_launch* launch, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, l.in_dim, false)) return wrong;
  if (!l.accumulate) zero_rest(l, out, out_stride);
  Batch batch(size_of(l));
  add_segments(batch, l, out, out_stride, [&](int row) { return x + row * x_stride; });
  run_apart(batch.groups(), l.accumulate != 0);
  return 0;
}

int32_t il_lora_embed(const il_launch* launch, const int32_t* token_ids, float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, kAnyWidth, false)) return wrong;
  for (int s = 0; s < l.num_segments; ++s) {
    const il_segment& segment = l.segments[s];
    const il_site* site = site_of(l, segment);
    if (site && !has_tokens(*site, token_ids + segment.row_start, segment.rows)) return kBadSite + 4 * s;
  }
  if (!l.accumulate) zero_rest(l, out, out_stride);
  Batch batch(size_of(l));
  add_segments(batch, l, out, out_stride, [](int) { return nullptr; });
  for (int g = 0; g < batch.count; ++g) {
    const Group& group = batch.list[g];
    pick_columns(group, token_ids + l.segments[group.segment].row_start);
    expand(group, 0, group.rows, 0, group.columns, l.accumulate != 0, {});
  }
  return 0;
}
