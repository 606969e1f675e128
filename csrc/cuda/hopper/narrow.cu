// SPDX-License-Identifier: Apache-2.0
// Launch of the narrow matmul: tensor maps, the compiled shape, the grid.
#include <algorithm>

#include "hopper/narrow.cuh"
#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

using narrow::Maps;
using narrow::Plan;
using narrow::Shape;

int divide_up(int x, int y) { return (x + y - 1) / y; }

const char* refuse(const NarrowArgs& args, const NarrowLaunch& launch) {
  const NarrowCut& cut = launch.cut;
  const int group = launch.gated ? 16 : 8;
  if (cut.rows < group || cut.rows > narrow::kMostRows || cut.rows % group != 0) {
    return "a tile has 8 to 256 rows of the weight, in groups of 8 or, gated, of 16";
  }
  if (cut.split < 1 || cut.split > 8 || (cut.split & (cut.split - 1)) != 0) {
    return "1, 2, 4 or 8 CTAs share out the columns";
  }
  if (cut.shared_bytes > kMaxSharedBytes) return "a CTA has no more than 227 KB of shared memory";
  return args.n % group == 0 ? nullptr : "the weight's rows are not whole groups";
}

template <typename S>
Plan plan_of(const NarrowArgs& args, const NarrowCut& cut) {
  Plan plan{};
  plan.rows = cut.rows;
  plan.split = cut.split;
  plan.box = 8 * divide_up(args.m, 8);
  plan.token_stages = std::min(cut.token_bytes / plan.token_bytes(), narrow::kMostStages);
  plan.steps = divide_up(args.k, narrow::kColumns);
  plan.tiles = divide_up(args.n, cut.rows);
  const int block_rows = plan.consumers() / narrow::kWarpgroup * narrow::kBlock;
  plan.sums_bytes = (block_rows - plan.rows) * static_cast<int>(kTileRowBytes);
  if (plan.split > 1) plan.sums_bytes = std::max(plan.sums_bytes, S::PAIRS * plan.pair_stride() * 4);
  const int rest = cut.shared_bytes - plan.bytes();
  plan.stages = std::clamp(rest / (plan.stage_bytes() + 16), 0, narrow::kMostStages);
  return plan;
}

template <bool GATED>
const char* encode_weight(CUtensorMap& map, const NarrowArgs& args, int rows) {
  constexpr int PARTS = GATED ? 2 : 1;
  const cuuint64_t n = args.n, row = cuuint64_t{2} * args.k;
  const cuuint64_t sizes[] = {row / 2, 8, PARTS, n / (8 * PARTS)};
  const cuuint64_t strides[] = {row, n / PARTS * row, 8 * row};
  const cuuint32_t box[] = {64, 8, PARTS, static_cast<cuuint32_t>(rows / (8 * PARTS))};
  return encode_boxes(map, args.weight, sizes, strides, box);
}

template <typename S>
const char* launch_shape(const NarrowArgs& args, const NarrowLaunch& launch) {
  const Plan plan = plan_of<S>(args, launch.cut);
  if (plan.token_stages < 2) return "too little shared memory for two stages of tokens";
  if (plan.stages < 2) return "too little shared memory for two stages of the weight";
  Maps maps{};
  const Matrix x{args.x, args.m, args.k, args.x_stride};
  if (const char* wrong = encode_map(maps.x, x, {plan.box, narrow::kColumns, true})) return wrong;
  if (const char* wrong = encode_weight<S::GATED>(maps.weight, args, plan.rows)) return wrong;
  int ctas = 0;
  const cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  LaunchGrid grid{};
  grid.ctas = plan.split > 1 ? plan.split * plan.tiles : std::min(ctas, plan.tiles);
  grid.threads = plan.threads();
  grid.shared_bytes = plan.bytes();
  grid.stream = launch.stream;
  grid.overlap = launch.overlap;
  grid.cluster = plan.split > 1 ? plan.split : 0;
  return launch_kernel<narrow_kernel<S>>(grid, maps, args, plan);
}

// All shapes are loaded at the first launch, so that none is while a graph is captured.
template <typename... S>
const char* launch_first(const NarrowArgs& args, const NarrowLaunch& launch) {
  cudaError_t error = cudaSuccess;
  const auto allow = [&](cudaError_t next) { error = error == cudaSuccess ? next : error; };
  (allow(allow_shared_memory<narrow_kernel<S>>(launch.device)), ...);
  if (error != cudaSuccess) return describe(error);
  const char* wrong = "more than 64 tokens";
  const auto suits = [&](int tokens, bool gated) {
    return args.m <= tokens && launch.gated == gated;
  };
  ((suits(S::TOKENS, S::GATED) ? (wrong = launch_shape<S>(args, launch), true) : false) || ...);
  return wrong;
}

}  // namespace

const char* launch_narrow(const NarrowArgs& args, const NarrowLaunch& launch) {
  if (const char* wrong = refuse(args, launch)) return wrong;
  return launch_first<Shape<32, false>, Shape<64, false>, Shape<32, true>, Shape<64, true>>(args,
                                                                                            launch);
}

const char* narrow_clusters(int split, int device, int& count) {
  constexpr auto kernel = narrow_kernel<Shape<32, false>>;
  const cudaError_t error = allow_shared_memory<kernel>(device);
  if (error != cudaSuccess) return describe(error);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = split;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(split);
  config.blockDim = dim3(narrow::kMostThreads);
  config.dynamicSmemBytes = kMaxSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return describe(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
}

}  // namespace vllm_cuda
