// What a frame says, and whether it can be. As frame.py, which packs and reads the same bytes.
#pragma once

#include "elements.h"

namespace {

using namespace elements;

constexpr uint64_t kAlign = 64;
constexpr uint32_t kMaxRuns = 3;  // as MAX_RUNS in frame.py

enum Kind : uint32_t { kPlan = 1, kSite = 2, kReply = 3, kError = 4 };
enum Flag : uint32_t { kLast = 1, kHasIds = 2, kHasWeights = 4, kHasRows = 8, kHasRuns = 16 };

struct FrameHeader {
  uint64_t word;
  uint32_t kind, flags;
  uint64_t step_id, sequence;
  uint32_t layer, site, row_start, rows, in_cols, out_cols;
  uint32_t in_begin, in_end, out_begin, out_end;
  uint32_t topk, dtype;
  uint64_t payload_bytes;
  int64_t began_ns;  // of an answer: when the server took the call up and had computed it, on its monotonic clock
  uint8_t trace[24];  // with kHasRuns: kMaxRuns pairs of columns [begin, end), zeros where there are fewer
  int64_t ended_ns;
};
static_assert(sizeof(FrameHeader) == 128, "frame.py packs 128 bytes");

char* payload(FrameHeader* frame) { return reinterpret_cast<char*>(frame) + sizeof(FrameHeader); }

uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Whether the fields of a frame agree with one another and with the buffers. As Header.check in frame.py.
bool fits(const FrameHeader& h, uint64_t capacity) {
  const uint64_t rows = h.rows;
  if (h.dtype > kF16) return false;
  if (h.kind == kPlan) return h.payload_bytes == rows * 16 && h.payload_bytes <= capacity;
  if (h.kind != kSite) return false;
  if (h.flags & kHasRows && (!(h.flags & kHasIds) || h.topk < 2)) return false;
  if (rows * h.in_cols > capacity) return false;  // also keeps what follows from overflowing
  uint64_t bytes = rows * h.in_cols * width(h.dtype);
  const uint64_t routed = ((h.flags & kHasIds) != 0) + ((h.flags & kHasWeights) != 0);
  if (bytes > capacity || rows * h.topk > capacity) return false;
  if (routed) bytes = aligned(bytes) + routed * rows * h.topk * 4;
  return bytes == h.payload_bytes && bytes <= capacity && rows * h.out_cols <= capacity &&
         rows * h.out_cols * width(h.dtype) <= capacity;
}

}  // namespace
