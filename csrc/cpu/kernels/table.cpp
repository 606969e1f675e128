// SPDX-License-Identifier: Apache-2.0
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

#define VLLM_STRING(x) #x
#define VLLM_NAME(x) VLLM_STRING(x)
#define VLLM_ENTRY(kernel, Args) kernel,
extern const KernelTable table;
const KernelTable table = {VLLM_NAME(VLLM_ISA), VLLM_CPU_KERNELS(VLLM_ENTRY)};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
