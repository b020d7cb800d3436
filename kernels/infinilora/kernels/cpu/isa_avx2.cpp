// The kernels, compiled for AVX2.
#include "isa_table.h"

IL_DEFINE_TABLE(kAvx2, "avx2")
