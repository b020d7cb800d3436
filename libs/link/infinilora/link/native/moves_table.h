// The table of one instruction set; `MOVES_VECTOR` is the width of its registers in bytes.
#pragma once

#include "moves.h"

namespace moves {
namespace {

using namespace elements;
typedef float Vector __attribute__((vector_size(MOVES_VECTOR), aligned(4)));

void copy(char* to, const char* from, uint64_t bytes) {
  constexpr uint64_t kStep = 4 * sizeof(Vector);
  uint64_t at = 0;
  for (; at + kStep <= bytes; at += kStep) {
    const Vector* in = reinterpret_cast<const Vector*>(from + at);
    Vector* out = reinterpret_cast<Vector*>(to + at);
    const Vector a = in[0], b = in[1], c = in[2], d = in[3];
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
    asm volatile("" ::: "memory");  // or the compiler makes a call of memcpy of this loop
  }
  std::memcpy(to + at, from + at, bytes - at);
}

template <class In, class Out, bool kAdd> void take(const char* in, char* out, uint64_t n) {
  take_row<In, Out, kAdd>(reinterpret_cast<const In*>(in), reinterpret_cast<Out*>(out), n);
}

void take_as_is(const char* in, char* out, uint64_t n) { copy(out, in, 4 * n); }

#define MOVES_TAKE(In, Out) {take<In, Out, false>, take<In, Out, true>}
#define MOVES_TABLE(name)                                                          \
  const Table name = {copy,                                                        \
                      {{{take_as_is, take<F32, F32, true>}, MOVES_TAKE(F32, BF16), MOVES_TAKE(F32, F16)}, \
                       {MOVES_TAKE(BF16, F32), MOVES_TAKE(BF16, BF16), MOVES_TAKE(BF16, F16)},            \
                       {MOVES_TAKE(F16, F32), MOVES_TAKE(F16, BF16), MOVES_TAKE(F16, F16)}}}

}  // namespace
}  // namespace moves
