// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.expert_blocks: pairs of token and slot in blocks that have one expert each;
// expert_products: a matrix product per block.
#include <stdexcept>

#include "expert_blocks.h"
#include "experts.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kMost = int64_t{1} << 30;  // rows of anything

void check_indices(const char* name, const Tensor& tensor, int64_t size) {
  need(tensor.is_cuda() && tensor.scalar_type() == ScalarType::Int && tensor.dim() == 1 &&
           tensor.is_contiguous() && tensor.size(0) == size,
       name, tensor, "be dense int32, of the blocks' size");
}

void check_scales(const OptTensor& x_scale, const OptTensor& weight_scale, int64_t x_rows,
                  int64_t experts, int64_t weight_rows, int64_t groups) {
  const Tensor &of_x = *x_scale, &of_weight = *weight_scale;
  need(of_x.is_cuda() && of_x.scalar_type() == ScalarType::Float && of_x.dim() == 2 &&
           of_x.size(0) >= x_rows && (of_x.size(1) == 1 || of_x.size(1) == groups),
       "x_scale", of_x, "be float32 [rows, 1 or groups of 128 channels]");
  const bool grouped = of_weight.dim() == 3;
  need(of_weight.is_cuda() && of_weight.scalar_type() == ScalarType::Float &&
           of_weight.is_contiguous() && aligned(of_weight) && (grouped || of_weight.dim() == 2) &&
           of_weight.size(0) == experts && of_weight.size(of_weight.dim() - 1) == weight_rows &&
           (!grouped || of_weight.size(1) == groups) && grouped == (of_x.size(1) == groups),
       "weight_scale", of_weight, "be dense float32 [experts, (groups,) rows]");
}

// See ExpertBlocksArgs.
void expert_blocks(const Tensor& experts, const Tensor& pairs, const Tensor& block_experts,
                   const Tensor& ends, int64_t height, bool overlap) {
  need(experts.is_cuda() && experts.dim() == 2 && experts.scalar_type() == ScalarType::Int &&
           experts.size(1) > 0 && experts.stride(1) == 1 && experts.numel() < kMost,
       "experts", experts, "be int32 [tokens, slots]");
  const int64_t blocks = block_experts.size(0), num_experts = ends.size(0);
  if (height < 1 || blocks * height >= kMost || num_experts < 1 || num_experts > kMostExperts) {
    throw std::runtime_error("vllm_cuda: expert_blocks: no, or too many places or experts");
  }
  check_indices("pairs", pairs, blocks * height);
  check_indices("block_experts", block_experts, blocks);
  check_indices("ends", ends, num_experts);
  if (experts.size(0) == 0) return;
  const int32_t device = experts.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  ExpertBlocksArgs args{};
  args.experts = static_cast<const int*>(experts.data_ptr());
  args.pairs = static_cast<int*>(pairs.data_ptr());
  args.block_experts = static_cast<int*>(block_experts.data_ptr());
  args.ends = static_cast<int*>(ends.data_ptr());
  args.stride = experts.stride(0);
  args.num_pairs = static_cast<int>(experts.numel());
  args.slots = static_cast<int>(experts.size(1));
  args.num_experts = static_cast<int>(num_experts);
  args.num_blocks = static_cast<int>(blocks);
  args.height = static_cast<int>(height);
  ExpertBlocksLaunch launch{};
  launch.overlap = overlap;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("expert_blocks", launch_expert_blocks(args, launch));
}

