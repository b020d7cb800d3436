// What one link may compute without Python: a step's plan, checked against the grants.
#pragma once

#include "lora.h"

extern "C" {

// Filled in by Python (step.py) while nobody computes with it; `version` and `busy` alone are shared between threads.
struct il_step {
  uint64_t version;  // how often something granted was taken back: moved by the pool's threads
  uint32_t busy;     // 1 while a kernel reads what the grants protect
  int32_t ready_layers;
  uint64_t granted_version;  // what it was when this plan was checked against the grants
  uint64_t step_id;
  const il_segment* segments;  // of the whole step, in order of rows
  const il_site* const* table;  // [slot][place] of the pool
  const uint8_t* left_to_python;  // [place]: 1 where C computes only a part of the delta
  int64_t slot_stride;            // places of a slot
  int32_t num_segments, num_slots;
};

enum { kComputed = 0, kDeclined = 1 };

// One site call in fp32, rows side by side as on the link; writes out [rows, out_cols] whole. kDeclined, and nothing
// written that counts, where a grant was taken back or Python is needed: it finds out why, and says so. With `has_rows`
// the first of the topk ids of each row is its row of the step, and the first of its weights is nothing. With `runs`,
// pairs [begin, end), the columns of out are those runs of a dense site's, side by side. With in_end not 0, x has the
// inputs [in_begin, in_end) of a dense site, and out is their part of the delta.
int32_t il_step_compute(il_step* step, uint64_t step_id, uint32_t layer, uint32_t site, uint32_t row_start,
                        uint32_t rows, uint32_t in_cols, uint32_t out_cols, uint32_t in_begin, uint32_t in_end,
                        uint32_t topk, uint32_t has_rows, const uint32_t* runs, uint32_t num_runs, const float* x,
                        const int32_t* ids, const float* weights, float* out);

// Something granted was taken back; returns when no kernel runs by what was before.
void il_step_shut(il_step* step, uint64_t version);
}
