// Row-wise operations: alone when the rows are few, in chunks of rows otherwise.
#include "kernels.h"
#include "pool.h"

namespace {

constexpr int64_t kChunkFloats = 16384;  // a few microseconds of work

template <class Row>
void for_rows(int rows, int64_t row_floats, const Row& row) {
  int step = static_cast<int>(kChunkFloats / (row_floats < 1 ? 1 : row_floats));
  if (step < 1) step = 1;
  auto chunk = [&](int index, int) {
    int end = (index + 1) * step < rows ? (index + 1) * step : rows;
    for (int i = index * step; i < end; ++i) row(i);
  };
  int chunks = (rows + step - 1) / step;
  if (chunks > 3) return il::parallel_chunks(chunks, chunk);
  for (int index = 0; index < chunks; ++index) chunk(index, 0);
}

}  // namespace

extern "C" {

void il_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride, const float* weight,
                 float eps, float* y, int32_t rows, int32_t n) {
  const auto run = il::kernels().rms_norm;
  for_rows(rows, n, [&](int i) {
    run(x + i * x_stride, residual == nullptr ? nullptr : residual + i * residual_stride, weight, eps,
        y + static_cast<int64_t>(i) * n, n);
  });
}

void il_silu_mul(const float* gate_up, int64_t stride, float* y, int32_t rows, int32_t n) {
  const auto run = il::kernels().silu_mul;
  for_rows(rows, 4 * n, [&](int i) {
    run(gate_up + i * stride, gate_up + i * stride + n, y + static_cast<int64_t>(i) * n, n);
  });
}

// In place on `heads` heads of each row, head_dim apart; positions int32 or int64; tables [positions, half].
void il_rope(float* x, int64_t row_stride, int32_t heads, int32_t head_dim, const void* positions,
             int32_t positions_are_64, const float* cos, const float* sin, int32_t half, int32_t rows) {
  const auto run = il::kernels().rope;
  for_rows(rows, static_cast<int64_t>(heads) * head_dim, [&](int i) {
    int64_t position = positions_are_64 ? static_cast<const int64_t*>(positions)[i]
                                        : static_cast<const int32_t*>(positions)[i];
    for (int h = 0; h < heads; ++h)
      run(x + i * row_stride + h * head_dim, cos + position * half, sin + position * half, half);
  });
}
}
