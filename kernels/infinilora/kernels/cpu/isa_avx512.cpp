// The kernels, compiled for AVX-512.
#include "isa_table.h"

IL_DEFINE_TABLE(kAvx512, "avx512")
