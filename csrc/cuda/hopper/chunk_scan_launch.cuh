// SPDX-License-Identifier: Apache-2.0
// Launch of a scan: tensor maps, the grid, the state's dtype.
#pragma once

#include "hopper/chunk_scan.cuh"
#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda::chunk_scan {

// A map of boxes in `count` matrices.
struct WantedMap {
  CUtensorMap& map;
  Matrices matrices;
  int count;
};

// Of T or P.
inline Matrices squares(const void* data, const ChunkScanArgs& args) {
  return {data, kChunk, args.chunks * args.heads, 64, 64 * kChunk};
}
// Of tokens with heads of 128, which are two matrices with rows of 64.
inline Matrices tokens(const void* data, int64_t heads, int64_t stride,
                       const ChunkScanArgs& args) {
  return {data, args.tokens, 2 * heads, stride, 64};
}

template <size_t COUNT>
const char* encode(const WantedMap (&wanted)[COUNT]) {
  for (const auto& [map, matrices, count] : wanted) {
    if (const char* error = encode_map(map, matrices, count)) return error;
  }
  return nullptr;
}

template <typename Rule, typename State>
const char* launch_typed(const typename Rule::Maps& maps, const typename Rule::Args& args,
                         const ChunkScanLaunch& launch) {
  constexpr auto kernel = chunk_scan_kernel<Rule, State>;
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const dim3 ctas(kTiles / Rule::kWarpgroups, args.heads, args.sequences);
  return launch_kernel<kernel>({ctas, kThreads<Rule>, sizeof(Shared<Rule>), launch.stream}, maps,
                               args);
}

template <typename Rule>
const char* launch(const typename Rule::Maps& maps, const typename Rule::Args& args,
                   const ChunkScanLaunch& launch) {
  return launch.wide_states ? launch_typed<Rule, float>(maps, args, launch)
                            : launch_typed<Rule, __nv_bfloat16>(maps, args, launch);
}

}  // namespace vllm_cuda::chunk_scan
