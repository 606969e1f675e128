// SPDX-License-Identifier: Apache-2.0
// What the scans of chunked delta rules are given.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct ChunkScanArgs {
  const void* v;  // [tokens, heads, 128] bf16, rows *_stride elements apart, 16-byte aligned
  void* out;      // likewise
  int64_t v_stride, out_stride;
  const void *T, *P;  // [chunks, heads, 64, 64] bf16
  const float* rows;  // [chunks, heads, ...]: factors of the rule
  void* states;       // [blocks, heads, 128, 128], blocks state_stride elements apart
  int64_t state_stride;
  const int32_t* state_indices;  // [sequences], negative: none
  const bool* carried;           // [sequences]: the state is read, not zero
  const int32_t* starts;         // [sequences + 1], tokens
  const int32_t* offsets;        // [sequences], chunks
  int64_t tokens, chunks;
  int sequences, heads;
};

struct ChunkScanLaunch {
  bool wide_states;  // fp32, else bf16
  int device;        // the current device
  void* stream;
};

}  // namespace vllm_cuda
