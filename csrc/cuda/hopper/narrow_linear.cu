// SPDX-License-Identifier: Apache-2.0
// Launch of the narrow matmul: tensor maps, the cut, the grid of clusters.
#include "hopper/narrow_linear.cuh"

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

using narrow::Cut;
using narrow::kChunk;

template <typename C>
const char* encode_maps(NarrowMaps& maps, const NarrowArgs& args) {
  const Matrix x{args.x, args.m, args.k, args.x_stride};
  const Matrix weight{args.weight, args.n, args.k, args.k};
  const char* wrong = encode_map(maps.x, x, {C::TOKENS, kChunk, true});
  if (wrong != nullptr) return wrong;
  return encode_map(maps.weight, weight, {C::ROWS / C::TOKEN_CTAS, kChunk, true});
}

struct Attributes {
  cudaLaunchAttribute values[2]{};
  explicit Attributes(int cluster) {
    values[0].id = cudaLaunchAttributeClusterDimension;
    values[0].val.clusterDim.x = cluster;
    values[0].val.clusterDim.y = values[0].val.clusterDim.z = 1;
    values[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    values[1].val.programmaticStreamSerializationAllowed = 1;
  }
};

template <typename C>
cudaLaunchConfig_t configured(dim3 grid, Attributes& attributes, int count) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = C::THREADS;
  config.dynamicSmemBytes = C::BYTES;
  config.attrs = attributes.values;
  config.numAttrs = count;
  return config;
}

template <typename C>
const char* launch_cut(const NarrowArgs& args, const NarrowLaunch& launch) {
  if (args.k < kChunk * C::SPLIT) return "fewer columns than the cut shares out";
  NarrowMaps maps;
  if (const char* wrong = encode_maps<C>(maps, args)) return wrong;
  constexpr auto kernel = narrow_linear_kernel<C>;
  const cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  constexpr int tokens = C::TOKENS * C::TOKEN_CTAS;
  Attributes attributes(C::CLUSTER);
  const dim3 grid((args.n + C::ROWS - 1) / C::ROWS * C::CLUSTER, (args.m + tokens - 1) / tokens);
  cudaLaunchConfig_t config = configured<C>(grid, attributes, launch.overlap ? 2 : 1);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  return describe(cudaLaunchKernelEx(&config, kernel, maps, args));
}

template <typename C>
const char* count_clusters(int device, int& count) {
  constexpr auto kernel = narrow_linear_kernel<C>;
  const cudaError_t error = allow_shared_memory<kernel>(device);
  if (error != cudaSuccess) return describe(error);
  Attributes attributes(C::CLUSTER);
  const cudaLaunchConfig_t config = configured<C>(dim3(C::CLUSTER), attributes, 1);
  return describe(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
}

struct Compiled {
  const char* (*launch)(const NarrowArgs&, const NarrowLaunch&);
  const char* (*clusters)(int, int&);
};

template <typename C>
constexpr Compiled kCompiled{launch_cut<C>, count_clusters<C>};

// As `CUTS` in vllm/kernels/narrow_cuts.py.
constexpr Compiled kCuts[] = {
    kCompiled<Cut<64, 88, 1, 4>>,
    kCompiled<Cut<64, 176, 2, 4>>,
    kCompiled<Cut<128, 176, 2, 4>>,
};

constexpr const char* kUnknown = "an unknown cut";
bool known(int cut) { return cut >= 0 && cut < int(sizeof(kCuts) / sizeof(kCuts[0])); }

}  // namespace

const char* launch_narrow_linear(const NarrowArgs& args, const NarrowLaunch& launch) {
  return known(launch.cut) ? kCuts[launch.cut].launch(args, launch) : kUnknown;
}

const char* narrow_clusters(int cut, int device, int& count) {
  return known(cut) ? kCuts[cut].clusters(device, count) : kUnknown;
}

}  // namespace vllm_cuda
