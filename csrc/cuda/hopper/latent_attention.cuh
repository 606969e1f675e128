// SPDX-License-Identifier: Apache-2.0
// Attention of few queries to a paged cache of latents: a row is key and value of all heads, so the
// rows of a sequence's query, its tokens times heads, share every tile of keys that is read.
//
// Products are transposed: scores are [keys, rows] and outputs [dims, rows], so that the few rows
// are the narrow side of a tensor core's product and none is wasted. Both warpgroups of a block of
// threads compute all scores of a tile, and half the dims of the output each; a warp streams tiles
// ahead of them, across shares. Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm
// 1). The shares of a sequence follow from its length and host integers, and all sums are in a
// fixed order: a row's bits do not depend on which block of threads computes it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "bf16_pairs.cuh"
#include "latent_attention_share.cuh"
#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace vllm_cuda::latent_attention {

constexpr int kKeys = kLatentTileKeys;
constexpr int kChunks = (kLatentDims + kLatentShared) / 64, kValueChunks = kLatentDims / 64;
constexpr int kChunkBytes = kKeys * kTileRowBytes, kTileBytes = kChunks * kChunkBytes;
constexpr int kStages = 2, kGroups = 2, kWarps = 4 * kGroups, kComputing = 32 * kWarps;
constexpr int kThreads = kComputing + 32;
constexpr int kOwnChunks = kValueChunks / kGroups;  // of the output, a warpgroup's

// Shared memory: the ring of tiles, the query and each warpgroup's weights, all in chunks of 64
// columns as products take them, what warps tell each other of each row, barriers.
template <int ROWS>
struct Memory {
  static constexpr int kQueryChunk = ROWS * kTileRowBytes;
  static constexpr int kQuery = kStages * kTileBytes;
  static constexpr int kWeights = kQuery + kChunks * kQueryChunk;
  static constexpr int kTold = kWeights + kGroups * kQueryChunk;
  static constexpr int kBarriers = kTold + 4 * kWarps * ROWS;
  static constexpr int kBytes = kBarriers + 16 * kStages;
};

