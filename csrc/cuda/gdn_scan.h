// SPDX-License-Identifier: Apache-2.0
// Host interface of the scan of the chunked gated delta rule.
#pragma once

#include <cstdint>

namespace vllm_cuda {

struct GdnScanArgs {
  // [tokens, heads, 128] bf16, rows *_stride elements apart, 16-byte aligned
  const void *q, *k, *v;
  void* out;
  int64_t q_stride, k_stride, v_stride, out_stride;
  const void *T, *P;  // [chunks, heads, 64, 64] bf16
  const float* rows;  // [chunks, heads, 4, 64]
  void* states;       // [blocks, heads, 128, 128], blocks state_stride elements apart
  int64_t state_stride;
  const int32_t* state_indices;  // [sequences], negative: none
  const bool* carried;           // [sequences]: the state is read, not zero
  const int32_t* starts;         // [sequences + 1], tokens
  const int32_t* offsets;        // [sequences], chunks
  int64_t tokens, chunks;
  int sequences, heads, key_heads;
};

struct GdnScanLaunch {
  bool wide_states;  // fp32, else bf16
  int device;        // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_gdn_scan(const GdnScanArgs& args, const GdnScanLaunch& launch);

}  // namespace vllm_cuda
