// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

// Everything of the convolution but the sequences.
ConvArgs conv_args(
    const char* op, const Tensor& x, const char* x_name, const Tensor& weight,
    const OptTensor& bias, const Tensor& conv_state) {
  check_shape(x, {-1, -1}, 1, {op, x_name});
  ConvArgs args{};
  args.dtype = float_dtype(x, {op, x_name});
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  args.channels = x.size(1);
  check_shape(weight, {args.channels, -1}, 2, {op, "weight"});
  args.width = weight.size(1);
  if (args.width < 2 || args.width > 5) reject({op, "weight"}, weight, "must have 2 to 5 taps");
  args.weight = {weight.data_ptr(), float_dtype(weight, {op, "weight"})};
  if (bias) args.bias = param(*bias, args.channels, {op, "bias"});
  check_dtype(conv_state, args.dtype, {op, "conv_state"});
  check_shape(conv_state, {-1, args.width - 1, args.channels}, 2, {op, "conv_state"});
  args.state = conv_state.data_ptr();
  args.state_stride = conv_state.stride(0);
  return args;
}

// The gates, the state pool and the output, common to prefill and decode.
GdnArgs gdn_args(
    const char* op, const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& ssm_state, const Tensor& state_indices, int64_t k_heads,
    int64_t v_heads, int64_t k_dim, int64_t v_dim, const Tensor& out) {
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
  check_shape(a, {tokens, v_heads}, 1, {op, "a"});
  check_shape(b, {tokens, v_heads}, 1, {op, "b"});
  args.a = a.data_ptr();
  args.a_stride = a.stride(0);
  args.b = b.data_ptr();
  args.b_stride = b.stride(0);
  args.A_log = param(A_log, v_heads, {op, "A_log"});
  args.dt_bias = param(dt_bias, v_heads, {op, "dt_bias"});
  args.state_dtype = float_dtype(ssm_state, {op, "ssm_state"});
  check_shape(ssm_state, {-1, v_heads, v_dim, k_dim}, 3, {op, "ssm_state"});
  args.state = ssm_state.data_ptr();
  args.state_stride = ssm_state.stride(0);
  args.num_seqs = state_indices.size(0);
  args.state_indices = int32_vector(state_indices, args.num_seqs, {op, "state_indices"});
  args.k_heads = k_heads;
  args.v_heads = v_heads;
  args.k_dim = k_dim;
  args.v_dim = v_dim;
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {tokens, v_heads, v_dim}, 1, {op, "out"});
  args.out = out.data_ptr();
  args.out_strides[0] = out.stride(0);
  args.out_strides[1] = out.stride(1);
  return args;
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
    int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim, const Tensor& out) {
  constexpr const char* op = "gdn_prefill";
  GdnArgs args = gdn_args(
      op, qkv, a, b, A_log, dt_bias, ssm_state, state_indices, num_k_heads, num_v_heads,
      head_k_dim, head_v_dim, out);
  args.has_initial_state =
      bool_vector(has_initial_state, args.num_seqs, {op, "has_initial_state"});
  args.query_start = int32_vector(query_start_loc, args.num_seqs + 1, {op, "query_start_loc"});
  kernels().gdn_prefill(args);
}

void gdn_decode(
    const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& conv_weight, OptTensor conv_bias,
    const Tensor& conv_state, const Tensor& ssm_state, const Tensor& state_indices,
    int64_t num_k_heads, int64_t num_v_heads, int64_t head_k_dim, int64_t head_v_dim,
    const Tensor& out) {
  constexpr const char* op = "gdn_decode";
  GdnArgs args = gdn_args(
      op, qkv, a, b, A_log, dt_bias, ssm_state, state_indices, num_k_heads, num_v_heads,
      head_k_dim, head_v_dim, out);
  if (qkv.size(0) < args.num_seqs) {
    reject({op, "qkv"}, qkv, "must have a row for every state index");
  }
  args.conv = conv_args(op, qkv, "qkv", conv_weight, conv_bias, conv_state);
  kernels().gdn_decode(args);
}

}  // namespace vllm_cpu
