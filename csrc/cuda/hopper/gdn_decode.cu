// SPDX-License-Identifier: Apache-2.0
// Launch of the decode step: the compiled variant, the grid, the shared memory.
#include "gdn_decode.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace gdn_decode;

// A CTA has `items` at most.
template <typename State, int R>
const char* launch_tiles(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch, int grid,
                         int items) {
  constexpr auto kernel = gdn_decode_kernel<State, R>;
  constexpr int tile_bytes = Stream<State, 4 * R>::BYTES;
  const int room = (kMaxSharedBytes - Layout(args, tile_bytes, 0).bytes(items)) /
                   (kConsumers * tile_bytes);
  const int passes = args.group * kHeadDim / (kConsumers * 4 * R);
  const int stages = std::min({kMaxStages, room, passes * items});
  if (stages < 1) return "a ring that leaves no shared memory for the states";
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = Layout(args, tile_bytes, stages).bytes(items);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &overlap;
  config.numAttrs = launch.overlap ? 1 : 0;
  return describe(cudaLaunchKernelEx(&config, kernel, args, stages));
}

// Small tiles where there are many items, large ones where each CTA has one: the faster on an H200.
// The bits are the same.
template <typename State>
const char* choose_tiles(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  int count;
  const cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  const int all = args.n * args.k_heads;
  if (all <= count) return launch_tiles<State, 4>(args, launch, all, 1);
  return launch_tiles<State, 2>(args, launch, count, (all + count - 1) / count);
}

}  // namespace

const char* launch_gdn_decode(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  return launch.bf16_state ? choose_tiles<__nv_bfloat16>(args, launch)
                           : choose_tiles<float>(args, launch);
}

}  // namespace vllm_cuda
