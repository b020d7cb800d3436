#include "measure.h"

#include <time.h>

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int32_t run(const il_measured& c) {
  switch (c.kind) {
    case kMeasureGateUp: return il_lora_moe_gate_up(&c.launch, c.x, c.x_stride, c.ids, c.out, c.out_stride);
    case kMeasureDown: return il_lora_moe_down(&c.launch, c.x, c.x_stride, c.ids, c.weights, c.out, c.out_stride);
  }
  return il_lora_dense(&c.launch, c.x, c.x_stride, c.out, c.out_stride);
}

}  // namespace

int32_t il_measure_lora(il_measured* calls, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    const int64_t start = now_ns();
    if (int32_t wrong = run(calls[i])) return wrong;
    calls[i].took_ns = now_ns() - start;
  }
  return 0;
}
