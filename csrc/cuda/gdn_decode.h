// SPDX-License-Identifier: Apache-2.0
// Host interface of the gated delta rule's decode step.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kHeadDim = 128;    // of keys and of values
constexpr int kConvWidth = 4;    // taps of the convolution
constexpr int kMaxGroup = 4;     // value heads of a key head: 1, 2 or 4

// Elements are bf16 unless typed; strides are in elements.
struct GdnDecodeArgs {
  const void* qkv;  // [n, channels]: q, k and v sections, head-major; before the convolution
  const void *a, *b;  // [n, v_heads]
  const float *A_log, *dt_bias;  // [v_heads]
  const void* conv_weight;       // [channels, 4]
  const void* conv_bias;         // [channels] or null
  void* conv_state;              // [blocks, 3, channels], oldest first
  void* state;                   // [blocks, v_heads, 128, 128] (dv, dk), fp32 or bf16
  const int* indices;            // [n], the block of each sequence, negative: none
  const int* steps;  // [n, 4]: ring row, pending tokens, whether to commit, 0; null: always commit
  float* keys;       // [rows, slots, k_heads, 128]
  float* errors;     // [rows, slots, v_heads, 128]
  float* decays;     // [rows, slots, v_heads]
  const void* gate;  // [n, v_heads, 128] or null: no norm
  const void* norm_weight;  // [128], fp32 or bf16
  void* out;                // [n, v_heads, 128]
  int* counter;             // of claimed work; zero before and after the launch
  int64_t qkv_stride, a_stride, b_stride, conv_stride, state_stride, gate_stride, out_stride;
  float eps, scale;
  int n, k_heads, group, slots;
  bool norm_weight_is_float;
};

struct GdnDecodeLaunch {
  bool bf16_state;
  bool overlap;  // may start before the kernels ahead of it are complete
  int device;   // the current device
  void* stream;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_gdn_decode(const GdnDecodeArgs& args, const GdnDecodeLaunch& launch);

}  // namespace vllm_cuda
