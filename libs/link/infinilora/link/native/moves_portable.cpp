// The moves, compiled for no set in particular.
#define MOVES_VECTOR 16
#include "moves_table.h"

namespace moves {
extern const Table kPortable;
MOVES_TABLE(kPortable);
}  // namespace moves