// Where 16 bytes of a row of 128 are, in chunks that are swizzled.
__device__ inline int swizzled(int row, int piece) {
  return row * kTileRowBytes + (piece ^ row % 8) * 16;
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

template <int ROWS>
__device__ void produce(const LatentAttentionArgs& args, const CUtensorMap* map, int box_keys,
                        char* tiles, Ring ring) {
  const int lane = threadIdx.x % 32;
  for (int i = blockIdx.x; i < num_shares(args); i += gridDim.x) {
    const Share share(args, i, ROWS);
    if (!share.exists) continue;
    const int* table = args.table + share.seq * args.table_stride;
    // A lane knows the block of the box of the tile that it is the number of.
    const auto block_of = [&](int tile) {
      const int key = share.first + tile * kKeys + lane * box_keys;
      return lane * box_keys < kKeys && key < share.last ? table[key / args.block_size] : 0;
    };
    int next = block_of(0);
    for (int tile = 0; tile < share.tiles(); ++tile) {
      const int blocks = next, start = share.first + tile * kKeys;
      next = block_of(tile + 1);
      const int boxes = ceil_div(min(share.last - start, kKeys), box_keys);
      ring.wait_empty();
      if (lane == 0) ring.expect(boxes * box_keys * kTileRowBytes * kChunks);
      __syncwarp();
      char* stage = tiles + ring.index * kTileBytes;
      for (int base = 0; base < boxes * kChunks; base += 32) {
        const int box = (base + lane) / kChunks, chunk = (base + lane) % kChunks;
        const int block = __shfl_sync(~0u, blocks, box);
        if (box >= boxes) continue;
        load_tile(stage + chunk * kChunkBytes + box * box_keys * kTileRowBytes, map, 64 * chunk,
                  (start + box * box_keys) % args.block_size, block, ring.full());
      }
      __syncwarp();
      ring.advance();
    }
  }
}

template <int ROWS>
struct Computing {
  using Mem = Memory<ROWS>;
  static constexpr int kColumns = ROWS / 4;  // rows of the query that a thread has a part of

  const LatentAttentionArgs& args;
  char* shared;
  float out[kOwnChunks][ROWS / 2];
  float peak[kColumns], total[kColumns];

  __device__ Computing(const LatentAttentionArgs& args_, char* shared_)
      : args(args_), shared(shared_) {}

  __device__ static int group() { return threadIdx.x / 128; }
  __device__ static int warp() { return threadIdx.x / 32 % 4; }
  __device__ static int lane() { return threadIdx.x % 32; }
  // Of a tile of rows, this thread's i-th.
  __device__ static int row(int i) { return i / 2 * 8 + lane() % 4 * 2 + i % 2; }
  __device__ float* told() const {
    return reinterpret_cast<float*>(shared + Mem::kTold) + group() * 4 * ROWS;
  }

  __device__ void begin(const Share& share) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      peak[i] = -INFINITY;
      total[i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c)
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) out[c][i] = 0.0f;
    // The products of the share before have read its query.
    consumers_sync<kComputing>();
    load_query(share);
    shared_fence();
    consumers_sync<kComputing>();
  }

  // In pieces of 16 bytes.
  __device__ void load_query(const Share& share) const {
    constexpr int kPieces = 8 * kChunks;
    for (int i = threadIdx.x; i < ROWS * kPieces; i += kComputing) {
      const int r = i / kPieces, piece = i % kPieces;
      const int token = (share.row + r) / args.heads, head = (share.row + r) % args.heads;
      const int64_t place = share.q_start + token;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (token < share.query_len) {
        const bool latent = piece < 8 * kValueChunks;
        const auto* from = static_cast<const __nv_bfloat16*>(latent ? args.query : args.shared);
        from += latent ? head * args.q_head + place * args.q_token + 8 * piece
                       : place * args.shared_token + head * args.shared_head +
                             8 * (piece - 8 * kValueChunks);
        words = *reinterpret_cast<const uint4*>(from);
      }
      *reinterpret_cast<uint4*>(shared + Mem::kQuery + piece / 8 * Mem::kQueryChunk +
                                swizzled(r, piece % 8)) = words;
    }
  }

  // What a tile holds after its last key: no bits of another tensor count as values.
  __device__ void clear(char* tile, int live) const {
    for (int i = threadIdx.x; i < kValueChunks * kChunkBytes / 16; i += kComputing) {
      if (i / 8 % kKeys >= live) reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
    }
    shared_fence();
    consumers_sync<kComputing>();
  }

  __device__ void add_tile(const Share& share, int start, char* tile) {
    const int live = share.last - start;
    if (live < kKeys) clear(tile, live);
    float score[ROWS / 2];
    multiply_keys(score, tile);
    // The first of the tile's tokens sees all keys up to its own.
    const bool whole =
        live >= kKeys && start + kKeys - 1 <= share.lowest + share.row / args.heads;
    if (!whole) mask(score, share, start);
    float fade[kColumns];
    weigh(score, fade);
    leave_weights(score);
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c)
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) out[c][i] *= fade[i / 4 * 2 + i % 2];
    shared_fence();
    group_sync(group());
    add_values(tile);
  }

  __device__ void multiply_keys(float (&score)[ROWS / 2], const char* tile) const {
    const uint64_t keys = tile_descriptor(tile);
    const uint64_t query = tile_descriptor(shared + Mem::kQuery);
    products_fence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        product<0, 0>(score, advance(keys, chunk * kChunkBytes + 32 * step),
                      advance(query, chunk * Mem::kQueryChunk + 32 * step),
                      chunk + step > 0);
    products_commit();
    products_wait<0>(score);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) score[i] *= args.scale;
  }

  __device__ void mask(float (&score)[ROWS / 2], const Share& share, int start) const {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      const int key = start + 16 * warp() + lane() / 4 + i / 2 % 2 * 8;
      const int token = (share.row + row(i / 4 * 2 + i % 2)) / args.heads;
      if (key >= share.last || key > share.lowest + token) score[i] = -INFINITY;
    }
  }

  // Scores become weights; `fade` is what earlier sums are to be multiplied by.
  __device__ void weigh(float (&score)[ROWS / 2], float (&fade)[kColumns]) {
    float top[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int at = i / 2 * 4 + i % 2;
      top[i] = fmaxf(score[at], score[at + 2]);
#pragma unroll
      for (int far = 4; far < 32; far *= 2)
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], far));
      if (lane() < 4) told()[warp() * ROWS + row(i)] = top[i];
    }
    group_sync(group());
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float highest = peak[i];
#pragma unroll
      for (int other = 0; other < 4; ++other)
        highest = fmaxf(highest, told()[other * ROWS + row(i)]);
      // A row that has seen no key yet keeps a peak of -inf.
      const float shift = highest == -INFINITY ? 0.0f : highest;
      fade[i] = exp2_fast(peak[i] - shift);
      peak[i] = highest;
      const int at = i / 2 * 4 + i % 2;
      score[at] = exp2_fast(score[at] - shift);
      score[at + 2] = exp2_fast(score[at + 2] - shift);
      total[i] = total[i] * fade[i] + score[at] + score[at + 2];
    }
  }

  // As [rows, keys]: matrices of 8 x 8 are transposed on their way to shared memory.
  __device__ void leave_weights(const float (&weight)[ROWS / 2]) const {
    char* weights = shared + Mem::kWeights + group() * Mem::kQueryChunk;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = (j + m / 2) * 4 + m % 2 * 2;
        words[m] = pack(weight[at], weight[at + 1]);
      }
      const int m = lane() / 8, r = (j + m / 2) * 8 + lane() % 8;
      store_transposed(weights + swizzled(r, 2 * warp() + m % 2), words[0], words[1], words[2],
                       words[3]);
    }
  }

  __device__ void add_values(const char* tile) {
    const uint64_t weights =
        tile_descriptor(shared + Mem::kWeights + group() * Mem::kQueryChunk);
    products_fence();
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c) {
      const char* chunk = tile + (group() * kOwnChunks + c) * kChunkBytes;
      const uint64_t values = transposed_descriptor(chunk, kChunkBytes);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        product<1, 0>(out[c], advance(values, 16 * kTileRowBytes * step),
                      advance(weights, 32 * step), 1);
    }
    products_commit();
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c) products_wait<0>(out[c]);
  }

  // Adds up what threads have seen of each row, and writes the mean of the values.
  __device__ void finish(const Share& share) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int far = 4; far < 32; far *= 2) total[i] += __shfl_xor_sync(~0u, total[i], far);
      if (lane() < 4) told()[warp() * ROWS + row(i)] = total[i];
    }
    group_sync(group());
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < 4; ++other) sum += told()[other * ROWS + row(i)];
      const int token = (share.row + row(i)) / args.heads, head = (share.row + row(i)) % args.heads;
      if (token >= share.query_len) continue;
      write(i, share, token, head, sum);
    }
  }

  __device__ void write(int i, const Share& share, int token, int head, float sum) const {
    const float factor = 1.0f / (sum > 0.0f ? sum : 1.0f);
    const int64_t place = share.q_start + token;
    const int64_t part = (place * args.heads + head) * args.splits + share.split;
    const bool joined = args.splits == 1;
    if (!joined && threadIdx.x < 4) args.lse[part] = peak[i] + __log2f(sum);
    auto* row_of = static_cast<__nv_bfloat16*>(args.out) + head * args.out_head +
                   place * args.out_token;
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = (group() * kOwnChunks + c) * 64 + 16 * warp() + lane() / 4 + 8 * half;
        const float value = out[c][i / 2 * 4 + 2 * half + i % 2] * factor;
        if (joined) {
          row_of[dim] = __float2bfloat16_rn(value);
        } else {
          args.part[part * kLatentDims + dim] = value;
        }
      }
  }
};

template <int ROWS>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_kernel(const LatentAttentionArgs args, const __grid_constant__ CUtensorMap map,
                            const int box_keys) {
  extern __shared__ __align__(1024) char shared[];
  using Mem = Memory<ROWS>;
  Ring ring(reinterpret_cast<uint64_t*>(shared + Mem::kBarriers), kStages);
  if (threadIdx.x == 0) ring.init(kWarps);
  __syncthreads();
  if (threadIdx.x >= kComputing) {
    produce<ROWS>(args, &map, box_keys, shared, ring);
    return;
  }
  Computing<ROWS> computing(args, shared);
  for (int i = blockIdx.x; i < num_shares(args); i += gridDim.x) {
    const Share share(args, i, ROWS);
    if (!share.exists) continue;
    computing.begin(share);
    for (int tile = 0; tile < share.tiles(); ++tile) {
      ring.wait_full();
      computing.add_tile(share, share.first + tile * kKeys, shared + ring.index * kTileBytes);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ring.release();
      ring.advance();
    }
    computing.finish(share);
  }
}

}  // namespace vllm_cuda::latent_attention
