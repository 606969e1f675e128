// SPDX-License-Identifier: Apache-2.0
// Compiled shapes of prefill attention, one per head size and dtype of the cache.
#include "hopper/prefill_attention_launch.cuh"

namespace vllm_cuda {

namespace prefill_attention {

template <bool FP8>
const char* launch_head_dim(const PrefillAttentionArgs& args,
                            const PrefillAttentionLaunch& launch) {
  switch (launch.head_dim) {
    case 64:
      return launch_shape<Shape<64, 128, 3, 3, FP8>>(args, launch);
    case 128:
      return launch_shape<Shape<128, 160, 2, 2, FP8>>(args, launch);
    case 256:
      return launch_shape<Shape<256, 80, 2, 2, FP8>>(args, launch);
    default:
      return "head sizes are 64, 128 and 256";
  }
}

}  // namespace prefill_attention

const char* launch_prefill_attention(const PrefillAttentionArgs& args,
                                     const PrefillAttentionLaunch& launch) {
  return launch.fp8_cache ? prefill_attention::launch_head_dim<true>(args, launch)
                          : prefill_attention::launch_head_dim<false>(args, launch);
}

}  // namespace vllm_cuda
