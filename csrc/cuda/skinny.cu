// SPDX-License-Identifier: Apache-2.0
// Launch of the skinny matmul: the compiled variant, the grid, the shared memory.
#include "skinny.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

template <typename T, typename S, int HALVES, bool GATED>
const char* launch_variant(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  const int bytes = S::shared_bytes(HALVES, args.ring_bytes);
  if (args.ring_bytes < 2 * S::ROWS * S::ROW_BYTES) return "a ring of fewer than two stages";
  if (bytes > kMaxSharedBytes) return "a ring larger than shared memory";
  int count;
  cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  error = allow_shared_memory<skinny_kernel<T, S, HALVES, GATED>>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const int outputs = GATED ? args.n / 2 : args.n;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = std::min(count * launch.ctas_per_sm, (outputs + 7) / 8);
  config.blockDim = S::THREADS;
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &overlap;
  config.numAttrs = launch.overlap ? 1 : 0;
  return describe(cudaLaunchKernelEx(&config, skinny_kernel<T, S, HALVES, GATED>, args));
}

// WARPS and CHUNKS decide the order of a sum: they are the same in every variant.
template <typename T, int HALVES, bool GATED>
const char* choose_shape(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  switch (launch.variant) {
    case 0:
      return launch_variant<T, Shape<2, 8, 4, 3>, HALVES, GATED>(args, launch);
    case 1:
      if constexpr (!GATED) return launch_variant<T, Shape<3, 8, 4, 2>, HALVES, GATED>(args, launch);
      return "variant 1 has an odd number of tiles: gate and up need two each";
    default:
      return "an unknown variant";
  }
}

template <typename T, int HALVES>
const char* choose_result(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return launch.gated ? choose_shape<T, HALVES, true>(args, launch)
                      : choose_shape<T, HALVES, false>(args, launch);
}

template <typename T>
const char* choose_tokens(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return args.m <= 8 ? choose_result<T, 1>(args, launch) : choose_result<T, 2>(args, launch);
}

}  // namespace

const char* launch_skinny(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return launch.half ? choose_tokens<__half>(args, launch)
                     : choose_tokens<__nv_bfloat16>(args, launch);
}

}  // namespace vllm_cuda
