// The moves, compiled for AVX-512.
#define MOVES_VECTOR 64
#include "moves_table.h"

namespace moves {
extern const Table kAvx512;
MOVES_TABLE(kAvx512);
}  // namespace moves
