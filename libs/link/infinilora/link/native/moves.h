// Moving rows into and out of the rings, compiled once for each instruction set: the C library's own memcpy is not
// the fastest on every virtual machine (some hide from it what the processor can do).
#pragma once

#include "elements.h"

namespace moves {

struct Table {
  void (*copy)(char* to, const char* from, uint64_t bytes);
  // By the wire's dtype, y's dtype, and whether to add: out[i] (+)= in[i] for n elements.
  void (*take[3][3][2])(const char* in, char* out, uint64_t n);
};

extern const Table kPortable;
#if defined(__x86_64__)
extern const Table kAvx2, kAvx512;
#endif

}  // namespace moves
