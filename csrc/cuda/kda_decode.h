// SPDX-License-Identifier: Apache-2.0
// Host interface of the decode step of Kimi delta attention.
#pragma once

#include <cstdint>

namespace vllm_cuda {

// Elements are bf16 unless typed; strides are in elements.
struct KdaDecodeArgs {
  const void* qkv;  // [n, 3 * heads * 128]: q, k and v, head-major; before the convolution
  const void *a, *b;                  // [n, heads, 128], [n, heads]
  const float *A_log, *dt_bias;       // [heads], [heads, 128]
  const void* conv_weight;            // [channels, 4]
  void* conv_state;                   // [blocks, 3, channels], oldest first
  void* state;                        // [blocks, heads, 128, 128] (dv, dk), fp32 or bf16
  const int* indices;                 // [n], the block of each sequence, negative: none
  const int* steps;                   // [n, 4], see `Journal`; null: every state is written
  float *keys, *errors, *decays;      // [rows, places, heads, 128]
  void* out;                          // [n, heads, 128]
  int64_t qkv_stride, a_stride, b_stride, conv_stride, state_stride, out_stride;
  float scale;
  int n, heads, places;
};

struct KdaDecodeLaunch {
  bool bf16_state;
  bool overlap;  // may start before the kernels ahead of it are complete
  int device;    // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_kda_decode(const KdaDecodeArgs& args, const KdaDecodeLaunch& launch);

}  // namespace vllm_cuda
