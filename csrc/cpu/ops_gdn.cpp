// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "recurrent.h"
#include "table.h"

namespace vllm_cpu {

namespace {

// The gates, the state pool and the output, common to prefill and decode. With `a` of three dims
// each key channel has a decay.
GdnArgs gdn_args(
    const char* op, const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& ssm_state, const Tensor& state_indices, int64_t k_heads,
    int64_t v_heads, int64_t k_dim, int64_t v_dim, const Tensor& out, double beta_scale) {
  STD_TORCH_CHECK(
      k_heads > 0 && v_heads % k_heads == 0, op,
      ": num_v_heads must be a multiple of num_k_heads, got ", v_heads, " and ", k_heads);
  check_shape(qkv, {-1, 2 * k_heads * k_dim + v_heads * v_dim}, 1, {op, "qkv"});
  GdnArgs args{};
  const int64_t tokens = qkv.size(0);
  args.dtype = float_dtype(qkv, {op, "qkv"});
  args.qkv = qkv.data_ptr();
  args.qkv_stride = qkv.stride(0);
  check_dtype(a, args.dtype, {op, "a"});
  check_dtype(b, args.dtype, {op, "b"});
  args.channel_decays = a.dim() == 3;
  if (args.channel_decays) {
    check_shape(a, {tokens, v_heads, k_dim}, 2, {op, "a"});
  } else {
    check_shape(a, {tokens, v_heads}, 1, {op, "a"});
  }
  check_shape(b, {tokens, v_heads}, 1, {op, "b"});
  args.a = a.data_ptr();
  args.a_stride = a.stride(0);
  args.b = b.data_ptr();
  args.b_stride = b.stride(0);
  args.A_log = param(A_log, v_heads, {op, "A_log"});
  const int64_t decays = args.channel_decays ? k_dim : 1;
  args.dt_bias = param(dt_bias, v_heads * decays, {op, "dt_bias"});
  args.beta_scale = static_cast<float>(beta_scale);
  args.k_heads = k_heads;
  args.v_heads = v_heads;
  args.k_dim = k_dim;
  args.v_dim = v_dim;
  take_states(
      op, args, "ssm_state", ssm_state, v_heads, v_dim, k_dim, state_indices, out, tokens);
  return args;
}

JournalSizes sizes_of(const GdnArgs& args) {
  const int64_t channels = args.channel_decays ? args.k_dim : 0;
  return {args.dtype, args.k_heads, args.k_dim, args.v_heads, args.v_dim, channels,
          args.conv.channels};
}

}  // namespace

void causal_conv1d(
    const Tensor& x, const Tensor& weight, OptTensor bias, const Tensor& conv_state,
    const Tensor& state_indices, const Tensor& has_initial_state, const Tensor& query_start_loc,
    const Tensor& out) {
  constexpr const char* op = "causal_conv1d";
  ConvArgs args = conv_args(op, x, "x", weight, bias, conv_state);
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {x.size(0), args.channels}, 1, {op, "out"});
  args.out = out.data_ptr();
  args.out_stride = out.stride(0);
  args.num_seqs = state_indices.size(0);
  args.state_indices = int32_vector(state_indices, args.num_seqs, {op, "state_indices"});
  args.has_initial_state =
      bool_vector(has_initial_state, args.num_seqs, {op, "has_initial_state"});
  args.query_start = int32_vector(query_start_loc, args.num_seqs + 1, {op, "query_start_loc"});
  kernels().causal_conv1d(args);
}

void gdn_prefill(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& ssm_state, const Tensor& state_indices,
    const Tensor& has_initial_state, const Tensor& query_start_loc, int64_t num_k_heads,
    int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim, const Tensor& out,
    double beta_scale) {
  constexpr const char* op = "gdn_prefill";
  GdnArgs args = gdn_args(
      op, qkv, a, b, A_log, dt_bias, ssm_state, state_indices, num_k_heads, num_v_heads,
      head_k_dim, head_v_dim, out, beta_scale);
  take_prompts(op, args, has_initial_state, query_start_loc);
  if (args.channel_decays) {
    kernels().kda_prefill(args);
  } else {
    kernels().gdn_prefill(args);
  }
}

void gdn_decode(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& conv_weight, OptTensor conv_bias,
    const Tensor& conv_state, const Tensor& ssm_state, const Tensor& state_indices,
    int64_t num_k_heads, int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim,
    const Tensor& out, double beta_scale, OptTensor steps, OptTensor taken, OptTensor keys,
    OptTensor errors, OptTensor decays, OptTensor inputs) {
  constexpr const char* op = "gdn_decode";
  GdnArgs args = gdn_args(
      op, qkv, a, b, A_log, dt_bias, ssm_state, state_indices, num_k_heads, num_v_heads,
      head_k_dim, head_v_dim, out, beta_scale);
  if (args.num_seqs == 0) return;
  take_decodes(
      op, args, qkv, "qkv", steps.has_value(), conv_weight, conv_bias, conv_state);
  if (steps) {
    args.journal = journal_args(op, sizes_of(args), *taken, *keys, *errors, *decays, *inputs);
    take_steps(op, args, *steps);
  }
  kernels().gdn_decode(args);
}

void gdn_commit(
    const Tensor& entries, const Tensor& pending, const Tensor& first, const Tensor& taken,
    const Tensor& keys, const Tensor& errors, const Tensor& decays, const Tensor& inputs,
    const Tensor& ssm_state, const Tensor& conv_state) {
  constexpr const char* op = "gdn_commit";
  GdnCommitArgs args{};
  args.entries = int32s_of(entries, {-1, 2}, 2, {op, "entries"});
  args.count = entries.size(0);
  GdnArgs& gdn = args.gdn;
  gdn.k_heads = keys.size(2);
  gdn.k_dim = keys.size(3);
  gdn.v_heads = errors.size(2);
  gdn.v_dim = errors.size(3);
  gdn.channel_decays = decays.dim() == 4;
  gdn.dtype = float_dtype(conv_state, {op, "conv_state"});
  gdn.conv.channels = inputs.size(2);
  gdn.conv.width = conv_state.size(1) + 1;
  check_shape(conv_state, {-1, -1, gdn.conv.channels}, 2, {op, "conv_state"});
  gdn.conv.state = conv_state.data_ptr();
  gdn.conv.state_stride = conv_state.stride(0);
  gdn.state_dtype = float_dtype(ssm_state, {op, "ssm_state"});
  check_shape(ssm_state, {-1, gdn.v_heads, gdn.v_dim, gdn.k_dim}, 3, {op, "ssm_state"});
  gdn.state = ssm_state.data_ptr();
  gdn.state_stride = ssm_state.stride(0);
  gdn.journal = journal_args(op, sizes_of(gdn), taken, keys, errors, decays, inputs);
  args.pending = int32_vector(pending, gdn.journal.rows, {op, "pending"});
  args.first = int32_vector(first, gdn.journal.rows, {op, "first"});
  for (int64_t i = 0; i < args.count; ++i) {
    const int32_t row = args.entries[2 * i], block = args.entries[2 * i + 1];
    STD_TORCH_CHECK(
        row >= 0 && row < gdn.journal.rows && block >= 0 && block < ssm_state.size(0), op,
        ": entry ", i, " names row ", row, " and block ", block, ", which there are not");
  }
  kernels().gdn_commit(args);
}

}  // namespace vllm_cpu
