// SPDX-License-Identifier: Apache-2.0
// Arguments that the ops of recurrent layers share.
#pragma once

#include "args.h"
#include "ops.h"

namespace vllm_cpu {

// Everything of the convolution but the sequences.
ConvArgs conv_args(
    const char* op, const Tensor& x, const char* x_name, const Tensor& weight,
    const OptTensor& bias, const Tensor& conv_state);

// The sequences, their states `[blocks, heads, rows, columns]` and the output of `tokens`; the
// dtype is there already.
void take_states(
    const char* op, RecurrentArgs& args, const char* name, const Tensor& state, int64_t heads,
    int64_t rows, int64_t columns, const Tensor& state_indices, const Tensor& out,
    int64_t tokens);

// What is a prefill's alone.
void take_prompts(
    const char* op, RecurrentArgs& args, const Tensor& has_initial_state,
    const Tensor& query_start_loc);

// What is a decode's alone but the journal: as many rows of `x` for each sequence, one without a
// journal, and the convolution.
void take_decodes(
    const char* op, RecurrentArgs& args, const Tensor& x, const char* x_name, bool has_journal,
    const Tensor& conv_weight, const OptTensor& conv_bias, const Tensor& conv_state);

// Of a layer whose journal it is; `decay_channels`: decays of a head, 0 for one alone.
struct JournalSizes {
  DType dtype;
  int64_t key_heads, key_dim, heads, dim, decay_channels, inputs;
};

// One layer's journal, without the steps.
JournalArgs journal_args(
    const char* op, const JournalSizes& sizes, const Tensor& taken, const Tensor& keys,
    const Tensor& errors, const Tensor& decays, const Tensor& inputs);

// What each sequence takes from the journal: it names a row with places for what is pending and its
// tokens.
void take_steps(const char* op, RecurrentArgs& args, const Tensor& steps);

}  // namespace vllm_cpu
