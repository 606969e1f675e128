// SPDX-License-Identifier: Apache-2.0
// A warpgroup that adds up weighted latents, of half the dimensions.
#pragma once

#include "bf16_pairs.cuh"
#include "latent_attention_memory.cuh"
#include "latent_attention_pair.cuh"
#include "tma.cuh"

namespace vllm_cuda::latent_attention {

// A product has no more columns: the compiler wants its results in the registers that a thread has
// at launch, 128.
constexpr int kPartDims = 128, kParts = kLatentDims / 2 / kPartDims;

template <int ROWS>
struct Values {
  const LatentAttentionArgs& args;
  char* shared;
  const int half;
  const bool paired;
  Ring halves;
  float out[kParts][kPartDims / 2];
  uint32_t weights[kKeys / 16][4];
  float factor[2];  // of this thread's rows

  __device__ Values(const LatentAttentionArgs& args_, char* shared_, int half_, bool paired_)
      : args(args_), shared(shared_), half(half_), paired(paired_),
        halves(ring_of_halves<ROWS>(shared_)) {
    if (half == 1) halves.advance();
    factor[0] = factor[1] = 1.0f;
  }

  __device__ void run() {
    barrier_arrive(kWeightsEmpty, kHandingOver);
#pragma unroll 1
    for (int i = blockIdx.x; i < num_shares(args); i += gridDim.x) {
      const Share share(args, i, ROWS);
      if (!share.exists) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (float& sum : out[part]) sum = 0.0f;
      const int tiles = share.tiles();
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        take_weights();
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) scale();
        add_tile(share.last - share.first - tile * kKeys);
      }
      barrier_sync(kWeightsFull, kHandingOver);
      take_factors();
      barrier_arrive(kWeightsEmpty, kHandingOver);
      if (!has_rows<ROWS>()) continue;
      if (paired && share.used == 2) {
        join(share);
      } else if (share.used == 1) {
        write(share, 0);
        write(share, 1);
      } else {
        leave(share, 0);
        leave(share, 1);
      }
    }
  }

  __device__ void take_factors() {
    if (!has_rows<ROWS>()) return;
    factor[0] = factors<ROWS>(shared)[row_of(0)];
    factor[1] = factors<ROWS>(shared)[row_of(1)];
  }

  __device__ void take_weights() {
    barrier_sync(kWeightsFull, kHandingOver);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint4 words =
          has_rows<ROWS>() ? *weights_at<ROWS>(shared, i) : make_uint4(0, 0, 0, 0);
      weights[i][0] = words.x;
      weights[i][1] = words.y;
      weights[i][2] = words.z;
      weights[i][3] = words.w;
    }
    take_factors();
    barrier_arrive(kWeightsEmpty, kHandingOver);
  }

  __device__ void scale() {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < kPartDims / 2; ++i) out[part][i] *= factor[i / 2 % 2];
  }

  // `live`: keys of the tile that the share has.
  __device__ void add_tile(int live) {
    char* tile = shared + halves.index * kHalfBytes;
    halves.wait_full();
    if (live < kKeys) clear(tile, live);
    const uint64_t values =
        squares_descriptor(tile, kTileGroupBytes, squares_bytes(kHalfChunks));
    products_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        product<1>(out[part], weights[i],
                   advance(values, squares_bytes(part * (kPartDims / 64) + 2 * i * kHalfChunks)),
                   1);
    products_commit();
#pragma unroll
    for (int part = 0; part < kParts; ++part) products_wait<0>(out[part]);
    if (threadIdx.x % 32 == 0) halves.release();
    halves.advance();
    halves.advance();
  }

  // What a tile holds after its last key: no bits of another tensor count as values. All scores
  // have been multiplied by now.
  __device__ void clear(char* tile, int live) const {
    for (int i = threadIdx.x % kWarpgroup; i < kHalfBytes / 16; i += kWarpgroup) {
      const int key = i / (64 * kHalfChunks) * 8 + i / 8 % 8;
      if (key >= live) reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
    }
    shared_fence();
    barrier_sync(kGroup + 1 + half, kWarpgroup);
  }

  // Of row i the sums 2 * (lane % 4) + {0, 1} of eight dimensions.
  __device__ float2 two(int part, int group, int i) const {
    const float* sums = out[part] + 4 * group;
    return i == 0 ? make_float2(sums[0], sums[1]) : make_float2(sums[2], sums[3]);
  }

  // The dimension that a lane's group of eight, of four groups from this one on, begins with.
  __device__ int dim(int part, int group) const {
    return half * (kLatentDims / 2) + part * kPartDims + 8 * (group + threadIdx.x % 4);
  }

  // value(part, group): two of the row's means, as above.
  template <typename Value>
  __device__ void write(const Share& share, int i, Value value) const {
    const int r = share.row + row_of(i), token = r / args.heads, head = r % args.heads;
    auto* row = static_cast<__nv_bfloat16*>(args.out) + head * args.out_head +
                int64_t{share.q_start + token} * args.out_token;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int group = 0; group < kPartDims / 8; group += 4) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 means = value(part, group + j);
          word[j] = pack(means.x, means.y);
        }
        transpose_words(word);
        if (token < share.query_len)
          *reinterpret_cast<uint4*>(row + dim(part, group)) =
              make_uint4(word[0], word[1], word[2], word[3]);
      }
  }

  __device__ void write(const Share& share, int i) const {
    write(share, i, [&](int part, int group) {
      const float2 sums = two(part, group, i);
      return make_float2(sums.x * factor[i], sums.y * factor[i]);
    });
  }

  // The means of a share, which is yet to be joined.
  __device__ void leave(const Share& share, int i) const {
    const int r = share.row + row_of(i);
    if (r >= share.query_len * args.heads) return;
    const int64_t row = (int64_t{share.q_start} * args.heads + r) * args.splits + share.split;
    float* to = args.part + row * kLatentDims + half * (kLatentDims / 2) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int group = 0; group < kPartDims / 8; ++group) {
        const float2 sums = two(part, group, i);
        *reinterpret_cast<float2*>(to + part * kPartDims + 8 * group) =
            make_float2(sums.x * factor[i], sums.y * factor[i]);
      }
  }

  // This CTA has the mean of the row of the share's number.
  __device__ void join(const Share& share) {
    Pair<ROWS> pair(shared);
    const int kept = share.split, other = 1 - kept;
    pair.wait_told();
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int group = 0; group < kPartDims / 8; group += 2) {
        const float2 low = two(part, group, other), high = two(part, group + 1, other);
        pair.send(other, half, part * kPartDims / 16 + group / 2,
                  make_float4(low.x, low.y, high.x, high.y));
      }
    const float2 by = pair.factors(row_of(kept));
    pair.wait_sent();
    write(share, kept, [&](int part, int group) {
      const float4 four = *pair.received(half, part * kPartDims / 16 + group / 2);
      const float2 theirs =
          group % 2 == 0 ? make_float2(four.x, four.y) : make_float2(four.z, four.w);
      const float2 own = two(part, group, kept);
      const float2 first = kept == 0 ? own : theirs, second = kept == 0 ? theirs : own;
      return make_float2(fmaf(second.x, by.y, first.x * by.x),
                         fmaf(second.y, by.y, first.y * by.x));
    });
  }
};

}  // namespace vllm_cuda::latent_attention
