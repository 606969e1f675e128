// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the decode step of Kimi delta attention.
#include "kda_decode.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kHeadDim = 128, kTaps = 4;
constexpr int64_t kMaxPlaces = 32;  // a lane fetches one
constexpr auto kBf16 = ScalarType::BFloat16, kFloat = ScalarType::Float, kInt = ScalarType::Int;

// All but the first dimension, whose stride is a multiple of `step`, are dense; so are addresses.
bool dense_rows(const Tensor& tensor, int64_t step) {
  int64_t stride = 1;
  for (int64_t d = tensor.dim() - 1; d > 0; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != stride) return false;
    stride *= tensor.size(d);
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return tensor.stride(0) % step == 0 && address % (step * tensor.element_size()) == 0;
}

bool dense(const Tensor& tensor) { return tensor.is_contiguous() && aligned(tensor); }

void check_tokens(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
                  const Tensor& dt_bias, const Tensor& state_indices, const Tensor& out) {
  const int64_t n = state_indices.size(0), heads = b.size(1);
  need(is(qkv, kBf16, {n, 3 * heads * kHeadDim}) && dense_rows(qkv, 4), "qkv", qkv,
       "be bfloat16 [n, 3 * heads * 128], rows at 8 bytes");
  need(is(a, kBf16, {n, heads, kHeadDim}) && dense_rows(a, 1), "a", a,
       "be bfloat16 [n, heads, 128]");
  need(is(b, kBf16, {n, heads}) && dense_rows(b, 1), "b", b, "be bfloat16 [n, heads]");
  need(is(A_log, kFloat, {heads}) && dense(A_log), "A_log", A_log, "be float32 [heads]");
  need(is(dt_bias, kFloat, {heads, kHeadDim}) && dense(dt_bias), "dt_bias", dt_bias,
       "be float32 [heads, 128]");
  need(is(state_indices, kInt, {n}) && state_indices.is_contiguous(), "state_indices",
       state_indices, "be int32 [n]");
  need(is(out, kBf16, {n, heads, kHeadDim}) && dense_rows(out, 1), "out", out,
       "be bfloat16 [n, heads, 128]");
}

void check_states(const Tensor& conv_weight, const Tensor& conv_state, const Tensor& state,
                  int64_t heads) {
  const int64_t channels = 3 * heads * kHeadDim;
  need(is(conv_weight, kBf16, {channels, kTaps}) && dense(conv_weight), "conv_weight", conv_weight,
       "be dense bfloat16 [channels, 4]");
  need(conv_state.dim() == 3 && is(conv_state, kBf16, {conv_state.size(0), kTaps - 1, channels}) &&
           dense_rows(conv_state, 4),
       "conv_state", conv_state, "be bfloat16 [blocks, 3, channels], blocks at 8 bytes");
  const bool wide = state.scalar_type() == kFloat;
  need(state.dim() == 4 &&
           is(state, wide ? kFloat : kBf16, {state.size(0), heads, kHeadDim, kHeadDim}) &&
           dense_rows(state, wide ? 4 : 8),
       "state", state, "be float32 or bfloat16 [blocks, heads, 128, 128], blocks at 16 bytes");
}

void check_journal(const Tensor& steps, const OptTensor& keys, const OptTensor& errors,
                   const OptTensor& decays, int64_t n, int64_t heads) {
  if (!keys || !errors || !decays) {
    throw std::runtime_error("vllm_cuda: a journal has steps, keys, errors and decays");
  }
  need(steps.dim() == 2 && is(steps, kInt, {steps.size(0), 4}) && steps.size(0) >= n &&
           dense(steps),
       "steps", steps, "be dense int32 [at least n, 4]");
  for (const Tensor* x : {&*keys, &*errors, &*decays}) {
    need(x->dim() == 4 && is(*x, kFloat, {keys->size(0), keys->size(1), heads, kHeadDim}) &&
             dense(*x) && x->size(1) <= kMaxPlaces,
         "keys, errors and decays", *x,
         "be dense float32 [rows, at most 32 places, heads, 128], all of one size");
  }
}

void kda_decode(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
                const Tensor& dt_bias, const Tensor& conv_weight, const Tensor& conv_state,
                const Tensor& state, const Tensor& state_indices, const Tensor& out,
                OptTensor steps, OptTensor keys, OptTensor errors, OptTensor decays, double scale,
                bool overlap) {
  if (b.dim() != 2) reject("b", b, "be bfloat16 [n, heads]");
  const int64_t n = b.size(0), heads = b.size(1);
  check_tokens(qkv, a, b, A_log, dt_bias, state_indices, out);
  check_states(conv_weight, conv_state, state, heads);
  if (steps) check_journal(*steps, keys, errors, decays, n, heads);
  if (n == 0) return;
  const int32_t device = qkv.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  KdaDecodeArgs args{};
  args.qkv = qkv.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.A_log = static_cast<const float*>(A_log.data_ptr());
  args.dt_bias = static_cast<const float*>(dt_bias.data_ptr());
  args.conv_weight = conv_weight.data_ptr();
  args.conv_state = conv_state.data_ptr();
  args.state = state.data_ptr();
  args.indices = static_cast<const int*>(state_indices.data_ptr());
  args.out = out.data_ptr();
  args.qkv_stride = qkv.stride(0);
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.conv_stride = conv_state.stride(0);
  args.state_stride = state.stride(0);
  args.out_stride = out.stride(0);
  args.scale = static_cast<float>(scale);
  args.n = static_cast<int>(n);
  args.heads = static_cast<int>(heads);
  if (steps) {
    args.steps = static_cast<const int*>(steps->data_ptr());
    args.keys = static_cast<float*>(keys->data_ptr());
    args.errors = static_cast<float*>(errors->data_ptr());
    args.decays = static_cast<float*>(decays->data_ptr());
    args.places = static_cast<int>(keys->size(1));
  }
  const bool bf16_state = state.scalar_type() == kBf16;
  throw_if("kda_decode",
           launch_kda_decode(args, {bf16_state, overlap, device, current_stream(device)}));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "kda_decode(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
      " Tensor conv_weight, Tensor(a!) conv_state, Tensor(b!) state, Tensor state_indices,"
      " Tensor(c!) out, Tensor? steps, Tensor(d!)? keys, Tensor(e!)? errors, Tensor(f!)? decays,"
      " float scale, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("kda_decode", TORCH_BOX(&vllm_cuda::kda_decode));
}
