// SPDX-License-Identifier: Apache-2.0
// Shapes of the plain matmul of many tokens.
#include "hopper/matmul_launch.cuh"

namespace vllm_cuda {

namespace {

using matmul::Kind;
template <int TOKENS, int OUTPUTS, int STAGES, int ROWS, int COLUMNS, int HELD = 0>
using Shape = matmul::Shape<Kind::kLinear, TOKENS, OUTPUTS, STAGES, ROWS, COLUMNS, HELD>;

// Their places are known to `vllm/kernels/wide_shapes.py`.
using Compiled = matmul::Shapes<Shape<128, 256, 4, 2, 1, 2>, Shape<128, 160, 5, 2, 1>,
                                Shape<128, 256, 4, 1, 2, 2>, Shape<128, 96, 7, 1, 1>>;

}  // namespace

const char* launch_wide_linear(const MatmulArgs& args, const MatmulLaunch& launch) {
  return Compiled::launch(args, launch);
}

}  // namespace vllm_cuda
