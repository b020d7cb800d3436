// The kernels, compiled for portable.
#include "isa_table.h"

IL_DEFINE_TABLE(kPortable, "portable")
