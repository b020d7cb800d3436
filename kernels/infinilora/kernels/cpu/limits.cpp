// Measures the machine, over the threads of the pool.
#include "kernels.h"
#include "pool.h"

extern "C" {

// Reads `floats` of memory once.
float il_measure_read(const float* x, int64_t floats) {
  constexpr int kChunks = 32;
  int64_t step = floats / kChunks / 128 * 128;
  float sums[kChunks];
  il::parallel_chunks(kChunks, [&](int i, int) { sums[i] = il::kernels().read_all(x + i * step, step); });
  float total = 0;
  for (float s : sums) total += s;
  return total;
}

// Does multiply-adds in registers on every thread; returns how many floating point operations those were.
int64_t il_measure_flops(int64_t steps) {
  constexpr int kChunks = 16;
  float sums[kChunks];
  il::parallel_chunks(kChunks, [&](int i, int) { sums[i] = il::kernels().multiply_add(steps, 0.5f); });
  float total = 0;
  for (float s : sums) total += s;
  return total > 1e30f ? 0 : il::kernels().multiply_add_flops(steps) * kChunks;
}
}
