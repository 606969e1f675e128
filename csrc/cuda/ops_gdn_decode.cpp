// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the gated delta rule's decode step.
#include <stdexcept>

#include "gdn_decode.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

// `n` sequences of `tokens` each, `rows` in all.
struct Sizes {
  int64_t n, tokens, rows, k_heads, v_heads, channels;
};

// All but the first dimension, whose stride is a multiple of `step`, are dense.
bool dense_rows(const Tensor& tensor, int64_t step) {
  int64_t stride = 1;
  for (int64_t d = tensor.dim() - 1; d > 0; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != stride) return false;
    stride *= tensor.size(d);
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return tensor.stride(0) % step == 0 && address % (step * tensor.element_size()) == 0;
}

void check_tokens(
    const Sizes& s, const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& indices, const Tensor& out) {
  constexpr auto bf16 = ScalarType::BFloat16, f32 = ScalarType::Float;
  need(is(qkv, bf16, {s.rows, s.channels}) && dense_rows(qkv, 4), "qkv", qkv,
       "be bfloat16 [tokens, (2 k heads + v heads) * 128], rows at 8 bytes");
  for (const Tensor* gate : {&a, &b}) {
    need(is(*gate, bf16, {s.rows, s.v_heads}) && dense_rows(*gate, 1), "a and b", *gate,
         "be bfloat16 [tokens, v heads]");
  }
  for (const Tensor* gate : {&A_log, &dt_bias}) {
    need(is(*gate, f32, {s.v_heads}) && gate->is_contiguous(), "A_log and dt_bias", *gate,
         "be float32 [v heads]");
  }
  need(is(indices, ScalarType::Int, {s.n}) && indices.is_contiguous(), "state_indices", indices,
       "be int32 [n]");
  need(is(out, bf16, {s.rows, s.v_heads, kHeadDim}) && dense_rows(out, 4), "out", out,
       "be bfloat16 [tokens, v heads, 128]");
}

void check_states(
    const Sizes& s, const Tensor& weight, const OptTensor& bias, const Tensor& conv_state,
    const Tensor& state) {
  constexpr auto bf16 = ScalarType::BFloat16;
  need(is(weight, bf16, {s.channels, kConvWidth}) && weight.is_contiguous() && aligned(weight),
       "conv_weight", weight, "be dense bfloat16 [channels, 4]");
  if (bias) {
    need(is(*bias, bf16, {s.channels}) && dense_rows(*bias, 1) && aligned(*bias), "conv_bias",
         *bias, "be dense bfloat16 [channels]");
  }
  need(conv_state.dim() == 3 &&
           is(conv_state, bf16, {conv_state.size(0), kConvWidth - 1, s.channels}) &&
           dense_rows(conv_state, 4),
       "conv_state", conv_state, "be bfloat16 [blocks, 3, channels], blocks at 8 bytes");
  const bool wide = state.scalar_type() == ScalarType::Float;
  need(state.dim() == 4 &&
           is(state, wide ? ScalarType::Float : bf16,
              {state.size(0), s.v_heads, kHeadDim, kHeadDim}) &&
           dense_rows(state, wide ? 4 : 8),
       "ssm_state", state, "be float32 or bfloat16 [blocks, v heads, 128, 128], blocks at 16 bytes");
}

void check_ring(
    const Sizes& s, const Tensor& steps, const OptTensor& keys, const OptTensor& errors,
    const OptTensor& decays, const OptTensor& taken, const OptTensor& inputs) {
  constexpr auto f32 = ScalarType::Float;
  if (!keys || !errors || !decays || !taken || !inputs) {
    throw std::runtime_error(
        "vllm_cuda: a ring has steps, keys, errors, decays, taken and inputs");
  }
  need(steps.dim() == 2 && is(steps, ScalarType::Int, {steps.size(0), 4}) &&
           steps.size(0) >= s.n && steps.is_contiguous() && aligned(steps),
       "steps", steps, "be dense int32 [at least n, 4]");
  need(keys->dim() == 4 && is(*keys, f32, {keys->size(0), keys->size(1), s.k_heads, kHeadDim}) &&
           keys->is_contiguous() && aligned(*keys),
       "keys", *keys, "be dense float32 [rows, slots, k heads, 128]");
  const int64_t rows = keys->size(0), slots = keys->size(1);
  need(is(*errors, f32, {rows, slots, s.v_heads, kHeadDim}) && errors->is_contiguous() &&
           aligned(*errors),
       "errors", *errors, "be dense float32 [rows, slots, v heads, 128]");
  need(is(*decays, f32, {rows, slots, s.v_heads}) && decays->is_contiguous(), "decays", *decays,
       "be dense float32 [rows, slots, v heads]");
  need(taken->dim() == 1 && is(*taken, ScalarType::Int, {taken->size(0)}) &&
           taken->is_contiguous(),
       "taken", *taken, "be dense int32 [rows]");
  need(inputs->dim() == 3 &&
           is(*inputs, ScalarType::BFloat16, {rows, inputs->size(1), s.channels}) &&
           inputs->is_contiguous() && aligned(*inputs),
       "inputs", *inputs, "be dense bfloat16 [rows, drafts, channels]");
  const int64_t drafts = inputs->size(1);
  if (s.tokens > drafts + 1) {
    reject("inputs", *inputs, "keep those of all of a step's tokens but the first");
  }
  if (slots - drafts < 1 || slots - drafts > kMaxPending) {
    reject("keys", *keys, "have slots for 1 to 20 pending tokens beside the drafts");
  }
}

