// SPDX-License-Identifier: Apache-2.0
// Launch of the chunk factors of Kimi delta attention.
#include "hopper/kda_factors.cuh"

#include "launch.h"

namespace vllm_cuda {

namespace {

constexpr int kMaxGrid = 65535;  // of its second dimension

}  // namespace

const char* launch_kda_factors(const KdaFactorsArgs& args, int device, void* stream) {
  if (args.num_chunks > kMaxGrid) return "more than 65,535 chunks";
  const cudaError_t error = allow_shared_memory<kda_factors::kernel>(device);
  if (error != cudaSuccess) return describe(error);
  const dim3 grid(args.heads, args.num_chunks);
  kda_factors::kernel<<<grid, kda_factors::THREADS, sizeof(kda_factors::Shared),
                        static_cast<cudaStream_t>(stream)>>>(args);
  return describe(cudaGetLastError());
}

}  // namespace vllm_cuda
