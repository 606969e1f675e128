// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set. Each is compiled once per instruction set, into a namespace
// of its own; `kernels()` is the table chosen for this machine.
#pragma once

#include "args.h"

#define VLLM_CPU_KERNELS(X)            \
  X(rms_norm, RmsNormArgs)             \
  X(gated_rms_norm, GatedArgs)         \
  X(mul_sigmoid, GatedArgs)            \
  X(silu_and_mul, GateUpArgs)          \
  X(gelu_tanh_and_mul, GateUpArgs)     \
  X(clamped_swiglu, GateUpArgs)        \
  X(qk_norm_rope_cache, RopeCacheArgs) \
  X(paged_attention, AttentionArgs)    \
  X(compress, CompressArgs)            \
  X(choose_entries, ChooseArgs)        \
  X(compressed_attention, AttendArgs)  \
  X(causal_conv1d, ConvArgs)           \
  X(gdn_prefill, GdnArgs)              \
  X(gdn_decode, GdnArgs)               \
  X(gdn_commit, GdnCommitArgs)         \
  X(kda_prefill, GdnArgs)              \
  X(mamba2_prefill, Mamba2Args)        \
  X(mamba2_decode, Mamba2Args)         \
  X(skinny_linear, SkinnyLinearArgs)   \
  X(run_experts, ExpertsArgs)          \
  X(read_streams, ReadStreamsArgs)     \
  X(join_streams, JoinStreamsArgs)     \
  X(xxh3_64, DigestArgs)

namespace vllm_cpu {

struct KernelTable {
  const char* name;
#define VLLM_FIELD(kernel, Args) void (*kernel)(const Args&);
  VLLM_CPU_KERNELS(VLLM_FIELD)
#undef VLLM_FIELD
};

const KernelTable& kernels();

#ifdef VLLM_ISA
namespace VLLM_ISA {
#define VLLM_DECLARE(kernel, Args) void kernel(const Args& args);
VLLM_CPU_KERNELS(VLLM_DECLARE)
#undef VLLM_DECLARE
}  // namespace VLLM_ISA
#endif

}  // namespace vllm_cpu
