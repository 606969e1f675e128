// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.few_token_experts: the experts' products of a few tokens.
#include <stdexcept>

#include "few_token_experts.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

bool is_dense(const Tensor& tensor, ScalarType dtype, int64_t dim) {
  return tensor.is_cuda() && tensor.dim() == dim && tensor.scalar_type() == dtype &&
         tensor.is_contiguous() && aligned(tensor);
}

// Of the rows of a stack of weights.
void check_scale(const char* name, const Tensor& scale, const Tensor& weight, bool grouped) {
  const int64_t groups = (weight.size(2) + 127) / 128;
  need(is_dense(scale, ScalarType::Float, grouped ? 3 : 2) && scale.size(0) == weight.size(0) &&
           (!grouped || scale.size(1) == groups) && scale.size(grouped ? 2 : 1) == weight.size(1),
       name, scale, "be dense float32 [experts, (groups of 128 channels,) rows]");
}

// See FewTokenExpertsArgs.
void few_token_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                       const OptTensor& gate_up_scale, const OptTensor& down_scale,
                       const Tensor& experts, const Tensor& gated, const Tensor& out,
                       bool overlap) {
  constexpr auto BF16 = ScalarType::BFloat16;
  constexpr int64_t kMost = int64_t{1} << 24;
  const bool scaled = gate_up_scale.has_value();
  if (scaled != down_scale.has_value()) {
    throw std::runtime_error("vllm_cuda: few_token_experts: scales of one of the products");
  }
  const auto operand = scaled ? ScalarType::Float8_e4m3fn : BF16;
  const int64_t bytes = scaled ? 1 : 2, word = 16 / bytes;
  need(x.is_cuda() && x.dim() == 2 && x.scalar_type() == BF16 && x.stride(1) == 1 &&
           x.stride(0) % 8 == 0 && aligned(x) && x.size(1) > 0 && x.size(1) % word == 0,
       "x", x, "be bfloat16 [tokens, hidden] with 16-byte aligned rows, as the weights' are");
  const int64_t tokens = x.size(0), hidden = x.size(1);
  need(is_dense(down, operand, 3) && down.size(0) > 0 && down.size(0) < kMost &&
           down.size(1) == hidden && down.size(2) > 0 && down.size(2) % word == 0,
       "down", down, "be dense [experts, hidden, inner], rows a multiple of 16 bytes, bfloat16 or "
       "with scales float8_e4m3fn");
  const int64_t inner = down.size(2);
  need(is_dense(gate_up, operand, 3) && gate_up.size(0) == down.size(0) &&
           gate_up.size(1) == 2 * inner && gate_up.size(2) == hidden,
       "gate_up", gate_up, "be dense [experts, 2 inner, hidden] of the type of down");
  const bool grouped = scaled && gate_up_scale->dim() == 3;
  if (scaled) {
    check_scale("gate_up_scale", *gate_up_scale, gate_up, grouped);
    check_scale("down_scale", *down_scale, down, grouped);
  }
  need(experts.is_cuda() && experts.dim() == 2 && experts.scalar_type() == ScalarType::Int &&
           experts.size(0) == tokens && experts.size(1) > 0 && experts.stride(1) == 1,
       "experts", experts, "be int32 [tokens, slots]");
  const int64_t pairs = experts.numel();
  need(is_dense(gated, BF16, 2) && gated.size(0) == pairs && gated.size(1) == inner, "gated", gated,
       "be dense bfloat16 [tokens * slots, inner]");
  need(is_dense(out, BF16, 2) && out.size(0) == pairs && out.size(1) == hidden, "out", out,
       "be dense bfloat16 [tokens * slots, hidden]");
  if (tokens == 0) return;
  need(bytes * hidden <= kMostRowBytes && bytes * inner <= kMostRowBytes, "down", down,
       "have rows of at most 8 KB, as gate_up");
  need(pairs <= kMostPairs, "experts", experts, "be at most 128 pairs of token and slot");
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  FewTokenExpertsArgs args{};
  args.x = x.data_ptr();
  args.gate_up = gate_up.data_ptr();
  args.down = down.data_ptr();
  if (scaled) {
    args.gate_up_scale = static_cast<const float*>(gate_up_scale->data_ptr());
    args.down_scale = static_cast<const float*>(down_scale->data_ptr());
  }
  args.grouped = grouped;
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
  throw_if("few_token_experts",
           launch_few_token_experts(args, {overlap, device, current_stream(device)}));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "few_token_experts(Tensor x, Tensor gate_up, Tensor down, Tensor? gate_up_scale,"
      " Tensor? down_scale, Tensor experts, Tensor(a!) gated, Tensor(b!) out, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("few_token_experts", TORCH_BOX(&vllm_cuda::few_token_experts));
}
