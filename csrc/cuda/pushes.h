// SPDX-License-Identifier: Apache-2.0
// What large sums of two ranks are made of: copy engines push runs of rows to the other's memory,
// flags say that they have arrived, and the norm that comes next adds both parts. Offsets are in
// bytes, from the first that may be pushed to.
#pragma once

#include "peers.h"

namespace vllm_cuda {

// Rows of two parts, the stream that they are a branch of, and its norm; `columns` as in
// kSumNormColumns. All are dense and 16-byte aligned.
struct PairNormArgs {
  const void *own, *other, *residual;  // [rows, columns]
  const void* norm;                    // [columns]
  void *out, *total;                   // [rows, columns]: the norm, and what it is of
  int64_t rows, columns;
  float eps;
  bool one_plus;
};

// All are queued on the stream and return what went wrong, or null.
const char* push_rows(const Peers& peers, int receiver, int64_t offset, const void* rows,
                      int64_t bytes, void* stream);
// Tells all ranks, this one too, that what the stream has done so far is there.
const char* signal_peers(const Peers& peers, int flag, uint32_t value, void* stream);
// Holds the stream until all ranks have told `value` or a later one.
const char* await_peers(const Peers& peers, int flag, uint32_t value, void* stream);
// Rounded after each addition, with the bits of separate kernels.
const char* add_pair_norm(const PairNormArgs& args, SumType type, void* stream);

}  // namespace vllm_cuda
