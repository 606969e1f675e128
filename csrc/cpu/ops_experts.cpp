// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

constexpr const char* kOp = "run_experts";

const void* stack_of(const Tensor& tensor, Sizes sizes, DType dtype, const char* name) {
  check_dtype(tensor, dtype, {kOp, name});
  check_shape(tensor, sizes, static_cast<int64_t>(sizes.size()), {kOp, name});
  return tensor.data_ptr();
}

// The pairs that the stack computes by expert, in their own order.
struct SortedPairs {
  std::vector<int32_t> pairs;
  std::vector<ExpertBlock> blocks;

  explicit SortedPairs(const ExpertsArgs& args) {
    std::vector<int64_t> starts(args.num_experts + 1);
    for_pairs(args, [&](int64_t, int64_t expert) { ++starts[expert + 1]; });
    for (int64_t e = 0; e < args.num_experts; ++e) starts[e + 1] += starts[e];
    pairs.resize(starts.back());
    for (int64_t e = 0; e < args.num_experts; ++e) {
      for (int64_t begin = starts[e]; begin < starts[e + 1]; begin += kExpertPairs) {
        blocks.push_back({e, begin, std::min(begin + kExpertPairs, starts[e + 1])});
      }
    }
    for_pairs(args, [&](int64_t pair, int64_t expert) {
      pairs[starts[expert]++] = static_cast<int32_t>(pair);
    });
  }

  template <typename F>
  static void for_pairs(const ExpertsArgs& args, const F& f) {
    for (int64_t token = 0; token < args.tokens; ++token) {
      for (int64_t slot = 0; slot < args.slots; ++slot) {
        const int64_t expert = args.experts[token * args.experts_stride + slot];
        if (expert >= 0 && expert < args.num_experts) f(token * args.slots + slot, expert);
      }
    }
  }
};

}  // namespace

Tensor run_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
    const Tensor& experts, OptTensor shared, OptTensor gate_up_bias, OptTensor down_bias,
    bool gated, std::optional<double> alpha, std::optional<double> limit,
    std::optional<double> offset) {
  ExpertsArgs args{};
  args.dtype = float_dtype(x, {kOp, "x"});
  check_shape(x, {-1, -1}, 1, {kOp, "x"});
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  args.tokens = x.size(0);
  args.hidden = x.size(1);

  check_shape(down, {-1, args.hidden, -1}, 3, {kOp, "down"});
  args.num_experts = down.size(0);
  args.inner = down.size(2);
  const int64_t rows = gated ? 2 * args.inner : args.inner;
  args.down = stack_of(down, {args.num_experts, args.hidden, args.inner}, args.dtype, "down");
  args.gate_up = stack_of(gate_up, {args.num_experts, rows, args.hidden}, args.dtype, "gate_up");
  if (gate_up_bias) {
    args.gate_up_bias =
        stack_of(*gate_up_bias, {args.num_experts, rows}, args.dtype, "gate_up_bias");
  }
  if (down_bias) {
    args.down_bias = stack_of(*down_bias, {args.num_experts, args.hidden}, args.dtype, "down_bias");
  }
  STD_TORCH_CHECK(
      alpha.has_value() == limit.has_value() && alpha.has_value() == offset.has_value() &&
          (gated || !alpha),
      kOp, ": alpha, limit and offset must be given all or none, and with a gate only");
  args.activation = !gated ? ExpertActivation::kReluSquared
                    : alpha ? ExpertActivation::kClampedSwiglu
                            : ExpertActivation::kSwiglu;
  args.alpha = static_cast<float>(alpha.value_or(0));
  args.limit = static_cast<float>(limit.value_or(0));
  args.offset = static_cast<float>(offset.value_or(0));

  args.experts = int32s_of(experts, {args.tokens, -1}, 1, {kOp, "experts"});
  args.slots = experts.size(1);
  args.experts_stride = experts.stride(0);
  args.weights =
      floats_of(weights, {args.tokens, args.slots + (shared ? 1 : 0)}, 1, {kOp, "weights"});
  args.weights_stride = weights.stride(0);
  if (shared) {
    check_dtype(*shared, args.dtype, {kOp, "shared"});
    check_shape(*shared, {args.tokens, args.hidden}, 1, {kOp, "shared"});
    args.shared = shared->data_ptr();
    args.shared_stride = shared->stride(0);
  }

  const SortedPairs sorted(args);
  args.pairs = sorted.pairs.data();
  args.blocks = sorted.blocks.data();
  args.num_blocks = static_cast<int64_t>(sorted.blocks.size());
  // Whatever the instruction set's operand, and not a power of two from row to row.
  args.active_stride = (args.inner + 63) / 32 * 32;
  const int64_t element = args.dtype == DType::kF32 ? 1 : 2;
  Tensor active = empty(
      {static_cast<int64_t>(sorted.pairs.size()), args.active_stride * element}, x);
  Tensor outputs = empty({args.tokens * args.slots, args.hidden}, x);
  Tensor out = empty({args.tokens, args.hidden}, x);
  args.active = active.data_ptr();
  args.outputs = outputs.data_ptr();
  args.out = out.data_ptr();
  kernels().run_experts(args);
  return out;
}

}  // namespace vllm_cpu
