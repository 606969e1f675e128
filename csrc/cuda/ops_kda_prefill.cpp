// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: prefills of Kimi delta attention.
#include "chunk_scan_tensors.h"
#include "kda_prefill.h"

namespace vllm_cuda {

void kda_prefill(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
                 const Tensor& dt_bias, Tensor out, Tensor states, const Tensor& state_indices,
                 const Tensor& has_initial_state, const Tensor& query_start_loc,
                 const Tensor& chunk_offsets, int64_t helpers, Tensor handed, Tensor ready,
                 double scale) {
  using namespace chunk_scan;
  const int64_t tokens = qkv.size(0), heads = a.size(1), sequences = state_indices.size(0);
  check_tokens("qkv", qkv, tokens, 3 * heads);
  check_tokens("a", a, tokens, heads);
  check_tokens("out", out, tokens, heads);
  if (!b.is_cuda() || b.dim() != 2 || b.scalar_type() != ScalarType::BFloat16 ||
      b.size(0) != tokens || b.size(1) != heads || b.stride(1) != 1) {
    reject("b", b, "be bfloat16 [tokens, heads]");
  }
  check_parameter("A_log", A_log, heads);
  check_parameter("dt_bias", dt_bias, heads * kHeadDim);
  check_states(states, heads);
  check_batch("state_indices", state_indices, 0, ScalarType::Int);
  check_batch("has_initial_state", has_initial_state, sequences, ScalarType::Bool);
  check_batch("query_start_loc", query_start_loc, sequences + 1, ScalarType::Int);
  check_batch("chunk_offsets", chunk_offsets, sequences, ScalarType::Int);
  check_batch("ready", ready, 0, ScalarType::Int);
  if (!handed.is_cuda() || handed.scalar_type() != ScalarType::Byte || !handed.is_contiguous() ||
      !aligned(handed) || handed.numel() < ready.numel() * kHandedBytes) {
    reject("handed", handed, "be dense uint8: kHandedBytes for each element of ready");
  }
  if (tokens == 0 || sequences == 0) return;
  const int32_t device = qkv.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  KdaPrefillArgs args{};
  args.qkv = qkv.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.out = out.data_ptr();
  args.A_log = static_cast<const float*>(A_log.data_ptr());
  args.dt_bias = static_cast<const float*>(dt_bias.data_ptr());
  args.states = states.data_ptr();
  args.state_indices = static_cast<const int32_t*>(state_indices.data_ptr());
  args.carried = static_cast<const bool*>(has_initial_state.data_ptr());
  args.starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
  args.chunk_offsets = static_cast<const int32_t*>(chunk_offsets.data_ptr());
  args.handed = handed.data_ptr();
  args.ready = static_cast<int32_t*>(ready.data_ptr());
  args.helpers = static_cast<int>(helpers);
  args.most_chunks = static_cast<int>(ready.numel() / heads);
  args.qkv_stride = qkv.stride(0);
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.out_stride = out.stride(0);
  args.state_stride = states.stride(0);
  args.tokens = tokens;
  args.sequences = static_cast<int>(sequences);
  args.heads = static_cast<int>(heads);
  args.scale = static_cast<float>(scale);
  const bool wide_states = states.scalar_type() == ScalarType::Float;
  throw_if("kda_prefill", launch_kda_prefill(args, wide_states, device, current_stream(device)));
}

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "kda_prefill(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
      " Tensor(a!) out, Tensor(b!) states, Tensor state_indices, Tensor has_initial_state,"
      " Tensor query_start_loc, Tensor chunk_offsets, int helpers, Tensor(c!) handed,"
      " Tensor(d!) ready, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("kda_prefill", TORCH_BOX(&vllm_cuda::kda_prefill));
}
