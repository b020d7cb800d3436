// LoRA deltas of experts: the (token, choice) pairs of all adapters at once.
#include "lora_batch.h"

namespace il {
namespace {

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
        batch.add(l, *site, e, s, b);
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

}  // namespace
}  // namespace il

using namespace il;

int32_t il_lora_moe_gate_up(const il_launch* launch, const float* x, int64_t x_stride, const int32_t* topk_ids,
                            float* out, int64_t out_stride) {
  const il_launch& l = *launch;
  if (int32_t wrong = fault(l, l.in_dim, true)) return wrong;
  auto out_of = [&](int pair) {
    return out + pair / l.topk * out_stride + static_cast<int64_t>(pair % l.topk) * l.out_dim;
  };
  if (!l.accumulate) {
    for_all_rows(l, [&](const il_site* site, int row, int end) {
      for (int pair = row * l.topk; pair < end * l.topk; ++pair) {
        bool chosen = site != nullptr && topk_ids[pair] >= 0 && topk_ids[pair] < site->num_experts;
        if (chosen) zero_gaps(l, *site, out_of(pair));
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
  if (int32_t wrong = fault(l, l.in_dim, true)) return wrong;
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
