// SPDX-License-Identifier: Apache-2.0
// Launch of the attention to latents: the compiled variant, the grid, the maps of the cache.
#include "latent_attention.cuh"

#include <algorithm>
#include <array>
#include <atomic>

#include "latent_attention_join.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace vllm_cuda {

namespace {

using namespace latent_attention;

// Boxes of so many chunks of 64 columns of so many keys, in squares of eight keys.
const char* encode_squares(CUtensorMap& map, const LatentAttentionArgs& args, int chunks,
                           int keys) {
  constexpr cuuint64_t kRowBytes = 2 * (kLatentDims + kLatentShared);
  const cuuint64_t sizes[] = {64, 8, static_cast<cuuint64_t>(kChunks),
                              static_cast<cuuint64_t>(args.block_size / 8),
                              static_cast<cuuint64_t>(args.num_blocks)};
  const cuuint64_t strides[] = {kRowBytes, kTileRowBytes, 8 * kRowBytes,
                                static_cast<cuuint64_t>(2 * args.block_stride)};
  const cuuint32_t box[] = {64, 8, static_cast<cuuint32_t>(chunks),
                            static_cast<cuuint32_t>(keys / 8), 1};
  return encode_boxes(map, args.cache, sizes, strides, box);
}

// How many clusters of two CTAs the device has room for.
template <auto KERNEL>
cudaError_t pairs_at_once(int device, unsigned shared_bytes, int& count) {
  static std::array<std::atomic<int>, kMaxDevices> known{};  // and 1
  count = known[device].load(std::memory_order_relaxed) - 1;
  if (count >= 0) return cudaSuccess;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, KERNEL, &config);
  if (error == cudaSuccess) known[device].store(count + 1, std::memory_order_relaxed);
  return error;
}

template <int ROWS>
const char* launch_variant(const LatentAttentionArgs& args, const LatentAttentionLaunch& launch) {
  constexpr unsigned kBytes = Memory<ROWS>::kBytes;
  static_assert(kBytes <= kMaxSharedBytes);
  constexpr auto kernel = latent_attention_kernel<ROWS>;
  int count;
  cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  // A box is of a block's keys, a whole tile's if blocks are that long.
  const int box_keys = args.block_size % kKeys == 0 ? kKeys : 16;
  Maps maps;
  const char* reason = encode_squares(maps.half, args, kHalfChunks, box_keys);
  if (reason == nullptr) reason = encode_squares(maps.end, args, 1, box_keys);
  if (reason != nullptr) return reason;
  // Two shares of a tile of rows are joined by the CTAs that have them, if each CTA has one.
  int pairs = 0;
  if (args.splits == 2) error = pairs_at_once<kernel>(launch.device, kBytes, pairs);
  if (error != cudaSuccess) return describe(error);
  const bool paired = args.splits == 2 && args.num_seqs * args.tiles <= pairs;
  const unsigned ctas = std::min(count, args.num_seqs * args.splits * args.tiles);
  const unsigned cluster = paired ? 2 : 0;
  reason = launch_kernel<kernel>({ctas, kThreads, kBytes, launch.stream, false, cluster}, args,
                                 maps, box_keys, paired);
  if (reason != nullptr || args.splits == 1 || paired) return reason;
  const dim3 rows(launch.max_query_len * args.heads, args.num_seqs);
  return launch_kernel<latent_attention_join_kernel>(
      {rows, kJoinThreads, 0, launch.stream, true}, args);
}

}  // namespace

const char* launch_latent_attention(const LatentAttentionArgs& args,
                                    const LatentAttentionLaunch& launch) {
  if (launch.rows == 64) return launch_variant<64>(args, launch);
  if (launch.rows == 32) return launch_variant<32>(args, launch);
  return "tiles of 32 or 64 rows";
}

}  // namespace vllm_cuda
