// SPDX-License-Identifier: Apache-2.0
// Launch of prefill attention: tensor maps, the grid.
#pragma once

#include <algorithm>

#include "hopper/prefill_attention.cuh"
#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda::prefill_attention {

// Tokens of a query head's group: boxes of a warpgroup's tokens, all heads of a group, 64 columns.
inline CUresult encode_query_map(CUtensorMap& map, const PrefillAttentionArgs& args, int head_dim) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(args.kv_heads) * args.group,
                              static_cast<cuuint64_t>(args.tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(args.q_head) * 2,
                                static_cast<cuuint64_t>(args.q_token) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(args.group),
                            static_cast<cuuint32_t>(warpgroup_tokens(args.group))};
  const cuuint32_t steps[] = {1, 1, 1};
  return map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(args.query),
                       sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Keys or values as bytes: a row of a chunk, 8 tokens, chunks over kv heads, groups of 8 tokens of
// a block, blocks. Boxes of one head.
template <typename S>
CUresult encode_cache_map(CUtensorMap& map, const PrefillAttentionArgs& args, int part) {
  constexpr int kElement = S::FP8 ? 1 : 2, kChunks = S::HEAD_DIM * kElement / S::ROW_BYTES;
  const auto chunks = static_cast<cuuint64_t>(args.kv_heads) * kChunks;
  const auto tokens = static_cast<cuuint64_t>(args.block_size);
  const cuuint64_t token = chunks * S::ROW_BYTES;
  const cuuint64_t sizes[] = {S::ROW_BYTES, 8, chunks, tokens / 8,
                              static_cast<cuuint64_t>(args.num_blocks)};
  const cuuint64_t strides[] = {token, S::ROW_BYTES, 8 * token,
                                static_cast<cuuint64_t>(args.block_stride) * kElement};
  const cuuint32_t box[] = {S::ROW_BYTES, 8, kChunks, S::BOX_KEYS / 8, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  char* data = static_cast<char*>(const_cast<void*>(args.cache)) + part * tokens * token;
  return map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, data, sizes, strides, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE,
                       S::ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <typename S>
const char* encode_maps(Maps& maps, const PrefillAttentionArgs& args) {
  if (map_encoder() == nullptr) return "the driver has no tensor maps";
  if (encode_query_map(maps.query, args, S::HEAD_DIM) != CUDA_SUCCESS) {
    return "the driver rejects the query's tensor map";
  }
  for (int part = 0; part < 2; ++part) {
    CUtensorMap& map = part == 0 ? maps.keys : maps.values;
    if (encode_cache_map<S>(map, args, part) != CUDA_SUCCESS) {
      return "the driver rejects the cache's tensor map";
    }
  }
  return nullptr;
}

// CTAs that share keys and values: two where sequences have many tokens on average, for one is idle
// while the other has all tokens that are left, as it has of decodes.
inline int cluster_size(const PrefillAttentionArgs& args) {
  return args.tokens / args.num_seqs >= 1024 ? 2 : 1;
}

template <typename S>
const char* launch_shape(const PrefillAttentionArgs& args, const PrefillAttentionLaunch& launch) {
  static_assert(sizeof(Shared<S>) <= kMaxSharedBytes);
  Maps maps;
  if (const char* wrong = encode_maps<S>(maps, args)) return wrong;
  int ctas = 0;
  cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  constexpr auto kernel = prefill_attention_kernel<S>;
  error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const int cluster = cluster_size(args);
  const int rows = item_rows(args.tokens, args.num_seqs, cluster * item_tokens<S>(args.group));
  const unsigned clusters = std::min(ctas / cluster, rows * args.kv_heads);
  const LaunchGrid grid{cluster * clusters, S::THREADS, sizeof(Shared<S>), launch.stream, false,
                        cluster > 1 ? static_cast<unsigned>(cluster) : 0};
  return launch_kernel<kernel>(grid, args, maps, rows, cluster);
}

}  // namespace vllm_cuda::prefill_attention
