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
void take_steps(
    const char* op, JournalArgs& journal, const Tensor& steps, const int32_t* state_indices,
    int64_t num_seqs, int64_t tokens_per_seq);

}  // namespace vllm_cpu