void check_norm(const Sizes& s, const Tensor& gate, const OptTensor& weight) {
  if (!weight) throw std::runtime_error("vllm_cuda: a norm has a gate and a weight");
  need(is(gate, ScalarType::BFloat16, {s.rows, s.v_heads, kHeadDim}) && dense_rows(gate, 4), "gate",
       gate, "be bfloat16 [tokens, v heads, 128]");
  const bool wide = weight->scalar_type() == ScalarType::Float;
  need(is(*weight, wide ? ScalarType::Float : ScalarType::BFloat16, {kHeadDim}) &&
           weight->is_contiguous() && aligned(*weight),
       "norm_weight", *weight, "be float32 or bfloat16 [128]");
}

Sizes sizes_of(const Tensor& qkv, const Tensor& a, const Tensor& indices, int64_t k_heads) {
  if (qkv.dim() != 2 || a.dim() != 2) reject("qkv", qkv, "be [tokens, channels]");
  const int64_t rows = qkv.size(0), n = indices.numel(), tokens = n > 0 ? rows / n : 0;
  if (tokens * n != rows || tokens > kMaxTokens) {
    reject("qkv", qkv, "have equally many tokens of each sequence, 16 at most");
  }
  const Sizes s{n, tokens, rows, k_heads, a.size(1), (2 * k_heads + a.size(1)) * kHeadDim};
  const int64_t group = k_heads > 0 ? s.v_heads / k_heads : 0;
  if (k_heads < 1 || s.v_heads % k_heads != 0 || (group != 1 && group != 2 && group != 4)) {
    throw std::runtime_error("vllm_cuda: a key head must have 1, 2 or 4 value heads");
  }
  if (s.rows * k_heads >= 1 << 30) throw std::runtime_error("vllm_cuda: too many rows");
  return s;
}

void gdn_decode(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& conv_weight, OptTensor conv_bias, const Tensor& conv_state,
    const Tensor& ssm_state, const Tensor& state_indices, const Tensor& out, OptTensor steps,
    OptTensor keys, OptTensor errors, OptTensor decays, OptTensor taken, OptTensor inputs,
    OptTensor gate, OptTensor norm_weight, const Tensor& counter, double eps, double scale,
    int64_t k_heads, bool overlap) {
  const Sizes s = sizes_of(qkv, a, state_indices, k_heads);
  check_tokens(s, qkv, a, b, A_log, dt_bias, state_indices, out);
  check_states(s, conv_weight, conv_bias, conv_state, ssm_state);
  if (steps) {
    check_ring(s, *steps, keys, errors, decays, taken, inputs);
  } else if (s.tokens > 1) {
    throw std::runtime_error("vllm_cuda: several tokens of a sequence need a ring");
  }
  if (gate) check_norm(s, *gate, norm_weight);
  need(is(counter, ScalarType::Int, {1}), "counter", counter, "be int32 [1]");
  const int64_t group = s.v_heads / k_heads;
  if (s.n == 0) return;
  const int32_t device = qkv.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  GdnDecodeArgs args{};
  args.qkv = qkv.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.A_log = static_cast<const float*>(A_log.data_ptr());
  args.dt_bias = static_cast<const float*>(dt_bias.data_ptr());
  args.conv_weight = conv_weight.data_ptr();
  args.conv_bias = conv_bias ? conv_bias->data_ptr() : nullptr;
  args.conv_state = conv_state.data_ptr();
  args.state = ssm_state.data_ptr();
  args.indices = static_cast<const int*>(state_indices.data_ptr());
  args.counter = static_cast<int*>(counter.data_ptr());
  args.out = out.data_ptr();
  args.qkv_stride = qkv.stride(0);
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.conv_stride = conv_state.stride(0);
  args.state_stride = ssm_state.stride(0);
  args.out_stride = out.stride(0);
  args.eps = static_cast<float>(eps);
  args.scale = static_cast<float>(scale);
  args.n = static_cast<int>(s.n);
  args.tokens = static_cast<int>(s.tokens);
  args.items = static_cast<int>(k_heads);
  args.heads = static_cast<int>(group);
  if (steps) {
    args.steps = static_cast<const int*>(steps->data_ptr());
    args.keys = static_cast<float*>(keys->data_ptr());
    args.errors = static_cast<float*>(errors->data_ptr());
    args.decays = static_cast<float*>(decays->data_ptr());
    args.taken = static_cast<const int*>(taken->data_ptr());
    args.inputs = inputs->data_ptr();
    args.slots = static_cast<int>(keys->size(1));
    args.drafts = static_cast<int>(inputs->size(1));
    args.most_pending = args.slots - args.drafts;
  }
  if (gate) {
    args.gate = gate->data_ptr();
    args.gate_stride = gate->stride(0);
    args.norm_weight = norm_weight->data_ptr();
    args.norm_weight_is_float = norm_weight->scalar_type() == ScalarType::Float;
  }
  GdnDecodeLaunch launch{};
  launch.bf16_state = ssm_state.scalar_type() == ScalarType::BFloat16;
  launch.overlap = overlap;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("gdn decode", launch_gdn_decode(args, launch));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "gdn_decode(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor conv_weight,"
      " Tensor? conv_bias, Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor state_indices,"
      " Tensor(c!) out, Tensor? steps, Tensor(d!)? keys, Tensor(e!)? errors, Tensor(f!)? decays,"
      " Tensor? taken, Tensor(g!)? inputs, Tensor? gate, Tensor? norm_weight, Tensor(h!) counter,"
      " float eps, float scale, int k_heads, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("gdn_decode", TORCH_BOX(&vllm_cuda::gdn_decode));
}
