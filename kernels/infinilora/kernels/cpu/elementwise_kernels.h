// Exponential, normalisation, activation, rotation: one row or head at a time. Included once for each set.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace il {
namespace {

// e^x, to about 1 ulp: x = n ln 2 + r, a polynomial in r, then n added to the exponent. Clamped, no infinities.
IL_INLINE vf exponential(vf x) {
  x = x > 88.0f ? splat(88.0f) : x;
  x = x < -87.0f ? splat(-87.0f) : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = x * 1.44269504088896341f + kRound;
  vf n = shifted - kRound;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return from_bits(to_bits(p) + (to_bits(shifted) << 23));
}

// With a residual: residual += x, and the norm of the sum.
void rms_norm(const float* x, float* residual, const float* weight, float eps, float* y, int n) {
  vf squares = {};
  float tail = 0.0f;
  int i = 0;
  for (; i + kW <= n; i += kW) {
    vf v = load(x + i);
    if (residual != nullptr) store(residual + i, v += load(residual + i));
    squares += v * v;
  }
  for (; i < n; ++i) {
    float v = x[i];
    if (residual != nullptr) v = residual[i] += v;
    tail += v * v;
  }
  const float* from = residual != nullptr ? residual : x;
  float scale = 1.0f / __builtin_sqrtf((sum(squares) + tail) / static_cast<float>(n) + eps);
  for (i = 0; i + kW <= n; i += kW) store(y + i, load(from + i) * scale * load(weight + i));
  for (; i < n; ++i) y[i] = from[i] * scale * weight[i];
}

IL_INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }

void silu_mul(const float* gate, const float* up, float* y, int n) {
  int i = 0;
  for (; i + kW <= n; i += kW) store(y + i, silu(load(gate + i)) * load(up + i));
  if (int left = n - i; left > 0)
    store_first(y + i, silu(load_first(gate + i, left)) * load_first(up + i, left), left);
}

// Turns the pairs (i, i + half) of one head.
void rope(float* head, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + kW <= half; i += kW) {
    vf a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

}  // namespace
}  // namespace il
