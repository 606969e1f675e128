// SPDX-License-Identifier: Apache-2.0
// Launch of the attention to latents: the compiled variant, the grid, the map of the cache.
#include "latent_attention.cuh"

#include <algorithm>

#include "launch.h"
#include "tensor_map.h"

namespace vllm_cuda {

namespace {

using namespace latent_attention;

template <int ROWS>
const char* launch_variant(const LatentAttentionArgs& args, const LatentAttentionLaunch& launch) {
  static_assert(Memory<ROWS>::kBytes <= kMaxSharedBytes);
  constexpr auto kernel = latent_attention_kernel<ROWS>;
  int count;
  cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  // A copy takes 64 columns of a block's rows, a whole tile's if blocks are that long.
  const int box_keys = args.block_size % kKeys == 0 ? kKeys : 16;
  constexpr int kRow = kLatentDims + kLatentShared;
  const cuuint64_t sizes[] = {kRow, static_cast<cuuint64_t>(args.block_size),
                              static_cast<cuuint64_t>(args.num_blocks)};
  const cuuint64_t strides[] = {2 * kRow, static_cast<cuuint64_t>(2 * args.block_stride)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_keys), 1};
  CUtensorMap map;
  const char* reason = encode_boxes(map, args.cache, sizes, strides, box);
  if (reason != nullptr) return reason;
  const unsigned ctas = std::min(count, args.num_seqs * args.splits * args.tiles);
  return launch_kernel<kernel>({ctas, kThreads, Memory<ROWS>::kBytes, launch.stream}, args, map,
                               box_keys);
}

}  // namespace

const char* launch_latent_attention(const LatentAttentionArgs& args,
                                    const LatentAttentionLaunch& launch) {
  if (launch.rows == 16) return launch_variant<16>(args, launch);
  if (launch.rows == 32) return launch_variant<32>(args, launch);
  return "tiles of 16 or 32 rows";
}

}  // namespace vllm_cuda
