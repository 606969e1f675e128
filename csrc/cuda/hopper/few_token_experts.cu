// SPDX-License-Identifier: Apache-2.0
// Launch of the experts' products of a few tokens.
#include "hopper/few_token_experts.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace few_token_experts;

// Small kernels before and after find room, too.
constexpr int64_t kMostBytes = 222 * 1024;

// Its ring has as much of the room that is left as it can use, each team as many stages.
template <typename T>
struct Launch {
  Task<T> task;
  int64_t bytes;

  Launch(const FewTokenExpertsArgs& args, int ctas) : task(args, ctas) {
    const auto aligned = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    const int64_t first = aligned(task.first.shared_bytes());
    const int64_t operands = first + task.second.shared_bytes();
    const int64_t room = kMostBytes - int64_t{sizeof(Shared)} - operands;
    const int64_t stages = std::clamp<int64_t>(room / STAGE_BYTES, 0, MOST_STAGES);
    task.stages = static_cast<int>(stages) / TEAMS * TEAMS;
    task.at[0] = task.stages * STAGE_BYTES;
    task.at[1] = task.at[0] + static_cast<int>(first);
    bytes = sizeof(Shared) + task.at[0] + operands;
  }

  const char* run(const FewTokenExpertsLaunch& launch) const {
    if (task.stages == 0) {
      return "more tokens than fit in shared memory, with what they give between the products";
    }
    constexpr auto products = kernel<T>;
    const cudaError_t error = allow_shared_memory<products>(launch.device);
    if (error != cudaSuccess) return describe(error);
    return launch_kernel<products>(
        {static_cast<unsigned>(task.first.product.ctas), THREADS, static_cast<size_t>(bytes),
         launch.stream, launch.overlap},
        task);
  }
};

}  // namespace

const char* launch_few_token_experts(const FewTokenExpertsArgs& args,
                                     const FewTokenExpertsLaunch& launch) {
  if (args.tokens * args.slots > kMostPairs) return "too many pairs of token and slot";
  const bool scaled = args.gate_up_scale != nullptr;
  if ((scaled ? 1 : 2) * std::max(args.hidden, args.inner) > kMostRowBytes) {
    return "rows of the weights that are too long";
  }
  int ctas = 0;
  const cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  return scaled ? Launch<Float8>(args, ctas).run(launch)
                : Launch<__nv_bfloat16>(args, ctas).run(launch);
}

}  // namespace vllm_cuda
