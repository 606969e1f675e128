// SPDX-License-Identifier: Apache-2.0
// Schemas of torch.ops.vllm_cpu.
#include "ops.h"
#include "table.h"

namespace vllm_cpu {
std::string isa() { return kernels().name; }
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY(vllm_cpu, m) {
  m.def("isa() -> str");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool one_plus) -> Tensor");
  m.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool one_plus)"
      " -> (Tensor, Tensor)");
  m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor");
  m.def("silu_and_mul(Tensor gate_up) -> Tensor");
  m.def("gelu_tanh_and_mul(Tensor gate_up) -> Tensor");
  m.def("clamped_swiglu(Tensor gate_up, float alpha, float limit, float offset) -> Tensor");
  m.def("mul_sigmoid(Tensor x, Tensor gate) -> Tensor");
  m.def("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "run_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor experts,"
      " Tensor? shared, Tensor? gate_up_bias, Tensor? down_bias, bool gated, float? alpha,"
      " float? limit, float? offset) -> Tensor");
  m.def(
      "connect_streams(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps,"
      " float eps, int iterations) -> (Tensor, Tensor, Tensor)");
  m.def(
      "collapse_streams(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps,"
      " float eps) -> Tensor");
  m.def("join_streams(Tensor streams, Tensor branch, Tensor post, Tensor mix) -> Tensor");
  m.def(
      "qk_norm_rope_cache(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm_weight,"
      " Tensor? k_norm_weight, Tensor(a!) kv_cache, Tensor slot_mapping, int num_heads,"
      " int num_kv_heads, int head_dim, bool gated, float eps, bool one_plus) -> Tensor");
  m.def(
      "write_kv_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  m.def("write_rows(Tensor rows, Tensor(a!) cache, Tensor slot_mapping) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
      " Tensor query_start_loc, float scale, int? sliding_window, Tensor? sinks,"
      " Tensor(a!) out, int rows=0) -> ()");
  m.def(
      "compress(Tensor tokens, Tensor tokens_table, Tensor(a!) entries, Tensor entries_table,"
      " Tensor positions, Tensor slot_mapping, int ratio, bool overlap, Tensor norm_weight,"
      " float eps, Tensor cos_sin) -> ()");
  m.def(
      "choose_entries(Tensor query, Tensor head_weights, Tensor keys, Tensor table,"
      " Tensor positions, int ratio, Tensor(a!) chosen) -> ()");
  m.def(
      "compressed_attention(Tensor query, Tensor tokens, Tensor tokens_table, int window,"
      " Tensor sinks, float scale, Tensor positions, Tensor(a!) out, Tensor? entries,"
      " Tensor? entries_table, int ratio, Tensor? chosen) -> ()");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state,"
      " Tensor state_indices, Tensor has_initial_state, Tensor query_start_loc, Tensor(b!) out)"
      " -> ()");
  m.def(
      "gdn_prefill(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
      " Tensor(a!) ssm_state, Tensor state_indices, Tensor has_initial_state,"
      " Tensor query_start_loc, int num_k_heads, int num_v_heads, int head_k_dim, int head_v_dim,"
      " Tensor(b!) out, float beta_scale) -> ()");
  m.def(
      "gdn_decode(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
      " Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, Tensor(b!) ssm_state,"
      " Tensor state_indices, int num_k_heads, int num_v_heads, int head_k_dim, int head_v_dim,"
      " Tensor(c!) out, float beta_scale, Tensor? steps, Tensor? taken, Tensor(d!)? keys,"
      " Tensor(e!)? errors, Tensor(f!)? decays, Tensor(g!)? inputs) -> ()");
  m.def(
      "gdn_commit(Tensor entries, Tensor pending, Tensor first, Tensor taken, Tensor keys,"
      " Tensor errors, Tensor decays, Tensor inputs, Tensor(a!) ssm_state, Tensor(b!) conv_state)"
      " -> ()");
  m.def(
      "mamba2_prefill(Tensor xbc, Tensor dt, Tensor A_log, Tensor dt_bias, Tensor D, float dt_low,"
      " float dt_high, Tensor(a!) state, Tensor state_indices, int groups, Tensor(b!) out,"
      " Tensor has_initial_state, Tensor query_start_loc) -> ()");
  m.def(
      "mamba2_decode(Tensor xbc, Tensor dt, Tensor A_log, Tensor dt_bias, Tensor D, float dt_low,"
      " float dt_high, Tensor(a!) state, Tensor state_indices, int groups, Tensor(b!) out,"
      " Tensor conv_weight, Tensor? conv_bias, Tensor(c!) conv_state, Tensor? steps,"
      " Tensor? taken, Tensor(d!)? keys, Tensor(e!)? errors, Tensor(f!)? decays,"
      " Tensor(g!)? inputs) -> ()");
  m.def("xxh3_64(Tensor data, Tensor starts, Tensor sizes, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&vllm_cpu::isa));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&vllm_cpu::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&vllm_cpu::fused_add_rms_norm));
  m.impl("gated_rms_norm", TORCH_BOX(&vllm_cpu::gated_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&vllm_cpu::silu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&vllm_cpu::gelu_tanh_and_mul));
  m.impl("clamped_swiglu", TORCH_BOX(&vllm_cpu::clamped_swiglu));
  m.impl("mul_sigmoid", TORCH_BOX(&vllm_cpu::mul_sigmoid));
  m.impl("skinny_linear", TORCH_BOX(&vllm_cpu::skinny_linear));
  m.impl("run_experts", TORCH_BOX(&vllm_cpu::run_experts));
  m.impl("connect_streams", TORCH_BOX(&vllm_cpu::connect_streams));
  m.impl("collapse_streams", TORCH_BOX(&vllm_cpu::collapse_streams));
  m.impl("join_streams", TORCH_BOX(&vllm_cpu::join_streams));
  m.impl("qk_norm_rope_cache", TORCH_BOX(&vllm_cpu::qk_norm_rope_cache));
  m.impl("write_kv_cache", TORCH_BOX(&vllm_cpu::write_kv_cache));
  m.impl("write_rows", TORCH_BOX(&vllm_cpu::write_rows));
  m.impl("paged_attention", TORCH_BOX(&vllm_cpu::paged_attention));
  m.impl("compress", TORCH_BOX(&vllm_cpu::compress));
  m.impl("choose_entries", TORCH_BOX(&vllm_cpu::choose_entries));
  m.impl("compressed_attention", TORCH_BOX(&vllm_cpu::compressed_attention));
  m.impl("causal_conv1d", TORCH_BOX(&vllm_cpu::causal_conv1d));
  m.impl("gdn_prefill", TORCH_BOX(&vllm_cpu::gdn_prefill));
  m.impl("gdn_decode", TORCH_BOX(&vllm_cpu::gdn_decode));
  m.impl("gdn_commit", TORCH_BOX(&vllm_cpu::gdn_commit));
  m.impl("mamba2_prefill", TORCH_BOX(&vllm_cpu::mamba2_prefill));
  m.impl("mamba2_decode", TORCH_BOX(&vllm_cpu::mamba2_decode));
  m.impl("xxh3_64", TORCH_BOX(&vllm_cpu::xxh3_64));
}
