// Times calls of the LoRA kernels one by one, as a link's serving thread makes them: for benchmarks.
#pragma once

#include "lora.h"

extern "C" {

enum { kMeasureDense = 0, kMeasureGateUp = 1, kMeasureDown = 2 };

struct il_measured {
  il_launch launch;
  const float* x;
  int64_t x_stride;
  const int32_t* ids;    // of experts
  const float* weights;  // of down
  float* out;
  int64_t out_stride;
  int64_t took_ns;  // the answer
  int32_t kind, reserved;
};

// Makes each of the calls once, in order. Returns 0, or what the first call that is refused returned.
int32_t il_measure_lora(il_measured* calls, int32_t count);
}
