// SPDX-License-Identifier: Apache-2.0
// Launch of the attention of short queries: the compiled variant, the grid, the shared memory.
#include "decode_attention.cuh"

#include <algorithm>

#include "cache_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace decode_attention;

// Float8 takes more warps: half the bytes leave half the time, and every element is converted.
template <typename KV, int HEAD_DIM>
const char* launch_variant(const DecodeAttentionArgs& args, const DecodeAttentionLaunch& launch) {
  constexpr int WARPS = sizeof(KV) == 1 ? 8 : 4;
  using Mem = Memory<KV, HEAD_DIM, WARPS>;
  constexpr auto kernel = decode_attention_kernel<KV, HEAD_DIM, WARPS>;
  const int room = kMaxSharedBytes - Mem(args.rows, 0).bytes(args.num_seqs);
  const int stages = std::min(Mem::kMaxStages, room / Mem::stage_bytes());
  if (stages < 1) return "so many sequences leave no shared memory for keys";
  int count;
  cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  CUtensorMap map;
  const char* reason = encode_cache_map(map, args, TileLayout<KV, HEAD_DIM>::kRowBytes, sizeof(KV));
  if (reason != nullptr) return reason;
  const unsigned ctas = std::min(count, args.num_seqs * args.kv_heads * args.splits);
  const size_t shared = Mem(args.rows, stages).bytes(args.num_seqs);
  return launch_kernel<kernel>({ctas, 32 * (WARPS + 1), shared, launch.stream, launch.overlap},
                               args, map, stages, launch.overlap);
}

template <typename KV>
const char* choose_head(const DecodeAttentionArgs& args, const DecodeAttentionLaunch& launch) {
  return launch.head_dim == 128 ? launch_variant<KV, 128>(args, launch)
                                : launch_variant<KV, 256>(args, launch);
}

}  // namespace

const char* launch_decode_attention(const DecodeAttentionArgs& args,
                                    const DecodeAttentionLaunch& launch) {
  return launch.fp8_cache ? choose_head<Fp8>(args, launch)
                          : choose_head<__nv_bfloat16>(args, launch);
}

}  // namespace vllm_cuda
