// y = x W^T + bias with a packed weight: how the product is cut into pieces, a panel each.
#include "kernels.h"
#include "pool.h"

namespace {

int at_least_one(int n) { return n < 1 ? 1 : n; }
int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kRowBlock = 96;          // rows whose activations stay in the second cache beside a panel
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
  int pieces = row_blocks * panels;
  auto piece = [&](int index, int) {
    int block = index / panels;
    int row = static_cast<int>(static_cast<int64_t>(rows) * block / row_blocks);
    int end = static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / row_blocks);
    run({x, x_stride, packed, bias, y, y_stride, in, out, row, end - row, index % panels, 1});
  };
  if (threads == 1 || bytes * ceil_div(rows, 8) < kAloneBytes) {
    wake_owed();
    for (int index = 0; index < pieces; ++index) piece(index, 0);
    return;
  }
  parallel_shares(pieces, piece);
}
