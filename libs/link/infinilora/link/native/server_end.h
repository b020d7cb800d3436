// The server's end: takes requests, has them computed where native code can, and answers.
#pragma once

#include "bells.h"
#include "rows.h"

namespace {

// Computes one site call, in fp32, into `out`; anything but 0: it did not, the frame is for Python.
using Compute = int32_t (*)(void* program, uint64_t step_id, uint32_t layer, uint32_t site, uint32_t row_start,
                            uint32_t rows, uint32_t in_cols, uint32_t out_cols, uint32_t in_begin, uint32_t in_end,
                            uint32_t topk, uint32_t has_rows, const uint32_t* runs, uint32_t num_runs, const float* x,
                            const int32_t* ids, const float* weights, float* out);

struct Times {  // of site calls computed; written by the serving thread alone
  uint64_t calls;
  int64_t last_ns, sum_ns;  // when the latest ended, on the monotonic clock; all of them together
  const int64_t* bounds;    // [num_bounds], rising
  uint64_t* counts;         // [num_bounds + 1]: calls that took at most bounds[i]; the last one: longer
  uint64_t num_bounds;

  void add(int64_t started, int64_t ended) {
    const int64_t took = ended - started;
    uint64_t i = 0;
    while (i < num_bounds && took > bounds[i]) ++i;
    ++counts[i];
    ++calls;
    sum_ns += took;
    last_ns = ended;
  }
};

struct Server : Rings {  // begins as zeros
  uint64_t taken;        // request frames done with
  int64_t began_ns;      // when the frame in hand was taken up
  float wide[];          // [capacity]: the input and the delta of a call in two-byte elements

  void release() {
    store(&file->consumed, ++taken);
    wake_if_waiting(file->engine);
  }

  Status recv(int64_t timeout_ns, FrameHeader** found) {
    FrameHeader* frame = *found = request(taken);
    const uint64_t word = taken + 1;
    if (is_shut(file->engine) || is_shut(file->server)) return kClosed;  // nobody waits for what is still there
    const Status status = await(*this, file->server, file->engine, deadline_after(timeout_ns),
                                [&] { return load(&frame->word) == word; });
    began_ns = now_ns();
    return status == kOk && !fits(*frame, capacity) ? kCorrupt : status;
  }

  // Publish the reply to the frame in hand (its payload is in the reply buffer already) and give the frame back.
  // Returns when the computing ended.
  int64_t answer(uint32_t kind, uint64_t payload_bytes) {
    const FrameHeader* from = request(taken);
    FrameHeader* frame = reply(from->sequence);
    std::memcpy(&frame->kind, &from->kind, sizeof(FrameHeader) - sizeof(frame->word));
    frame->kind = kind;
    frame->payload_bytes = payload_bytes;
    frame->began_ns = began_ns;
    const int64_t ended = frame->ended_ns = now_ns();
    store(&frame->word, from->sequence + 1);
    release();
    return ended;
  }

  bool computes(FrameHeader* h, Compute compute, void* program) {
    if (h->kind != kSite) return false;
    const bool has_runs = h->flags & kHasRuns;
    const auto* runs = has_runs ? reinterpret_cast<const uint32_t*>(h->trace) : &h->out_begin;
    uint32_t num_runs = 0;
    while (num_runs < (has_runs ? kMaxRuns : 1) && runs[2 * num_runs + 1]) ++num_runs;
    if (has_runs && !num_runs) return false;
    const uint64_t rows = h->rows, inputs = rows * h->in_cols, outputs = rows * h->out_cols;
    char *x = payload(h), *out = payload(reply(h->sequence));
    char* ids = x + aligned(inputs * width(h->dtype));
    char* weights = h->flags & kHasIds ? ids + rows * h->topk * 4 : ids;
    auto *x32 = reinterpret_cast<float*>(x), *out32 = reinterpret_cast<float*>(out);
    if (h->dtype != kF32) {
      x32 = wide, out32 = wide + inputs;
      best_moves().take[h->dtype][kF32][0](x, reinterpret_cast<char*>(x32), inputs);
    }
    if (compute(program, h->step_id, h->layer, h->site, h->row_start, h->rows, h->in_cols, h->out_cols, h->in_begin,
                h->in_end, h->topk, h->flags & kHasRows, runs, num_runs, x32,
                h->flags & kHasIds ? reinterpret_cast<int32_t*>(ids) : nullptr,
                h->flags & kHasWeights ? reinterpret_cast<float*>(weights) : nullptr, out32))
      return false;
    if (h->dtype != kF32) best_moves().take[kF32][h->dtype][0](reinterpret_cast<char*>(out32), out, outputs);
    return true;
  }

  Status serve(int64_t timeout_ns, Compute compute, void* program, Times& times, FrameHeader** found) {
    for (;;) {
      const Status status = recv(timeout_ns, found);
      if (status != kOk) return status;
      if (!computes(*found, compute, program)) return kOk;
      const uint64_t outputs = uint64_t((*found)->rows) * (*found)->out_cols;
      times.add(began_ns, answer(kReply, outputs * width((*found)->dtype)));
    }
  }

  uint64_t offset_of(const FrameHeader* frame) const {
    return uint64_t(reinterpret_cast<const char*>(frame) - base);
  }
};

}  // namespace
