// SHA-256 (FIPS 180-4) of several stretches of memory, two at a time: a round waits for the round before it, so that a
// processor is half idle with one of them.
//
//   stretches, in order -->  lane 0: | blocks of 64 bytes ... | padded end |  --> digest, next stretch
//                            lane 1: |            ...         |            |
//
// Only where the processor has instructions for it; whoever asks has another way where it has not.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

extern "C" struct il_stretch {
  const uint8_t* data;
  int64_t bytes;
};

#if defined(__x86_64__)
#define IL_SHA __attribute__((target("sha,sse4.1,ssse3")))

namespace il {
namespace {

constexpr int64_t kBlock = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// One stretch on its way. The state is a..h as the instructions have it: a b e f and c d g h, from the highest word on.
struct Lane {
  __m128i abef, cdgh;
  const uint8_t* at;
  int64_t blocks;     // left at `at`
  int64_t end_blocks;  // of `end`, still to come after those
  uint8_t end[2 * kBlock];
  uint8_t* digest;
};

IL_SHA void begin(Lane& lane, const il_stretch& stretch, uint8_t* digest) {
  lane.abef = _mm_set_epi32(0x6a09e667, int(0xbb67ae85), 0x510e527f, int(0x9b05688c));
  lane.cdgh = _mm_set_epi32(0x3c6ef372, int(0xa54ff53a), 0x1f83d9ab, 0x5be0cd19);
  lane.at = stretch.data;
  lane.blocks = stretch.bytes / kBlock;
  lane.digest = digest;
  const int64_t left = stretch.bytes % kBlock;
  lane.end_blocks = left + 9 > kBlock ? 2 : 1;  // a bit that is set, and the length in eight bytes
  memset(lane.end, 0, sizeof lane.end);
  if (left) memcpy(lane.end, stretch.data + stretch.bytes - left, size_t(left));
  lane.end[left] = 0x80;
  const uint64_t bits = __builtin_bswap64(uint64_t(stretch.bytes) * 8);
  memcpy(lane.end + lane.end_blocks * kBlock - 8, &bits, 8);
}

// False when the stretch is over: its digest is written then.
IL_SHA bool goes_on(Lane& lane) {
  if (lane.blocks) return true;
  if (lane.end_blocks) {
    lane.at = lane.end;
    lane.blocks = lane.end_blocks;
    lane.end_blocks = 0;
    return true;
  }
  alignas(16) uint32_t high[4], low[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(high), lane.abef);
  _mm_store_si128(reinterpret_cast<__m128i*>(low), lane.cdgh);
  const uint32_t words[8] = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(words[i]);
    memcpy(lane.digest + 4 * i, &word, 4);
  }
  return false;
}

// Takes all lanes on by so many blocks, side by side.
template <int kLanes> IL_SHA void run(Lane* const* lanes, int64_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i abef[kLanes], cdgh[kLanes], w[kLanes][4];
  for (int n = 0; n < kLanes; ++n) abef[n] = lanes[n]->abef, cdgh[n] = lanes[n]->cdgh;
  for (int64_t block = 0; block < blocks; ++block) {
    __m128i first_abef[kLanes], first_cdgh[kLanes];
    for (int n = 0; n < kLanes; ++n) {
      first_abef[n] = abef[n], first_cdgh[n] = cdgh[n];
      const auto* data = reinterpret_cast<const __m128i*>(lanes[n]->at + block * kBlock);
      for (int i = 0; i < 4; ++i) w[n][i] = _mm_shuffle_epi8(_mm_loadu_si128(data + i), swap);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; ++i) {  // four rounds each: words 4i to 4i + 3 of the schedule
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i);
      for (int n = 0; n < kLanes; ++n) {
        __m128i& here = w[n][i & 3];
        const __m128i word = _mm_add_epi32(here, k);
        cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], word);
        abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(word, 0x0e));
        if (i < 12) {
          const __m128i second = w[n][(i + 1) & 3], third = w[n][(i + 2) & 3], last = w[n][(i + 3) & 3];
          const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(here, second), _mm_alignr_epi8(last, third, 4));
          here = _mm_sha256msg2_epu32(sum, last);
        }
      }
    }
    for (int n = 0; n < kLanes; ++n) {
      abef[n] = _mm_add_epi32(abef[n], first_abef[n]);
      cdgh[n] = _mm_add_epi32(cdgh[n], first_cdgh[n]);
    }
  }
  for (int n = 0; n < kLanes; ++n) {
    lanes[n]->abef = abef[n], lanes[n]->cdgh = cdgh[n];
    lanes[n]->at += blocks * kBlock;
    lanes[n]->blocks -= blocks;
  }
}

}  // namespace
}  // namespace il
#endif

namespace il {
namespace {

bool detect_sha() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 19)) || !(c & (1u << 9))) return false;  // SSE4.1, SSSE3
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
#else
  return false;
#endif
}

const bool has_sha = detect_sha();

}  // namespace
}  // namespace il

extern "C" {

// Whether this processor has the instructions.
int32_t il_has_sha256() { return il::has_sha; }

// Writes 32 bytes for each stretch. Only where `il_has_sha256`.
void il_sha256(const il_stretch* stretches, int32_t count, uint8_t* digests) {
#if defined(__x86_64__)
  il::Lane memory[2];
  il::Lane* lanes[2];
  int used = 0, next = 0;
  for (;;) {
    while (used < 2 && next < count) {
      lanes[used] = &memory[used == 1 && lanes[0] == &memory[1] ? 0 : used];
      il::begin(*lanes[used++], stretches[next], digests + 32 * int64_t(next));
      ++next;
    }
    for (int n = used; n-- > 0;)
      if (!il::goes_on(*lanes[n])) lanes[n] = lanes[--used];
    if (used == 2) {
      const int64_t least = lanes[0]->blocks < lanes[1]->blocks ? lanes[0]->blocks : lanes[1]->blocks;
      il::run<2>(lanes, least);
    } else if (used == 1) {
      if (next == count) il::run<1>(lanes, lanes[0]->blocks);
    } else if (next == count) {
      return;
    }
  }
#else
  (void)stretches, (void)count, (void)digests;
#endif
}
}
