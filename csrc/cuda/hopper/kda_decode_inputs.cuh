// SPDX-License-Identifier: Apache-2.0
// What a decode step of Kimi delta attention works on, and what it multiplies a state with: the
// convolution's results, their norms, the decays.
#pragma once

#include "gdn_decode_memory.cuh"
#include "kda_decode.h"

namespace vllm_cuda::kda_decode {

using gdn_decode::round_bf16, gdn_decode::sigmoid, gdn_decode::warp_sum, gdn_decode::widen;

// A head of a sequence. Grid (heads, sequences).
struct Item {
  const int seq = blockIdx.y, head = blockIdx.x;
  const int64_t index;         // the sequence's block, negative: nothing to do
  int64_t row = 0;             // of the journal
  int pending = 0, place = 0;  // tokens to replay, and the place of the first
  bool commit = true;

  __device__ explicit Item(const KdaDecodeArgs& args) : index(__ldg(args.indices + seq)) {
    if (args.steps == nullptr) return;
    const int4 step = __ldg(reinterpret_cast<const int4*>(args.steps) + seq);
    row = step.x, pending = step.y, commit = step.z, place = step.w;
  }
  // Where the journal has the vectors of token `i` of those pending, or of the new one after them.
  __device__ int64_t kept(const KdaDecodeArgs& args, int i) const {
    const int at = place + i < args.places ? place + i : place + i - args.places;
    return ((row * args.places + at) * args.heads + head) * kHeadDim;
  }
};

// The convolution of q, k or v: four channels in a lane.
struct Convolution {
  const KdaDecodeArgs& args;
  const Item& item;
  const int part, first;
  uint2 inputs[4];  // the newest last
  uint4 taps[2];

  __device__ Convolution(const KdaDecodeArgs& args_, const Item& item_, int part_)
      : args(args_), item(item_), part(part_),
        first((part_ * args_.heads + item_.head) * kHeadDim + 4 * (threadIdx.x % 32)) {}

  __device__ uint2* past(int i) const {
    auto* block = static_cast<__nv_bfloat16*>(args.conv_state) + item.index * args.conv_stride;
    return reinterpret_cast<uint2*>(block + i * 3 * args.heads * kHeadDim + first);
  }
  // What no kernel ahead writes.
  __device__ void load_past() {
#pragma unroll
    for (int i = 0; i < 3; ++i) inputs[i] = *past(i);
    const auto* weight = static_cast<const __nv_bfloat16*>(args.conv_weight) + 4 * first;
#pragma unroll
    for (int i = 0; i < 2; ++i) taps[i] = __ldg(reinterpret_cast<const uint4*>(weight) + i);
  }
  __device__ void load_new() {
    const auto* row = static_cast<const __nv_bfloat16*>(args.qkv) + item.seq * args.qkv_stride;
    inputs[3] = *reinterpret_cast<const uint2*>(row + first);
  }
  __device__ float4 result() const {
    const float4 of[4] = {widen({taps[0].x, taps[0].y}), widen({taps[0].z, taps[0].w}),
                          widen({taps[1].x, taps[1].y}), widen({taps[1].z, taps[1].w})};
    const float4 x[4] = {widen(inputs[0]), widen(inputs[1]), widen(inputs[2]), widen(inputs[3])};
    const float4 y = {activated(of[0], x[0].x, x[1].x, x[2].x, x[3].x),
                      activated(of[1], x[0].y, x[1].y, x[2].y, x[3].y),
                      activated(of[2], x[0].z, x[1].z, x[2].z, x[3].z),
                      activated(of[3], x[0].w, x[1].w, x[2].w, x[3].w)};
    if (part == 2) return y;
    const float squares = warp_sum(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
    const float norm = rsqrtf(squares + 1e-6f) * (part == 0 ? args.scale : 1.0f);
    return {y.x * norm, y.y * norm, y.z * norm, y.w * norm};
  }
  __device__ static float activated(float4 taps, float x0, float x1, float x2, float x3) {
    const float y = fmaf(x3, taps.w, fmaf(x2, taps.z, fmaf(x1, taps.y, x0 * taps.x)));
    return round_bf16(y * sigmoid(y));
  }
  __device__ void advance() const {
#pragma unroll
    for (int i = 0; i < 3; ++i) *past(i) = inputs[i + 1];
  }
};

// Of a channel.
__device__ inline float decay_of(float a, float dt_bias, float A_log) {
  const float x = a + dt_bias;
  // log(1 + exp(x)), accurate where it is tiny: slow decays live there.
  const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
  return expf(-expf(A_log) * softplus);
}

}  // namespace vllm_cuda::kda_decode
