// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "recurrent.h"
#include "table.h"

namespace vllm_cpu {

namespace {

// The gates, the state pool and the output, common to prefill and decode.
Mamba2Args mamba2_args(
    const char* op, const Tensor& xbc, const Tensor& dt, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& D, double dt_low, double dt_high, const Tensor& state,
    const Tensor& state_indices, int64_t groups, const Tensor& out) {
  Mamba2Args args{};
  check_shape(state, {-1, -1, -1, -1}, 3, {op, "state"});
  args.heads = state.size(1);
  args.groups = groups;
  args.head_dim = state.size(2);
  args.columns = state.size(3);
  STD_TORCH_CHECK(
      groups > 0 && args.heads % groups == 0, op, ": heads must be a multiple of groups, got ",
      args.heads, " and ", groups);
  const int64_t tokens = xbc.size(0);
  check_shape(
      xbc, {tokens, args.heads * args.head_dim + 2 * groups * args.columns}, 1, {op, "xbc"});
  args.dtype = float_dtype(xbc, {op, "xbc"});
  args.xbc = xbc.data_ptr();
  args.xbc_stride = xbc.stride(0);
  check_dtype(dt, args.dtype, {op, "dt"});
  check_shape(dt, {tokens, args.heads}, 1, {op, "dt"});
  args.dt = dt.data_ptr();
  args.dt_stride = dt.stride(0);
  args.A_log = param(A_log, args.heads, {op, "A_log"});
  args.dt_bias = param(dt_bias, args.heads, {op, "dt_bias"});
  args.D = param(D, args.heads, {op, "D"});
  args.dt_low = static_cast<float>(dt_low);
  args.dt_high = static_cast<float>(dt_high);
  take_states(
      op, args, "state", state, args.heads, args.head_dim, args.columns, state_indices, out,
      tokens);
  return args;
}

}  // namespace

void mamba2_prefill(
    const Tensor& xbc, const Tensor& dt, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& D, double dt_low, double dt_high, const Tensor& state,
    const Tensor& state_indices, int64_t groups, const Tensor& out,
    const Tensor& has_initial_state, const Tensor& query_start_loc) {
  constexpr const char* op = "mamba2_prefill";
  Mamba2Args args = mamba2_args(
      op, xbc, dt, A_log, dt_bias, D, dt_low, dt_high, state, state_indices, groups, out);
  take_prompts(op, args, has_initial_state, query_start_loc);
  kernels().mamba2_prefill(args);
}

void mamba2_decode(
    const Tensor& xbc, const Tensor& dt, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& D, double dt_low, double dt_high, const Tensor& state,
    const Tensor& state_indices, int64_t groups, const Tensor& out, const Tensor& conv_weight,
    OptTensor conv_bias, const Tensor& conv_state, OptTensor steps, OptTensor taken,
    OptTensor keys, OptTensor errors, OptTensor decays, OptTensor inputs) {
  constexpr const char* op = "mamba2_decode";
  Mamba2Args args = mamba2_args(
      op, xbc, dt, A_log, dt_bias, D, dt_low, dt_high, state, state_indices, groups, out);
  if (args.num_seqs == 0) return;
  take_decodes(
      op, args, xbc, "xbc", steps.has_value(), conv_weight, conv_bias, conv_state);
  if (steps) {
    const JournalSizes sizes{args.dtype, groups, args.columns, args.heads, args.head_dim, 0,
                             args.conv.channels};
    args.journal = journal_args(op, sizes, *taken, *keys, *errors, *decays, *inputs);
    take_steps(op, args, *steps);
  }
  kernels().mamba2_decode(args);
}

}  // namespace vllm_cpu
