// SPDX-License-Identifier: Apache-2.0
// Launch of the decode step: the compiled variant, the grid, the shared memory.
#include "gdn_decode.cuh"
#include "gdn_decode_single.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace gdn_decode;

// Stages of each warp's tiles that shared memory has room for beside so many items.
int room_for(const GdnDecodeArgs& args, int tile_bytes, int items) {
  const int left = kMaxSharedBytes - Layout(args, tile_bytes, 0).bytes(items);
  return std::min(kMaxStages, std::max(left, 0) / (kConsumers * tile_bytes));
}

// A CTA has `items` at most and fetches `tiles` beforehand at most; CTAs that share are a cluster.
template <auto KERNEL, int TILE_BYTES>
const char* launch_ring(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch, int grid,
                        int items, int tiles) {
  const int stages = std::min(room_for(args, TILE_BYTES, items), tiles);
  if (stages < 1) return "a ring that leaves no shared memory for the states";
  const cudaError_t error = allow_shared_memory<KERNEL>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const size_t shared = Layout(args, TILE_BYTES, stages).bytes(items);
  const unsigned ctas = grid, cluster = args.sharing > 0 ? 1 << args.sharing : 0;
  return launch_kernel<KERNEL>({ctas, kThreads, shared, launch.stream, launch.overlap, cluster},
                               args, stages);
}

// Small tiles where there are many items, large ones where each CTA has one, and for several tokens:
// the faster on an H200. A CTA has one item, too, where many tokens leave no memory for more. The
// bits are the same.
template <typename State, bool SEVERAL>
const char* choose_kernel(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch, int count) {
  const int all = args.n * args.items, rows = args.heads * kHeadDim / kConsumers;
  const int items = (all + count - 1) / count;
  constexpr int LARGE = 4, large_bytes = 4 * LARGE * kHeadDim * sizeof(State);
  constexpr int R = SEVERAL ? LARGE : 2, bytes = 4 * R * kHeadDim * sizeof(State);
  const int passes = rows / (4 * R);
  if (items == 1 || room_for(args, bytes, items) == 0) {
    constexpr auto kernel = gdn_decode_single_kernel<State, LARGE, SEVERAL>;
    return launch_ring<kernel, large_bytes>(args, launch, all, 1, rows / (4 * LARGE));
  }
  constexpr auto kernel = gdn_decode_kernel<State, R, SEVERAL>;
  // No tiles of items that may not have been claimed yet.
  const int known = items < kBuffers ? passes * items : passes * (kBuffers - 2) + 1;
  return launch_ring<kernel, bytes>(args, launch, count, items, std::min(known, kAhead / bytes));
}

template <typename State>
const char* choose_kernel(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  int count;
  const cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  GdnDecodeArgs shared = args;
  if (args.n * args.items * args.heads <= count) {
    // A value head for every CTA.
    shared.items = args.items * args.heads;
    shared.sharing = args.heads / 2;  // of 1, 2 or 4
    shared.heads = 1;
  }
  return args.tokens > 1 ? choose_kernel<State, true>(shared, launch, count)
                         : choose_kernel<State, false>(shared, launch, count);
}

}  // namespace

const char* launch_gdn_decode(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch) {
  return launch.bf16_state ? choose_kernel<__nv_bfloat16>(args, launch)
                           : choose_kernel<float>(args, launch);
}

}  // namespace vllm_cuda
