// The moves, compiled for AVX2.
#define MOVES_VECTOR 32
#include "moves_table.h"

namespace moves {
extern const Table kAvx2;
MOVES_TABLE(kAvx2);
}  // namespace moves
