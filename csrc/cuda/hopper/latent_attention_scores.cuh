// SPDX-License-Identifier: Apache-2.0
// The warpgroup that multiplies queries and keys, and makes weights of scores.
#pragma once

#include "bf16_pairs.cuh"
#include "latent_attention_memory.cuh"
#include "latent_attention_pair.cuh"
#include "latent_attention_softmax.cuh"
#include "tma.cuh"

namespace vllm_cuda::latent_attention {

template <int ROWS>
struct Scores {
  using Mem = Memory<ROWS>;

  const LatentAttentionArgs& args;
  char* shared;
  const bool paired;
  Ring halves, ends;
  float score[kKeys / 2];
  Softmax<kKeys> softmax;

  __device__ Scores(const LatentAttentionArgs& args_, char* shared_, bool paired_)
      : args(args_), shared(shared_), paired(paired_), halves(ring_of_halves<ROWS>(shared_)),
        ends(ring_of_ends<ROWS>(shared_)) {}

  __device__ void run() {
#pragma unroll 1
    for (int i = blockIdx.x; i < num_shares(args); i += gridDim.x) {
      const Share share(args, i, ROWS);
      if (!share.exists) continue;
      // The products of the share before have read its query.
      barrier_sync(kGroup, kWarpgroup);
      load_query(share);
      shared_fence();
      barrier_sync(kGroup, kWarpgroup);
      softmax.start(-INFINITY, -INFINITY);
      const int tiles = share.tiles();
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        multiply_keys();
        if (has_rows<ROWS>()) make_weights(share, share.first + tile * kKeys);
        barrier_sync(kWeightsEmpty, kHandingOver);
        if (has_rows<ROWS>()) leave_weights();
        barrier_arrive(kWeightsFull, kHandingOver);
      }
      const float sum[2] = {softmax.sum_of(0), softmax.sum_of(1)};
      barrier_sync(kWeightsEmpty, kHandingOver);
      if (has_rows<ROWS>()) finish(share, sum);
      barrier_arrive(kWeightsFull, kHandingOver);
    }
  }

  // In pieces of 16 bytes, a row a warp's; all are asked for before one is waited for.
  __device__ void load_query(const Share& share) const {
    constexpr int kPieces = 8 * kChunks, kLatentPieces = kLatentDims / 8;
#pragma unroll 4
    for (int r = threadIdx.x / 32 % 4; r < ROWS; r += 4) {
      const int token = (share.row + r) / args.heads, head = (share.row + r) % args.heads;
      const int64_t place = share.q_start + min(token, share.query_len - 1);
      const auto* latent = static_cast<const __nv_bfloat16*>(args.query) + head * args.q_head +
                           place * args.q_token;
      const auto* end = static_cast<const __nv_bfloat16*>(args.shared) +
                        place * args.shared_token + head * args.shared_head;
      char* row = shared + Mem::kQuery + r * kTileRowBytes;
#pragma unroll
      for (int piece = threadIdx.x % 32; piece < kPieces; piece += 32) {
        const auto* from =
            piece < kLatentPieces ? latent + 8 * piece : end + 8 * (piece - kLatentPieces);
        copy_16(row + piece / 8 * Mem::kQueryChunk + (piece % 8 ^ r % 8) * 16, from,
                token < share.query_len);
      }
    }
    wait_for_copies();
  }

  template <int CHUNKS>
  __device__ void multiply_chunks(int first, const char* tile) {
    const uint64_t query = tile_descriptor(shared + Mem::kQuery + first * Mem::kQueryChunk);
    const uint64_t keys = squares_descriptor(tile, kTileGroupBytes, squares_bytes(CHUNKS));
    products_fence();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        product<0, 0>(score, advance(query, chunk * Mem::kQueryChunk + 32 * step),
                      advance(keys, squares_bytes(chunk) + 32 * step), first + chunk + step > 0);
    products_commit();
  }

  __device__ void multiply_keys() {
    halves.wait_full();
    multiply_chunks<kHalfChunks>(0, shared + halves.index * kHalfBytes);
    halves.advance();
    halves.wait_full();
    multiply_chunks<kHalfChunks>(kHalfChunks, shared + halves.index * kHalfBytes);
    halves.advance();
    ends.wait_full();
    multiply_chunks<1>(2 * kHalfChunks, shared + Mem::kEnd + ends.index * kChunkBytes);
    products_wait<0>(score);
    if (threadIdx.x % 32 == 0) ends.release();
    ends.advance();
  }

  __device__ void make_weights(const Share& share, int start) {
    // The first of the tile's tokens sees all keys up to its own.
    const int lowest = share.lowest + share.row / args.heads;
    if (start + kKeys - 1 > min(share.last - 1, lowest)) {
      const int column = threadIdx.x % 4 * 2;
      int newest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = (share.row + row_of(i)) / args.heads;
        newest[i] = min(share.last - 1, share.lowest + token) - start - column;
      }
      softmax.hide(score, [&](int i, int key) { return key > newest[i]; });
    }
    softmax.step(score, args.scale);
  }

  __device__ void leave_weights() const {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const float* s = score + 8 * i;
      *weights_at<ROWS>(shared, i) =
          make_uint4(pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
    }
    if (threadIdx.x % 4 == 0) {
      factors<ROWS>(shared)[row_of(0)] = softmax.fade[0];
      factors<ROWS>(shared)[row_of(1)] = softmax.fade[1];
    }
  }

  // What sums are to be multiplied by to be means, or means of a share.
  __device__ void finish(const Share& share, const float (&sum)[2]) const {
    if (paired && share.used == 2) cluster_wait();
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (paired && share.used == 2) {
        Pair<ROWS>(shared).tell(share.split, row_of(i), softmax.peak[i], sum[i]);
        continue;
      }
      factors<ROWS>(shared)[row_of(i)] = 1.0f / (sum[i] > 0.0f ? sum[i] : 1.0f);
      const int r = share.row + row_of(i), token = r / args.heads, head = r % args.heads;
      if (share.used == 1 || token >= share.query_len) continue;
      const int64_t part =
          (int64_t{share.q_start + token} * args.heads + head) * args.splits + share.split;
      args.lse[part] = softmax.peak[i] + __log2f(sum[i]);
    }
  }
};

}  // namespace vllm_cuda::latent_attention
