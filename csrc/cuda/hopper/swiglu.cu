// SPDX-License-Identifier: Apache-2.0
// Shapes of the gated matmul of many tokens.
#include "hopper/matmul_launch.cuh"

namespace vllm_cuda {

namespace {

using matmul::Shape;

// Their places are known to `vllm/kernels/swiglu.py`.
using Compiled =
    matmul::Shapes<Shape<128, 128, 4, 2, 1>, Shape<256, 72, 4, 1, 2>, Shape<128, 72, 6, 1, 2>>;

}  // namespace

const char* launch_swiglu(const MatmulArgs& args, const MatmulLaunch& launch) {
  return Compiled::launch(args, launch);
}

}  // namespace vllm_cuda
