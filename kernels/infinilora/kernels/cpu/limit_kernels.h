// What the processor can do at best, for benchmarks to measure against. Included once for each set.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

// Reads [0, n) floats and returns a number that depends on all of them.
float read_all(const float* x, int64_t n) {
  vf sums[8] = {};
  for (int64_t i = 0; i + 8 * kW <= n; i += 8 * kW)
    IL_UNROLL for (int j = 0; j < 8; ++j) {
      sums[j] += load(x + i + j * kW);
      __builtin_prefetch(x + i + j * kW + 1024);
    }
  IL_UNROLL for (int j = 1; j < 8; ++j) sums[0] += sums[j];
  return sum(sums[0]);
}

// `steps` times 12 vectors of multiply-adds that wait for nothing but one another's turn.
float multiply_add(int64_t steps, float by) {
  vf sums[12];
  IL_UNROLL for (int j = 0; j < 12; ++j) sums[j] = splat(by + static_cast<float>(j));
  vf factor = splat(by);
  for (int64_t i = 0; i < steps; ++i) {
    IL_UNROLL for (int j = 0; j < 12; ++j) sums[j] = sums[j] * factor + factor;
    asm volatile("" : : "r"(i));  // keeps the loop a loop
  }
  IL_UNROLL for (int j = 1; j < 12; ++j) sums[0] += sums[j];
  return sum(sums[0]);
}

int64_t multiply_add_flops(int64_t steps) { return steps * 12 * kW * 2; }

}  // namespace
}  // namespace il
