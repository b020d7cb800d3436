// Vectors of the instruction set that the including file is compiled for. Everything here is local to that
// file (unnamed namespace): code compiled for AVX-512 must never be picked for a caller on a lesser processor.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace il {
namespace {

#if defined(__AVX512F__)
constexpr int kW = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int kW = 8;
#else
constexpr int kW = 4;
#endif

typedef float vf __attribute__((vector_size(kW * 4)));
typedef int32_t vi __attribute__((vector_size(kW * 4)));
typedef uint32_t vu __attribute__((vector_size(kW * 4)));
typedef uint16_t vh __attribute__((vector_size(kW * 2)));

#define IL_INLINE inline __attribute__((always_inline))

// Before each loop over registers: unrolled whole, or its arrays end up in memory.
#if defined(__clang__)
#define IL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define IL_UNROLL _Pragma("GCC unroll 64")
#endif

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T>
IL_INLINE T load_as(const void* p) {
  T v;
  memcpy(&v, p, sizeof(T));
  return v;
}

IL_INLINE vf splat(float x) { return x - vf{}; }

IL_INLINE vf load(const float* p) { return load_as<vf>(p); }
IL_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof(v)); }

IL_INLINE vf from_bits(vu v) {
  vf f;
  memcpy(&f, &v, sizeof(f));
  return f;
}

IL_INLINE vu to_bits(vf v) {
  vu u;
  memcpy(&u, &v, sizeof(u));
  return u;
}

// bf16 is the upper half of a float.
IL_INLINE vf load(const bf16* p) { return from_bits(__builtin_convertvector(load_as<vh>(p), vu) << 16); }

IL_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  // Move sign, exponent and fraction to their places, then correct the exponent's bias by a product, which
  // is exact and right for subnormals too; infinities and NaN keep an exponent of all ones.
  vu h = __builtin_convertvector(load_as<vh>(p), vu);
  vf f = from_bits((h & 0x7fff) << 13) * 0x1p112f;
  vu all_ones = (vu)((h & 0x7c00) == 0x7c00);
  return from_bits(to_bits(f) | (all_ones & 0x7f800000) | (h & 0x8000) << 16);
#endif
}

// The first n (< kW) elements at p, zeros after them.
template <class T>
IL_INLINE vf load_first(const T* p, int n) {
  alignas(64) T whole[kW] = {};
  memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
  return load(whole);
}

IL_INLINE void store_first(float* p, vf v, int n) {
  alignas(64) float whole[kW];
  store(whole, v);
  memcpy(p, whole, static_cast<size_t>(n) * sizeof(float));
}

// A single element, widened.
IL_INLINE float widen(float x) { return x; }
template <class T>
IL_INLINE float widen(T x) { return load_first(&x, 1)[0]; }

IL_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// Lane i of `a` next to the lanes of `b`: shuffle(a, b, index(0), index(1), ...) with index known at compile
// time, so that each is one instruction.
template <class Index, int... Lane>
IL_INLINE vf shuffle(vf a, vf b, Index, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, Index::of(Lane)...);
}
using Lanes = std::make_integer_sequence<int, kW>;

template <int Distance>
struct Across {
  static constexpr int of(int lane) { return lane ^ Distance; }
};

template <int Distance = kW / 2>
IL_INLINE float sum(vf v) {
  v += shuffle(v, v, Across<Distance>{}, Lanes{});
  if constexpr (Distance > 1) return sum<Distance / 2>(v);
  return v[0];
}

template <int Distance = kW / 2>
IL_INLINE float largest(vf v) {
  v = vmax(v, shuffle(v, v, Across<Distance>{}, Lanes{}));
  if constexpr (Distance > 1) return largest<Distance / 2>(v);
  return v[0];
}

// All bits of the first n lanes.
IL_INLINE vi first_lanes(int n) {
  vi lane;
  IL_UNROLL for (int i = 0; i < kW; ++i) lane[i] = i;
  return lane < n;
}

// Every block of Width lanes: its lower (or upper) half of `a`, then the same half of `b`.
template <int Width, bool Upper>
struct Halves {
  static constexpr int of(int lane) {
    int half = Width / 2, block = lane / Width * Width, inside = lane % Width;
    return block + inside % half + (Upper ? half : 0) + (inside >= half ? kW : 0);
  }
};

// v[0][i] = the sum of v[i], for i < kW; destroys the others. A tree: three instructions for each vector.
template <int Count = kW>
IL_INLINE void sum_each(vf* v) {
  IL_UNROLL for (int i = 0; i < Count / 2; ++i) {
    vf a = v[i], b = v[i + Count / 2];
    v[i] = shuffle(a, b, Halves<Count, false>{}, Lanes{}) + shuffle(a, b, Halves<Count, true>{}, Lanes{});
  }
  if constexpr (Count > 2) sum_each<Count / 2>(v);
}

}  // namespace
}  // namespace il
