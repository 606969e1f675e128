// SPDX-License-Identifier: Apache-2.0
// Launch of the experts' products of a few tokens.
#include "hopper/pairwise_experts.cuh"

#include "launch.h"

namespace vllm_cuda {

namespace {

template <bool GATED>
const char* launch_product(const PairwiseExpertsArgs& args, const PairwiseExpertsLaunch& launch,
                           int ctas, int64_t input_bytes) {
  using namespace pairwise_experts;
  constexpr auto product = kernel<GATED>;
  const cudaError_t error = allow_shared_memory<product>(launch.device);
  if (error != cudaSuccess) return describe(error);
  return launch_kernel<product>({static_cast<unsigned>(ctas), THREADS, sizeof(Shared) + input_bytes,
                                 launch.stream, launch.overlap},
                                args);
}

}  // namespace

const char* launch_pairwise_experts(const PairwiseExpertsArgs& args,
                                    const PairwiseExpertsLaunch& launch) {
  const int64_t pairs = int64_t{args.tokens} * args.slots;
  const int64_t input = int64_t{2} * args.tokens * args.hidden, gated = 2 * pairs * args.inner;
  if (input > kMostInputBytes) return "more tokens than shared memory holds";
  if (gated > kMostGatedBytes) return "more between the products than shared memory holds";
  if (2 * args.hidden > kMostRowBytes || 2 * args.inner > kMostRowBytes) {
    return "rows of the weights that are too long";
  }
  int ctas = 0;
  const cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  const char* const wrong = launch_product<true>(args, launch, ctas, input);
  return wrong ? wrong : launch_product<false>(args, launch, ctas, gated);
}

}  // namespace vllm_cuda
