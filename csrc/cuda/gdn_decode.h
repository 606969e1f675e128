// SPDX-License-Identifier: Apache-2.0
// Host interface of the gated delta rule's decode step.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kHeadDim = 128;    // of keys and of values
constexpr int kConvWidth = 4;    // taps of the convolution
constexpr int kMaxGroup = 4;     // value heads of a key head: 1, 2 or 4
constexpr int kMaxTokens = 16;   // of a sequence in one step
constexpr int kMaxPending = 20;  // tokens of a ring that wait

// Elements are bf16 unless typed; strides are in elements.
struct GdnDecodeArgs {
  // [n * tokens, channels]: q, k and v sections, head-major; before the convolution
  const void* qkv;
  const void *a, *b;  // [n * tokens, v_heads]
  const float *A_log, *dt_bias;  // [v_heads]
  const void* conv_weight;       // [channels, 4]
  const void* conv_bias;         // [channels] or null
  void* conv_state;              // [blocks, 3, channels], oldest first
  void* state;                   // [blocks, v_heads, 128, 128] (dv, dk), fp32 or bf16
  const int* indices;            // [n], the block of each sequence, negative: none
  // [n, 4]: ring row, pending tokens, whether to commit, slot of the first pending token; null:
  // always commit
  const int* steps;
  float* keys;       // [rows, slots, k_heads, 128]
  float* errors;     // [rows, slots, v_heads, 128]
  float* decays;     // [rows, slots, v_heads]
  const int* taken;  // [rows], accepted drafts of the last step
  void* inputs;      // [rows, drafts, channels], of the last step's drafts
  const void* gate;  // [n * tokens, v_heads, 128] or null: no norm
  const void* norm_weight;  // [128], fp32 or bf16
  void* out;                // [n * tokens, v_heads, 128]
  int* counter;             // of claimed work; zero before and after the launch
  int64_t qkv_stride, a_stride, b_stride, conv_stride, state_stride, gate_stride, out_stride;
  float eps, scale;
  int n, tokens;
  int items, heads;  // of a sequence; value heads of each
  int sharing;       // items that have the same key head: 2 to the power of this
  int slots, most_pending, drafts;  // of a row of the ring
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
