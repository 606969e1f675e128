// SPDX-License-Identifier: Apache-2.0
// Joins the shares of a sequence's rows by their log-sum-exp, in their order.
#pragma once

#include "bf16_pairs.cuh"
#include "latent_attention_share.cuh"
#include "ptx.cuh"

namespace vllm_cuda::latent_attention {

// A thread has four dimensions of a row.
constexpr int kJoinThreads = kLatentDims / 4;

// Grid: the rows of the longest query, sequences.
__global__ void __launch_bounds__(kJoinThreads)
    latent_attention_join_kernel(const LatentAttentionArgs args) {
  const int seq = blockIdx.y, token = blockIdx.x / args.heads, head = blockIdx.x % args.heads;
  const int seq_len = args.seq_lens[seq], q_start = args.starts[seq];
  const bool exists = seq_len > 0 && token < args.starts[seq + 1] - q_start;
  const int used = exists ? ceil_div(seq_len, share_keys(args, seq_len)) : 0;
  // Also where nothing is to be joined: what comes after this kernel counts on the one before.
  wait_for_predecessors();
  if (used < 2) return;
  const int64_t place = q_start + token, first = (place * args.heads + head) * args.splits;
  const float* lse = args.lse + first;
  const auto* part =
      reinterpret_cast<const float4*>(args.part + first * kLatentDims) + threadIdx.x;
  // Of the first share every row sees a key.
  float peak = lse[0];
  for (int i = 1; i < used; ++i) peak = fmaxf(peak, lse[i]);
  float total = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int i = 0; i < used; ++i) {
    const float weight = exp2f(lse[i] - peak);
    const float4 values = part[i * kJoinThreads];
    total += weight;
    sum.x = fmaf(weight, values.x, sum.x);
    sum.y = fmaf(weight, values.y, sum.y);
    sum.z = fmaf(weight, values.z, sum.z);
    sum.w = fmaf(weight, values.w, sum.w);
  }
  const float factor = 1.0f / total;
  auto* row = static_cast<__nv_bfloat16*>(args.out) + head * args.out_head +
              place * args.out_token;
  reinterpret_cast<uint2*>(row)[threadIdx.x] =
      make_uint2(pack(sum.x * factor, sum.y * factor), pack(sum.z * factor, sum.w * factor));
}

}  // namespace vllm_cuda::latent_attention
