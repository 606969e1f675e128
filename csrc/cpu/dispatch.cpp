// SPDX-License-Identifier: Apache-2.0
// Choice of the instruction set, once, at load.
#include <cstdlib>
#include <cstring>

#include "stable.h"
#include "table.h"

namespace vllm_cpu {

namespace baseline {
extern const KernelTable table;
}
#if defined(VLLM_X86_VARIANTS)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512_bf16 {
extern const KernelTable table;
}
#endif

namespace {

struct Variant {
  const KernelTable* table;
  bool supported;
};

// VLLM_CPU_ISA narrows the choice, so that tests can run every variant on one machine.
const KernelTable& choose() {
#if defined(VLLM_X86_VARIANTS)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  const Variant variants[] = {
      {&avx512_bf16::table, has_bf16},
      {&avx512::table, has_avx512},
      {&avx2::table, has_avx2},
      {&baseline::table, true}};
#else
  const Variant variants[] = {{&baseline::table, true}};
#endif
  const char* wanted = std::getenv("VLLM_CPU_ISA");
  for (const Variant& variant : variants) {
    const bool named = !wanted || std::strcmp(wanted, variant.table->name) == 0;
    if (named && variant.supported) return *variant.table;
  }
  STD_TORCH_CHECK(
      false, "VLLM_CPU_ISA=", wanted,
      " is not an instruction set this machine and build offer; use one of baseline, avx2,"
      " avx512, avx512_bf16, or unset it");
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

}  // namespace vllm_cpu
