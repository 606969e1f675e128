// SPDX-License-Identifier: Apache-2.0
// Launch of the chunk factors of the gated delta rule.
#include "hopper/gdn_chunk_factors.cuh"

#include "launch.h"

namespace vllm_cuda {

namespace {

constexpr int kMaxGrid = 65535;  // of its second and third dimension

}  // namespace

const char* launch_chunk_factors(const ChunkFactorsArgs& args, void* stream) {
  if (args.num_chunks > kMaxGrid || args.k_heads > kMaxGrid) return "more than 65,535 chunks";
  // Two value heads share what follows from their key head; an odd one stays alone.
  const int heads = args.group % 2 == 0 ? 2 : 1;
  const dim3 grid(args.group / heads, args.k_heads, args.num_chunks);
  const auto kernel = heads == 2 ? chunk_factors::kernel<2> : chunk_factors::kernel<1>;
  kernel<<<grid, chunk_factors::THREADS, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return describe(cudaGetLastError());
}

}  // namespace vllm_cuda
