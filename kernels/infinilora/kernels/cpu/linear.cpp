// y = x W^T + bias with a packed weight: how the product is cut into chunks.
#include "kernels.h"
#include "pool.h"

namespace {

int at_least_one(int n) { return n < 1 ? 1 : n; }
int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kRowBlock = 96;          // rows whose activations stay in the second cache beside a panel
constexpr int kChunksPerThread = 12;   // enough that the last one to finish is not waited for long
constexpr int64_t kAloneBytes = 65536; // below this the work is over before another thread has woken

}  // namespace

// x [rows, in] and y [rows, out] with row strides; packed as linear_kernels.h says; dtype kF32 or kBF16.
extern "C" void il_linear(const float* x, int64_t x_stride, const void* packed, int32_t dtype, const float* bias,
                          float* y, int64_t y_stride, int32_t rows, int32_t in, int32_t out) {
  using namespace il;
  const auto run = kernels().linear[dtype];
  int panels = ceil_div(out, kPanel), threads = num_threads();
  int row_blocks = at_least_one(ceil_div(rows, kRowBlock));
  if (panels < threads * 4) row_blocks = at_least_one(rows / 12 < threads * 4 ? ceil_div(rows, 12) : row_blocks);
  int64_t bytes = static_cast<int64_t>(in) * out * (dtype == kF32 ? 4 : 2);
  int wanted = at_least_one(ceil_div(threads * kChunksPerThread, row_blocks));
  int step = at_least_one(panels / wanted);
  int columns = ceil_div(panels, step);
  auto chunk = [&](int index, int) {
    int block = index / columns, panel = index % columns * step;
    int row = static_cast<int>(static_cast<int64_t>(rows) * block / row_blocks);
    int end = static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / row_blocks);
    int count = panels - panel < step ? panels - panel : step;
    run({x, x_stride, packed, bias, y, y_stride, in, out, row, end - row, panel, count});
  };
  int chunks = row_blocks * columns;
  if (threads == 1 || bytes * ceil_div(rows, 8) < kAloneBytes) {
    for (int index = 0; index < chunks; ++index) chunk(index, 0);
    return;
  }
  parallel_chunks(chunks, chunk);
}
