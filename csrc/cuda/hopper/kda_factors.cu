// SPDX-License-Identifier: Apache-2.0
// Launch of the chunk factors of Kimi delta attention.
#include "hopper/kda_factors.cuh"

#include <algorithm>
#include <utility>

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

const char* launch_kda_factors(const KdaFactorsArgs& args, int device, void* stream) {
  using namespace kda_factors;
  Maps maps;
  const auto tokens = [&args](const void* data, int64_t stride) {
    return Matrices{data, args.tokens, 2 * args.heads, stride, DIM / 2};
  };
  const std::pair<CUtensorMap&, Matrices> wanted[] = {
      {maps.q, tokens(args.q, args.q_stride)},
      {maps.k, tokens(args.k, args.k_stride)},
      {maps.a, tokens(args.a, args.a_stride)},
  };
  for (const auto& [map, matrices] : wanted) {
    if (const char* error = encode_map(map, matrices, 2)) return error;
  }
  int count = 0;
  cudaError_t error = multiprocessors(device, count);
  if (error == cudaSuccess) error = allow_shared_memory<kernel>(device);
  if (error != cudaSuccess) return describe(error);
  const int places = args.num_chunks * args.heads;
  const dim3 ctas(std::min(places, CTAS * count));
  return launch_kernel<kernel>({ctas, THREADS, sizeof(Shared), stream}, maps, args);
}

}  // namespace vllm_cuda
