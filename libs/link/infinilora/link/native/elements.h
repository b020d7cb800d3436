// The three element types of activations, with conversion by bits: no processor feature is assumed.
// Loops over rows of F32 and BF16 vectorise; F16 is right and slower.

#pragma once

#include <cstdint>
#include <cstring>

namespace elements {

enum Dtype : uint32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };  // the order of DTYPES in link/frame.py

inline uint64_t width(uint32_t dtype) { return dtype == kF32 ? 4 : 2; }

struct F32 {
  float value;
  float get() const { return value; }
  void set(float v) { value = v; }
};

struct BF16 {
  uint16_t bits;
  float get() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float v;
    std::memcpy(&v, &wide, 4);
    return v;
  }
  void set(float v) {  // round to nearest, ties to even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &v, 4);
    const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    bits = uint16_t((wide & 0x7fffffffu) > 0x7f800000u ? (wide >> 16) | 0x40u : rounded);
  }
};

struct F16 {
  uint16_t bits;
  float get() const {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
      const float v = float(mantissa) * 5.9604644775390625e-8f;
      return sign ? -v : v;
    }
    const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13));
    float v;
    std::memcpy(&v, &wide, 4);
    return v;
  }
  void set(float v) {
    uint32_t wide;
    std::memcpy(&wide, &v, 4);
    const uint32_t sign = (wide >> 16) & 0x8000u, magnitude = wide & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more: infinity
      half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the FPU round the mantissa in place
      float small;
      std::memcpy(&small, &magnitude, 4);
      small += 0.5f;
      std::memcpy(&half, &small, 4);
      half -= 0x3f000000u;
    } else {
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = uint16_t(sign | half);
  }
};

template <class In, class Out, bool kAdd> void take_row(const In* __restrict in, Out* __restrict out, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) out[i].set(kAdd ? out[i].get() + in[i].get() : in[i].get());
}

}  // namespace elements
