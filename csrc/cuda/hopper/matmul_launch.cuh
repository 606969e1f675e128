// SPDX-License-Identifier: Apache-2.0
// Launch of the gated matmul of many tokens: tensor maps, the shape, the grid.
#pragma once

#include <algorithm>

#include "hopper/matmul.cuh"
#include "hopper/tensor_map.h"
#include "launch.h"
#include "matmul.h"

namespace vllm_cuda::matmul {

inline int divide_up(int x, int y) { return (x + y - 1) / y; }

template <typename S>
const char* encode_maps(Maps& maps, const MatmulArgs& args, int box) {
  const Matrix x{args.x, args.m, args.k, args.x_stride};
  const Matrix weight{args.weight, int64_t{2} * args.n, args.k, args.k};
  const Matrix out{args.out, args.m, args.n, args.n};
  if (const char* error = encode_map(maps.x, x, {box, kColumns, true})) return error;
  if (const char* error = encode_map(maps.weight, weight, {S::OUTPUTS, kColumns, true})) {
    return error;
  }
  return encode_map(maps.out, out, {64, S::WIDTH, S::SWIZZLED});
}

template <typename S>
const char* launch_shape(const MatmulArgs& args, const MatmulLaunch& launch) {
  static_assert(sizeof(Shared<S>) <= kMaxSharedBytes);
  Maps maps{};
  // Rows beyond the last token cost time as well.
  const int box = 8 * divide_up(std::min(args.m, S::TOKENS), 8 * S::COLUMNS);
  if (const char* wrong = encode_maps<S>(maps, args, box)) return wrong;
  int ctas = 0;
  const cudaError_t error = multiprocessors(launch.device, ctas);
  if (error != cudaSuccess) return describe(error);
  Grid grid;
  grid.rows = divide_up(args.m, S::TOKENS * S::ROWS);
  grid.columns = divide_up(args.n, S::OUTPUTS * S::COLUMNS);
  grid.group = launch.group;
  grid.apart = args.n;
  grid.box = box;
  const unsigned clusters = std::min(ctas / S::CLUSTER, grid.rows * grid.columns);
  const LaunchGrid all{S::CLUSTER * clusters, kThreads,       sizeof(Shared<S>),
                       launch.stream,         launch.overlap, S::CLUSTER};
  return launch_kernel<matmul_kernel<S>>(all, maps, grid, divide_up(args.k, kColumns));
}

// Compiled shapes, in an order that Python knows. All are loaded at the first launch, so that none
// is while a graph is captured.
template <typename... S>
struct Shapes {
  static const char* launch(const MatmulArgs& args, const MatmulLaunch& launch) {
    using Launch = const char* (*)(const MatmulArgs&, const MatmulLaunch&);
    static constexpr Launch kLaunches[] = {launch_shape<S>...};
    if (launch.variant < 0 || launch.variant >= static_cast<int>(sizeof...(S))) {
      return "unknown variant";
    }
    cudaError_t error = cudaSuccess;
    const auto allow = [&](cudaError_t next) { error = error == cudaSuccess ? next : error; };
    (allow(allow_shared_memory<matmul_kernel<S>>(launch.device)), ...);
    if (error != cudaSuccess) return describe(error);
    return kLaunches[launch.variant](args, launch);
  }
};

}  // namespace vllm_cuda::matmul
