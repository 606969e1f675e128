// SPDX-License-Identifier: Apache-2.0
// What ops on paged caches check of the sequences that they are given.
#pragma once

#include "stable.h"

namespace vllm_cuda {

inline void check_lengths(int64_t num_seqs, const Tensor& table, const Tensor& lens,
                          const Tensor& starts) {
  constexpr auto kInt = ScalarType::Int;
  need(table.is_cuda() && table.scalar_type() == kInt && table.dim() == 2 &&
           table.size(0) == num_seqs && table.stride(1) == 1,
       "block_table", table, "be int32 [sequences, blocks]");
  need(is(lens, kInt, {num_seqs}) && lens.is_contiguous(), "seq_lens", lens,
       "be int32 [sequences]");
  need(is(starts, kInt, {num_seqs + 1}) && starts.is_contiguous(), "query_start_loc", starts,
       "be int32 [sequences + 1]");
}

}  // namespace vllm_cuda
