// SPDX-License-Identifier: Apache-2.0
// Entry points of the ops: validate, fill the kernel's arguments, call the chosen kernel. Shapes
// and semantics are those of `vllm.kernels.interface.Kernels`.
#pragma once

#include <optional>
#include <tuple>

#include "check.h"

namespace vllm_cpu {

using OptTensor = std::optional<Tensor>;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool one_plus);
std::tuple<Tensor, Tensor> fused_add_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, bool one_plus);
Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps);
Tensor silu_and_mul(const Tensor& gate_up);
Tensor gelu_tanh_and_mul(const Tensor& gate_up);
Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit, double offset);
Tensor mul_sigmoid(const Tensor& x, const Tensor& gate);

Tensor skinny_linear(const Tensor& x, const Tensor& weight, OptTensor bias);
std::tuple<Tensor, Tensor, Tensor> connect_streams(
    const Tensor& streams, const Tensor& weight, const Tensor& base, const Tensor& scale,
    double norm_eps, double eps, int64_t iterations);
Tensor collapse_streams(
    const Tensor& streams, const Tensor& weight, const Tensor& base, const Tensor& scale,
    double norm_eps, double eps);
Tensor join_streams(
    const Tensor& streams, const Tensor& branch, const Tensor& post, const Tensor& mix);
Tensor run_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
    const Tensor& experts, OptTensor shared, OptTensor gate_up_bias, OptTensor down_bias,
    bool gated, std::optional<double> alpha, std::optional<double> limit,
    std::optional<double> offset);

Tensor qk_norm_rope_cache(
    const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, OptTensor q_norm_weight,
    OptTensor k_norm_weight, const Tensor& kv_cache, const Tensor& slot_mapping, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, bool gated, double eps, bool one_plus);
void write_kv_cache(
    const Tensor& key, const Tensor& value, const Tensor& kv_cache, const Tensor& slot_mapping);
void write_rows(const Tensor& rows, const Tensor& cache, const Tensor& slot_mapping);
void paged_attention(
    const Tensor& query, const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
    const Tensor& query_start_loc, double scale, std::optional<int64_t> sliding_window,
    OptTensor sinks, const Tensor& out, int64_t rows);

void compress(
    const Tensor& tokens, const Tensor& tokens_table, const Tensor& entries,
    const Tensor& entries_table, const Tensor& positions, const Tensor& slot_mapping, int64_t ratio,
    bool overlap, const Tensor& norm_weight, double eps, const Tensor& cos_sin);
void choose_entries(
    const Tensor& query, const Tensor& head_weights, const Tensor& keys, const Tensor& table,
    const Tensor& positions, int64_t ratio, const Tensor& chosen);
void compressed_attention(
    const Tensor& query, const Tensor& tokens, const Tensor& tokens_table, int64_t window,
    const Tensor& sinks, double scale, const Tensor& positions, const Tensor& out,
    OptTensor entries, OptTensor entries_table, int64_t ratio, OptTensor chosen);

void causal_conv1d(
    const Tensor& x, const Tensor& weight, OptTensor bias, const Tensor& conv_state,
    const Tensor& state_indices, const Tensor& has_initial_state, const Tensor& query_start_loc,
    const Tensor& out);
void gdn_prefill(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& ssm_state, const Tensor& state_indices,
    const Tensor& has_initial_state, const Tensor& query_start_loc, int64_t num_k_heads,
    int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim, const Tensor& out,
    double beta_scale);
void gdn_decode(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& conv_weight, OptTensor conv_bias,
    const Tensor& conv_state, const Tensor& ssm_state, const Tensor& state_indices,
    int64_t num_k_heads, int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim,
    const Tensor& out, double beta_scale, OptTensor steps, OptTensor taken, OptTensor keys,
    OptTensor errors, OptTensor decays, OptTensor inputs);
void gdn_commit(
    const Tensor& entries, const Tensor& pending, const Tensor& first, const Tensor& taken,
    const Tensor& keys, const Tensor& errors, const Tensor& decays, const Tensor& inputs,
    const Tensor& ssm_state, const Tensor& conv_state);

void mamba2_prefill(
    const Tensor& xbc, const Tensor& dt, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& D, double dt_low, double dt_high, const Tensor& state,
    const Tensor& state_indices, int64_t groups, const Tensor& out,
    const Tensor& has_initial_state, const Tensor& query_start_loc);
void mamba2_decode(
    const Tensor& xbc, const Tensor& dt, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& D, double dt_low, double dt_high, const Tensor& state,
    const Tensor& state_indices, int64_t groups, const Tensor& out, const Tensor& conv_weight,
    OptTensor conv_bias, const Tensor& conv_state, OptTensor steps, OptTensor taken,
    OptTensor keys, OptTensor errors, OptTensor decays, OptTensor inputs);

void xxh3_64(const Tensor& data, const Tensor& starts, const Tensor& sizes, const Tensor& out);

}  // namespace vllm_cpu
