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

void take_steps(
    const char* op, JournalArgs& journal, const Tensor& steps, const int32_t* state_indices,
    int64_t num_seqs, int64_t tokens_per_seq) {
  journal.steps = int32s_of(steps, {-1, 4}, 2, {op, "steps"});
  if (steps.size(0) < num_seqs) {
    reject({op, "steps"}, steps, "must have a row for every state index");
  }
  STD_TORCH_CHECK(
      journal.kept + 1 >= tokens_per_seq, op, ": inputs must have room for the tokens but one, ",
      tokens_per_seq, " tokens and ", journal.kept, " places");
  for (int64_t i = 0; i < num_seqs; ++i) {
    if (state_indices[i] < 0) continue;
    const int32_t* step = journal.steps + 4 * i;
    const int64_t needed = step[1] + tokens_per_seq - (step[2] != 0);
    STD_TORCH_CHECK(
        step[0] >= 0 && step[0] < journal.rows && step[3] >= 0 && step[3] < journal.places &&
            step[1] >= 0 && needed <= journal.places && journal.taken[step[0]] <= journal.kept,
        op, ": row ", step[0], " has ", step[1], " pending tokens from place ", step[3], " and ",
        tokens_per_seq, " more, but ", journal.places, " places");
  }
}

}  // namespace vllm_cpu
