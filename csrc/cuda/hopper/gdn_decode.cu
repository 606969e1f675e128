// SPDX-License-Identifier: Apache-2.0
// Launch of the decode step: the compiled variant, the grid, the shared memory.
#include "gdn_decode.cuh"
#include "gdn_decode_single.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace gdn_decode;

// A CTA has `items` at most and fetches `tiles` beforehand at most.
template <auto KERNEL, int TILE_BYTES>
const char* launch_ring(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch, int grid,
                        int items, int tiles) {
  const int room = (kMaxSharedBytes - Layout(args, TILE_BYTES, 0).bytes(items)) /
                   (kConsumers * TILE_BYTES);
  const int stages = std::min({kMaxStages, room, tiles});
  if (stages < 1) return "a ring that leaves no shared memory for the states";
  const cudaError_t error = allow_shared_memory<KERNEL>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const size_t shared = Layout(args, TILE_BYTES, stages).bytes(items);
  const unsigned ctas = grid;
  return launch_kernel<KERNEL>({ctas, kThreads, shared, launch.stream, launch.overlap}, args,
                               stages);
}

// Small tiles where there are many items, large ones where each CTA has one: the faster on an H200.
// The bits are the same.
template <typename State>
const char* choose_kernel(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  int count;
  const cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  const int all = args.n * args.k_heads, rows = args.group * kHeadDim / kConsumers;
  if (all <= count) {
    constexpr int R = 4, bytes = 4 * R * kHeadDim * sizeof(State);
    constexpr auto kernel = gdn_decode_single_kernel<State, R>;
    return launch_ring<kernel, bytes>(args, launch, all, 1, rows / (4 * R));
  }
  constexpr int R = 2, bytes = 4 * R * kHeadDim * sizeof(State);
  constexpr auto kernel = gdn_decode_kernel<State, R>;
  const int items = (all + count - 1) / count, passes = rows / (4 * R);
  // No tiles of items that may not have been claimed yet.
  const int known = items < kBuffers ? passes * items : passes * (kBuffers - 2) + 1;
  return launch_ring<kernel, bytes>(args, launch, count, items, std::min(known, kAhead / bytes));
}

}  // namespace

const char* launch_gdn_decode(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  return launch.bf16_state ? choose_kernel<__nv_bfloat16>(args, launch)
                           : choose_kernel<float>(args, launch);
}

}  // namespace vllm_cuda
