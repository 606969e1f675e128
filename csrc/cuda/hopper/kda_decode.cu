// SPDX-License-Identifier: Apache-2.0
// Launch of the decode step of Kimi delta attention.
#include "kda_decode.cuh"

#include "launch.h"

namespace vllm_cuda {

namespace {

template <typename State>
const char* launch_state(const KdaDecodeArgs& args, const KdaDecodeLaunch& launch) {
  using namespace kda_decode;
  constexpr auto kernel = kda_decode_kernel<State>;
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const dim3 ctas(args.heads, args.n);
  const size_t bytes = sizeof(Shared<State>) + args.places * sizeof(Entry);
  return launch_kernel<kernel>({ctas, kThreads, bytes, launch.stream, launch.overlap}, args);
}

}  // namespace

const char* launch_kda_decode(const KdaDecodeArgs& args, const KdaDecodeLaunch& launch) {
  return launch.bf16_state ? launch_state<__nv_bfloat16>(args, launch)
                           : launch_state<float>(args, launch);
}

}  // namespace vllm_cuda
