// SPDX-License-Identifier: Apache-2.0
// Compiled shapes of prefill attention, one per head size.
#include "hopper/prefill_attention_launch.cuh"

namespace vllm_cuda {

const char* launch_prefill_attention(const PrefillAttentionArgs& args,
                                     const PrefillAttentionLaunch& launch) {
  using namespace prefill_attention;
  switch (launch.head_dim) {
    case 64:
      return launch_shape<Shape<64, 128, 3, 3>>(args, launch);
    case 128:
      return launch_shape<Shape<128, 160, 2, 2>>(args, launch);
    case 256:
      return launch_shape<Shape<256, 80, 2, 2>>(args, launch);
    default:
      return "head sizes are 64, 128 and 256";
  }
}

}  // namespace vllm_cuda
