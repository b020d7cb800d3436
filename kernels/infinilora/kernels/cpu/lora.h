// The descriptors that Python fills in (abi.py holds the same structures), and the calls that read them.
#pragma once

#include <cstdint>

extern "C" {

constexpr int kMaxParts = 4;

struct il_part {
  const void* a;   // [r, in] of expert 0
  const void* bt;  // [r, out] of expert 0
  int64_t a_expert_stride;  // elements between experts
  int64_t bt_expert_stride;
  int32_t rank;
  int32_t out;
  int32_t out_offset;
  float scale;
  const float* bias;  // [out], added as it is, or null; null for experts
};

struct il_site {
  int32_t num_parts;
  int32_t dtype;        // il::Dtype
  int32_t in, out;
  int32_t num_experts;  // 0: dense
  int32_t reserved;
  il_part parts[kMaxParts];
};

struct il_segment {
  int32_t row_start, rows, slot;
};

// sites[slot * slot_stride] is the site of a slot, or null: unbound, adds nothing.
struct il_launch {
  const il_site* const* sites;
  int64_t slot_stride;
  const il_segment* segments;  // in order of rows, not overlapping
  int32_t num_segments, num_slots;
  int32_t rows, topk;          // of x and out; topk is 1 for dense sites
  int32_t in_dim, out_dim;     // of the site, as the caller's tensors have them
  int32_t accumulate;
  int32_t first_column;        // of the site, where out has a slice of its columns; kWhole: out has all
  int32_t first_input;         // likewise where x has a slice of its inputs: out then has their part of the delta
};

enum { kWhole = -1 };

// Each returns 0, or what is wrong with the launch: kBadSegment or kBadSite, plus 4 times the segment's number.
// Nothing is written then. Strides are of rows, in floats; within a row all is contiguous.
enum { kBadSegment = 1, kBadSite = 2 };

// x [rows, in] -> out [rows, out]. Of a slice only those columns of A and Bt are read. A bias belongs to the part of
// the first input.
int32_t il_lora_dense(const il_launch* launch, const float* x, int64_t x_stride, float* out, int64_t out_stride);

// token_ids [rows] -> out [rows, out]: as il_lora_dense of a one-hot x. The launch's in_dim is of no account; an id
// outside of a segment's site is kBadSite.
int32_t il_lora_embed(const il_launch* launch, const int32_t* token_ids, float* out, int64_t out_stride);

// x [rows, in], topk_ids [rows, topk] -> out [rows, topk, out].
int32_t il_lora_moe_gate_up(const il_launch* launch, const float* x, int64_t x_stride, const int32_t* topk_ids,
                            float* out, int64_t out_stride);

// act [rows, topk, in], topk_ids and topk_weights [rows, topk] -> out [rows, out].
int32_t il_lora_moe_down(const il_launch* launch, const float* act, int64_t act_stride, const int32_t* topk_ids,
                         const float* topk_weights, float* out, int64_t out_stride);
}
