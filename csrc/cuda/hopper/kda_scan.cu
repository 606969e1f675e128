// SPDX-License-Identifier: Apache-2.0
// Launch of the scan: tensor maps, the grid, the state's dtype.
#include "hopper/kda_scan.cuh"

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

constexpr int kStages = 3;

// Heads of 128 are two matrices with rows of 64.
const char* encode_maps(KdaScanMaps& maps, const KdaScanArgs& args) {
  const int64_t all = args.chunks * args.heads;
  const auto scaled = [all](const void* data) {
    return Matrices{data, all * kda_scan::kChunk, 2, kda_scan::kHead, 64};
  };
  const auto squares = [all](const void* data) {
    return Matrices{data, kda_scan::kChunk, all, 64, 64 * kda_scan::kChunk};
  };
  const struct {
    CUtensorMap& map;
    Matrices matrices;
    int count;
  } wanted[] = {
      {maps.queries, scaled(args.queries), 2},
      {maps.keys, scaled(args.keys), 2},
      {maps.ends, scaled(args.ends), 2},
      {maps.v, Matrices{args.v, args.tokens, 2 * args.heads, args.v_stride, 64}, 1},
      {maps.T, squares(args.T), 1},
      {maps.P, squares(args.P), 1},
  };
  for (const auto& [map, matrices, count] : wanted) {
    if (const char* error = encode_map(map, matrices, count)) return error;
  }
  return nullptr;
}

template <typename State>
const char* launch_typed(const KdaScanArgs& args, const KdaScanLaunch& launch) {
  KdaScanMaps maps;
  if (const char* error = encode_maps(maps, args)) return error;
  constexpr auto kernel = kda_scan_kernel<State, kStages>;
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kda_scan::kTiles, args.heads, args.sequences);
  config.blockDim = kKdaScanThreads;
  config.dynamicSmemBytes = sizeof(kda_scan::Shared<kStages>);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  return describe(cudaLaunchKernelEx(&config, kernel, maps, args));
}

}  // namespace

const char* launch_kda_scan(const KdaScanArgs& args, const KdaScanLaunch& launch) {
  return launch.wide_states ? launch_typed<float>(args, launch)
                            : launch_typed<__nv_bfloat16>(args, launch);
}

}  // namespace vllm_cuda
