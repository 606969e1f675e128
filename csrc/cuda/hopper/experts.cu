// SPDX-License-Identifier: Apache-2.0
// Launch of the experts' products: tensor maps, the shape, the grid.
#include <algorithm>

#include "hopper/experts.cuh"
#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

using experts::Shape;

template <typename S>
const char* encode_weight(CUtensorMap& map, const ExpertsArgs& args) {
  const cuuint64_t row = args.row_bytes, n = args.n, experts = args.num_experts;
  if constexpr (S::GATED) {
    const cuuint64_t sizes[] = {row / 2, 8, 2, n / 8, experts};
    const cuuint64_t strides[] = {row, n * row, 8 * row, 2 * n * row};
    const cuuint32_t box[] = {64, 8, 2, S::FETCHED / 16, 1};
    return encode_boxes(map, args.weight, sizes, strides, box);
  } else {
    const cuuint64_t sizes[] = {row / 2, n, experts};
    const cuuint64_t strides[] = {row, n * row};
    const cuuint32_t box[] = {64, S::FETCHED, 1};
    return encode_boxes(map, args.weight, sizes, strides, box);
  }
}

template <typename S>
const char* launch_shape(const ExpertsArgs& args, const ExpertsLaunch& launch) {
  static_assert(sizeof(experts::Shared<S>) <= kMaxSharedBytes);
  CUtensorMap weights{};
  if (const char* wrong = encode_weight<S>(weights, args)) return wrong;
  int ctas = 0;
  const cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  const int columns = (args.n + S::OUTPUTS - 1) / S::OUTPUTS;
  const int64_t tiles = int64_t{args.num_blocks} * columns;
  const unsigned clusters = static_cast<unsigned>(std::min<int64_t>(ctas / S::CLUSTER, tiles));
  const LaunchGrid grid{S::CLUSTER * clusters, experts::kThreads, sizeof(experts::Shared<S>),
                        launch.stream,         launch.overlap,    S::CLUSTER};
  return launch_kernel<experts_kernel<S>>(
      grid, weights, args, args.row_bytes / static_cast<int>(kTileRowBytes), columns);
}

// Compiled shapes, each for blocks of another height. All are loaded at the first launch, so that
// none is while a graph is captured.
template <typename... S>
const char* launch_height(const ExpertsArgs& args, const ExpertsLaunch& launch) {
  cudaError_t error = cudaSuccess;
  const auto allow = [&](cudaError_t next) { error = error == cudaSuccess ? next : error; };
  (allow(allow_shared_memory<experts_kernel<S>>(launch.device)), ...);
  if (error != cudaSuccess) return describe(error);
  const char* wrong = "blocks have 64, 128 or, without scales, 320 places";
  ((launch.height == S::HEIGHT ? void(wrong = launch_shape<S>(args, launch)) : void()), ...);
  return wrong;
}

// Few places of an expert are bound by the bytes of its weights, many by the products.
template <bool GATED, bool SCALED>
const char* launch_kind(const ExpertsArgs& args, const ExpertsLaunch& launch) {
  using Few = Shape<64, 1, 8, 1, GATED, SCALED>;
  using Some = Shape<128, 2, 4, 1, GATED, SCALED>;
  if constexpr (SCALED) {
    return launch_height<Few, Some>(args, launch);
  } else {
    return launch_height<Few, Some, Shape<160, 2, 4, 2, GATED, SCALED>>(args, launch);
  }
}

}  // namespace

const char* launch_experts(const ExpertsArgs& args, const ExpertsLaunch& launch) {
  const bool scaled = args.x_scale != nullptr;
  if (launch.gated) {
    return scaled ? launch_kind<true, true>(args, launch) : launch_kind<true, false>(args, launch);
  }
  return scaled ? launch_kind<false, true>(args, launch) : launch_kind<false, false>(args, launch);
}

}  // namespace vllm_cuda
