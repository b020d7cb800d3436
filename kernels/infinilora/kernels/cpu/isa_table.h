// The table of one instruction set. Defines IL_TABLE in the including file, from the templates of this room.
#pragma once

#include "attention_kernels.h"
#include "elementwise_kernels.h"
#include "limit_kernels.h"
#include "linear_kernels.h"
#include "lora_kernels.h"

#define IL_DEFINE_TABLE(table, set_name)                       \
  namespace il {                                               \
  const Kernels table = {                                      \
      .name = set_name,                                        \
      .linear = {linear<float>, linear<bf16>},                 \
      .shrink = {shrink<float>, shrink<bf16>, shrink<f16>},    \
      .expand = {expand<float>, expand<bf16>, expand<f16>},    \
      .attention_work_floats = attention_work_floats,          \
      .attention = attention,                                  \
      .rms_norm = rms_norm,                                    \
      .silu_mul = silu_mul,                                    \
      .rope = rope,                                            \
      .read_all = read_all,                                    \
      .multiply_add = multiply_add,                            \
      .multiply_add_flops = multiply_add_flops,                \
  };                                                           \
  }
