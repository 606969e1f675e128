// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.pairwise_experts: the experts' products of a few tokens.
#include "pairwise_experts.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

bool is_dense(const Tensor& tensor, ScalarType dtype, int64_t dim) {
  return tensor.is_cuda() && tensor.dim() == dim && tensor.scalar_type() == dtype &&
         tensor.is_contiguous() && aligned(tensor);
}

// See PairwiseExpertsArgs.
void pairwise_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                      const Tensor& experts, const Tensor& gated, const Tensor& out,
                      bool overlap) {
  constexpr auto BF16 = ScalarType::BFloat16;
  constexpr int64_t kMost = int64_t{1} << 24;
  need(x.is_cuda() && x.dim() == 2 && x.scalar_type() == BF16 && x.stride(1) == 1 &&
           x.stride(0) % 8 == 0 && aligned(x) && x.size(1) > 0 && x.size(1) % 8 == 0,
       "x", x, "be bfloat16 [tokens, hidden] with 16-byte aligned rows");
  const int64_t tokens = x.size(0), hidden = x.size(1);
  need(is_dense(down, BF16, 3) && down.size(0) > 0 && down.size(0) < kMost &&
           down.size(1) == hidden && down.size(2) > 0 && down.size(2) % 8 == 0,
       "down", down, "be dense bfloat16 [experts, hidden, inner], inner a multiple of 8");
  const int64_t inner = down.size(2);
  need(is_dense(gate_up, BF16, 3) && gate_up.size(0) == down.size(0) &&
           gate_up.size(1) == 2 * inner && gate_up.size(2) == hidden,
       "gate_up", gate_up, "be dense bfloat16 [experts, 2 inner, hidden]");
  need(experts.is_cuda() && experts.dim() == 2 && experts.scalar_type() == ScalarType::Int &&
           experts.size(0) == tokens && experts.size(1) > 0 && experts.stride(1) == 1,
       "experts", experts, "be int32 [tokens, slots]");
  const int64_t pairs = experts.numel();
  need(is_dense(gated, BF16, 2) && gated.size(0) == pairs && gated.size(1) == inner, "gated", gated,
       "be dense bfloat16 [tokens * slots, inner]");
  need(is_dense(out, BF16, 2) && out.size(0) == pairs && out.size(1) == hidden, "out", out,
       "be dense bfloat16 [tokens * slots, hidden]");
  if (tokens == 0) return;
  need(2 * tokens * hidden <= kMostInputBytes && 2 * hidden <= kMostRowBytes, "x", x,
       "be at most 3 rows of 4096 channels, or as much of shorter ones");
  need(2 * pairs * inner <= kMostGatedBytes && 2 * inner <= kMostRowBytes, "gated", gated,
       "be at most 6 rows of 4096 channels, or as much of shorter ones");
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  PairwiseExpertsArgs args{};
  args.x = x.data_ptr();
  args.gate_up = gate_up.data_ptr();
  args.down = down.data_ptr();
  args.experts = static_cast<const int*>(experts.data_ptr());
  args.gated = gated.data_ptr();
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.experts_stride = experts.stride(0);
  args.tokens = static_cast<int>(tokens);
  args.slots = static_cast<int>(experts.size(1));
  args.num_experts = static_cast<int>(down.size(0));
  args.hidden = static_cast<int>(hidden);
  args.inner = static_cast<int>(inner);
  throw_if("pairwise_experts",
           launch_pairwise_experts(args, {overlap, device, current_stream(device)}));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "pairwise_experts(Tensor x, Tensor gate_up, Tensor down, Tensor experts, Tensor(a!) gated,"
      " Tensor(b!) out, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("pairwise_experts", TORCH_BOX(&vllm_cuda::pairwise_experts));
}
