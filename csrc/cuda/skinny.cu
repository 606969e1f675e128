// SPDX-License-Identifier: Apache-2.0
// Launch of the skinny matmul: the compiled variant, the grid, the shared memory.
#include "skinny.cuh"

#include <algorithm>

#include "launch.h"

namespace vllm_cuda {

namespace {

// WARPS and CHUNKS decide the order of a sum: they are the same in every variant.
using ManyRows = Shape<2, 8, 4, 3>;
using FewRows = Shape<3, 8, 4, 2>;

template <typename T, typename S, int HALVES, bool GATED, bool NORM>
const char* launch_variant(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  const int bytes = SharedParts<S, HALVES, NORM>::bytes(args.k, args.ring_bytes);
  if (args.ring_bytes < 2 * S::ROWS * S::ROW_BYTES) return "a ring of fewer than two stages";
  if (bytes > kMaxSharedBytes) return "a ring larger than shared memory";
  int count;
  cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  constexpr auto kernel = skinny_kernel<T, S, HALVES, GATED, NORM>;
  error = allow_shared_memory<kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const int outputs = GATED ? args.n / 2 : args.n;
  const unsigned ctas = std::min(count * launch.ctas_per_sm, (outputs + 7) / 8);
  const size_t shared = bytes;
  return launch_kernel<kernel>({ctas, S::THREADS, shared, launch.stream, launch.overlap}, args);
}

template <typename T, int HALVES, bool GATED>
const char* choose_norm(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  if (args.norm == nullptr) return launch_variant<T, ManyRows, HALVES, GATED, false>(args, launch);
  if constexpr (HALVES == 1) {
    static_assert(kNormColumns[1] == ManyRows::AHEAD * ManyRows::COLUMNS);
    if (args.k > kNormColumns[0] && args.k <= kNormColumns[1]) {
      return launch_variant<T, ManyRows, HALVES, GATED, true>(args, launch);
    }
  }
  return "a norm of more tokens, or of fewer or more columns, than it is made for";
}

template <typename T, int HALVES, bool GATED>
const char* choose_shape(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  if (launch.variant == 0) return choose_norm<T, HALVES, GATED>(args, launch);
  if (launch.variant != 1) return "an unknown variant";
  if (args.norm != nullptr) return "variant 1 does not hold x whole: a norm needs variant 0";
  if constexpr (GATED) {
    return "variant 1 has an odd number of tiles: gate and up need two each";
  } else {
    return launch_variant<T, FewRows, HALVES, false, false>(args, launch);
  }
}

template <typename T, int HALVES>
const char* choose_result(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return launch.gated ? choose_shape<T, HALVES, true>(args, launch)
                      : choose_shape<T, HALVES, false>(args, launch);
}

template <typename T>
const char* choose_tokens(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return args.m <= 8 ? choose_result<T, 1>(args, launch) : choose_result<T, 2>(args, launch);
}

}  // namespace

const char* launch_skinny(const SkinnyArgs& args, const SkinnyLaunch& launch) {
  return launch.half ? choose_tokens<__half>(args, launch)
                     : choose_tokens<__nv_bfloat16>(args, launch);
}

}  // namespace vllm_cuda
