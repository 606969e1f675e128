// SPDX-License-Identifier: Apache-2.0
// Launch of the scan: tensor maps, the grid, the state's dtype.
#include "hopper/gdn_scan.cuh"

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

constexpr int kStages = 3;

// Heads of 128 are two matrices with rows of 64.
const char* encode_maps(GdnScanMaps& maps, const GdnScanArgs& args) {
  const auto tokens = [&args](const void* data, int64_t heads, int64_t stride) {
    return Matrices{data, args.tokens, 2 * heads, stride, 64};
  };
  const auto squares = [&args](const void* data) {
    return Matrices{data, gdn_scan::kChunk, args.chunks * args.heads, 64, 64 * gdn_scan::kChunk};
  };
  const struct {
    CUtensorMap& map;
    Matrices matrices;
    int count;
  } wanted[] = {
      {maps.q, tokens(args.q, args.key_heads, args.q_stride), 2},
      {maps.k, tokens(args.k, args.key_heads, args.k_stride), 2},
      {maps.v, tokens(args.v, args.heads, args.v_stride), 1},
      {maps.T, squares(args.T), 1},
      {maps.P, squares(args.P), 1},
  };
  for (const auto& [map, matrices, count] : wanted) {
    if (const char* error = encode_map(map, matrices, count)) return error;
  }
  return nullptr;
}

template <typename State>
const char* launch_typed(const GdnScanArgs& args, const GdnScanLaunch& launch) {
  GdnScanMaps maps;
  if (const char* error = encode_maps(maps, args)) return error;
  constexpr auto kernel = gdn_scan_kernel<State, kStages>;
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(gdn_scan::kTiles, args.heads, args.sequences);
  config.blockDim = kGdnScanThreads;
  config.dynamicSmemBytes = sizeof(gdn_scan::Shared<kStages>);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  return describe(cudaLaunchKernelEx(&config, kernel, maps, args));
}

}  // namespace

const char* launch_gdn_scan(const GdnScanArgs& args, const GdnScanLaunch& launch) {
  return launch.wide_states ? launch_typed<float>(args, launch)
                            : launch_typed<__nv_bfloat16>(args, launch);
}

}  // namespace vllm_cuda
