// SPDX-License-Identifier: Apache-2.0
// The map of a paged cache for copies of 16 tokens' keys and values of a head.
#pragma once

#include "decode_attention.h"
#include "tensor_map.h"

namespace vllm_cuda {

// Dimensions: 128 bytes, tokens of a block, chunks of 128 bytes over kv heads, keys and values,
// blocks. Boxes of 16 tokens and one head, swizzled by 128 bytes. Returns what went wrong, or null.
inline const char* encode_cache_map(CUtensorMap& map, const DecodeAttentionArgs& args,
                                    int row_bytes, int element_bytes) {
  const MapEncoder encode = map_encoder();
  if (encode == nullptr) return "the driver has no tensor maps";
  const auto chunks = static_cast<cuuint64_t>(args.kv_heads) * row_bytes / 128;
  const auto tokens = static_cast<cuuint64_t>(args.block_size);
  const cuuint64_t token = chunks * 128, part = token * tokens;
  const cuuint64_t sizes[] = {128, tokens, chunks, 2, static_cast<cuuint64_t>(args.num_blocks)};
  const cuuint64_t strides[] = {token, 128, part,
                                static_cast<cuuint64_t>(args.block_stride * element_bytes)};
  const cuuint32_t box[] = {128, kTileKeys, static_cast<cuuint32_t>(row_bytes / 128), 2, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, const_cast<void*>(args.cache), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver rejects the cache's tensor map";
}

}  // namespace vllm_cuda