// See ExpertsArgs.
void expert_products(const Tensor& x, const Tensor& weight, const OptTensor& x_scale,
                       const OptTensor& weight_scale, const Tensor& pairs,
                       const Tensor& block_experts, const Tensor& ends, const Tensor& out,
                       int64_t slots, int64_t height, bool gated, bool overlap) {
  const bool scaled = x_scale.has_value();
  const auto operands = scaled ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  const int64_t bytes = scaled ? 1 : 2;
  need(x.is_cuda() && x.dim() == 2 && x.scalar_type() == operands && x.size(0) < kMost &&
           x.stride(1) == 1 && x.stride(0) * bytes % 16 == 0 && x.stride(0) >= x.size(1) &&
           x.size(0) * x.stride(0) * bytes / 16 < (int64_t{1} << 32) && aligned(x),
       "x", x, "be [rows, k] with 16-byte aligned rows, e4m3 with scales and else bfloat16");
  need(weight.is_cuda() && weight.dim() == 3 && weight.scalar_type() == operands &&
           weight.is_contiguous() && aligned(weight) && weight.size(0) > 0 &&
           weight.size(0) < kMost && weight.size(1) < kMost && weight.size(2) == x.size(1) &&
           weight.size(2) > 0 && weight.size(2) * bytes % 128 == 0 &&
           weight.size(1) % (gated ? 16 : 8) == 0,
       "weight", weight, "be dense [experts, rows, k] of x's dtype, k a multiple of 128 bytes");
  const int64_t experts = weight.size(0), n = gated ? weight.size(1) / 2 : weight.size(1);
  need(out.is_cuda() && out.dim() == 2 && out.scalar_type() == ScalarType::BFloat16 &&
           out.is_contiguous() && aligned(out) && out.size(0) < kMost && out.size(1) == n,
       "out", out, "be dense bfloat16 with the weight's outputs");
  const int64_t blocks = block_experts.size(0);
  if (slots < 1 || height < 1 || blocks * height >= kMost) {
    throw std::runtime_error("vllm_cuda: expert_products: no slots, or too many places");
  }
  check_indices("pairs", pairs, blocks * height);
  check_indices("block_experts", block_experts, blocks);
  check_indices("ends", ends, experts);
  // Rows of x that have been padded have no pairs.
  const int64_t num_pairs = out.size(0);
  need(num_pairs <= x.size(0) * slots, "out", out, "have no more rows than x's have slots");
  if (weight_scale.has_value() != scaled) {
    throw std::runtime_error("vllm_cuda: expert_products: both operands have scales, or none");
  }
  const int64_t groups = (weight.size(2) + 127) / 128;
  if (scaled) {
    check_scales(x_scale, weight_scale, x.size(0), experts, weight.size(1), groups);
  }
  if (blocks == 0 || n == 0) return;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  ExpertsArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  if (scaled) {
    const bool grouped = weight_scale->dim() == 3;
    args.x_scale = static_cast<const float*>(x_scale->data_ptr());
    args.weight_scale = static_cast<const float*>(weight_scale->data_ptr());
    args.x_scale_row = x_scale->stride(0);
    args.x_scale_group = grouped ? x_scale->stride(1) : 0;
    args.weight_scale_expert = weight_scale->stride(0);
    args.weight_scale_group = grouped ? weight_scale->stride(1) : 0;
  }
  args.pairs = static_cast<const int*>(pairs.data_ptr());
  args.block_experts = static_cast<const int*>(block_experts.data_ptr());
  args.ends = static_cast<const int*>(ends.data_ptr());
  args.x_stride = x.stride(0) * bytes;
  args.num_pairs = static_cast<int>(num_pairs);
  args.slots = static_cast<int>(slots);
  args.num_experts = static_cast<int>(experts);
  args.num_blocks = static_cast<int>(blocks);
  args.n = static_cast<int>(n);
  args.row_bytes = static_cast<int>(x.size(1) * bytes);
  ExpertsLaunch launch{};
  launch.gated = gated;
  launch.overlap = overlap;
  launch.height = static_cast<int>(height);
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("expert_products", launch_experts(args, launch));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "expert_blocks(Tensor experts, Tensor(a!) pairs, Tensor(b!) block_experts, Tensor(c!) ends,"
      " int height, bool overlap) -> ()");
  m.def(
      "expert_products(Tensor x, Tensor weight, Tensor? x_scale, Tensor? weight_scale,"
      " Tensor pairs, Tensor block_experts, Tensor ends, Tensor(a!) out, int slots, int height,"
      " bool gated, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("expert_blocks", TORCH_BOX(&vllm_cuda::expert_blocks));
  m.impl("expert_products", TORCH_BOX(&vllm_cuda::expert_products));
}
