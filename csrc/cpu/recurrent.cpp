// SPDX-License-Identifier: Apache-2.0
#include "recurrent.h"

namespace vllm_cpu {

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

void take_states(
    const char* op, RecurrentArgs& args, const char* name, const Tensor& state, int64_t heads,
    int64_t rows, int64_t columns, const Tensor& state_indices, const Tensor& out,
    int64_t tokens) {
  args.state_dtype = float_dtype(state, {op, name});
  check_shape(state, {-1, heads, rows, columns}, 3, {op, name});
  args.state = state.data_ptr();
  args.state_stride = state.stride(0);
  args.num_seqs = state_indices.size(0);
  args.state_indices = int32_vector(state_indices, args.num_seqs, {op, "state_indices"});
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {tokens, heads, rows}, 1, {op, "out"});
  args.out = out.data_ptr();
  args.out_strides[0] = out.stride(0);
  args.out_strides[1] = out.stride(1);
}

void take_prompts(
    const char* op, RecurrentArgs& args, const Tensor& has_initial_state,
    const Tensor& query_start_loc) {
  args.has_initial_state =
      bool_vector(has_initial_state, args.num_seqs, {op, "has_initial_state"});
  args.query_start = int32_vector(query_start_loc, args.num_seqs + 1, {op, "query_start_loc"});
}

void take_decodes(
    const char* op, RecurrentArgs& args, const Tensor& x, const char* x_name, bool has_journal,
    const Tensor& conv_weight, const OptTensor& conv_bias, const Tensor& conv_state) {
  if (x.size(0) % args.num_seqs != 0 || (!has_journal && x.size(0) != args.num_seqs)) {
    reject({op, x_name}, x, "must have one row, with a journal equally many, per state index");
  }
  args.tokens_per_seq = x.size(0) / args.num_seqs;
  args.conv = conv_args(op, x, x_name, conv_weight, conv_bias, conv_state);
}

JournalArgs journal_args(
    const char* op, const JournalSizes& sizes, const Tensor& taken, const Tensor& keys,
    const Tensor& errors, const Tensor& decays, const Tensor& inputs) {
  JournalArgs journal{};
  journal.keys = floats_of(keys, {-1, -1, sizes.key_heads, sizes.key_dim}, 4, {op, "keys"});
  const int64_t rows = journal.rows = keys.size(0), places = journal.places = keys.size(1);
  journal.errors = floats_of(errors, {rows, places, sizes.heads, sizes.dim}, 4, {op, "errors"});
  const int64_t channels = sizes.decay_channels;
  journal.decays = channels > 0
      ? floats_of(decays, {rows, places, sizes.heads, channels}, 4, {op, "decays"})
      : floats_of(decays, {rows, places, sizes.heads}, 3, {op, "decays"});
  check_shape(inputs, {rows, -1, sizes.inputs}, 2, {op, "inputs"});
  check_dtype(inputs, sizes.dtype, {op, "inputs"});
  journal.inputs = inputs.data_ptr();
  journal.kept = inputs.size(1);
  journal.taken = int32_vector(taken, rows, {op, "taken"});
  return journal;
}

void take_steps(const char* op, RecurrentArgs& args, const Tensor& steps) {
  JournalArgs& journal = args.journal;
  journal.steps = int32s_of(steps, {-1, 4}, 2, {op, "steps"});
  if (steps.size(0) < args.num_seqs) {
    reject({op, "steps"}, steps, "must have a row for every state index");
  }
  STD_TORCH_CHECK(
      journal.kept + 1 >= args.tokens_per_seq, op,
      ": inputs must have room for the tokens but one, ", args.tokens_per_seq, " tokens and ",
      journal.kept, " places");
  for (int64_t i = 0; i < args.num_seqs; ++i) {
    if (args.state_indices[i] < 0) continue;
    const int32_t* step = journal.steps + 4 * i;
    const int64_t needed = step[1] + args.tokens_per_seq - (step[2] != 0);
    STD_TORCH_CHECK(
        step[0] >= 0 && step[0] < journal.rows && step[3] >= 0 && step[3] < journal.places &&
            step[1] >= 0 && needed <= journal.places && journal.taken[step[0]] <= journal.kept,
        op, ": row ", step[0], " has ", step[1], " pending tokens from place ", step[3], " and ",
        args.tokens_per_seq, " more, but ", journal.places, " places");
  }
}

}  // namespace vllm_cpu
