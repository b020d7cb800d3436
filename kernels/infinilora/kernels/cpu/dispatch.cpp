// Chooses the instruction set, by asking the processor once.
#include "kernels.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace il {
namespace {

int detect_level() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  bool fma = c & (1u << 12), f16c = c & (1u << 29), xsave = c & (1u << 27);
  if (!fma || !f16c || !xsave) return 0;
  unsigned enabled, high;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));  // which registers the kernel saves
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  bool avx2 = (b & (1u << 5)) && (enabled & 0x6) == 0x6;
  if (!avx2) return 0;
  constexpr unsigned kWanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  return (b & kWanted) == kWanted && (enabled & 0xe6) == 0xe6 ? 2 : 1;
#else
  return 0;
#endif
}

const int detected = detect_level();
int level = detected;

}  // namespace

const Kernels& kernels() {
#if defined(__x86_64__)
  if (level == 2) return kAvx512;
  if (level == 1) return kAvx2;
#endif
  return kPortable;
}

int first_cache_bytes() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  if (long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE); bytes > 0) return static_cast<int>(bytes);
#endif
  return 32768;
}

}  // namespace il

extern "C" {

// Uses no stronger set than `limit` (0 portable, 1 AVX2, 2 AVX-512) from now on; returns the one in use.
// Weights packed before stay as they are: set it before packing.
int il_limit_level(int limit) {
  il::level = limit < il::detected ? (limit < 0 ? 0 : limit) : il::detected;
  return il::level;
}

int il_level() { return il::level; }
}
