// SPDX-License-Identifier: Apache-2.0
// Shared memory of the attention to latents, and how its warpgroups hand weights over.
#pragma once

#include "latent_attention_share.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace vllm_cuda::latent_attention {

constexpr int kKeys = kLatentTileKeys, kWarpgroup = 128;
constexpr int kChunkBytes = kKeys * kTileRowBytes;  // 64 columns of a tile
constexpr int kChunks = (kLatentDims + kLatentShared) / 64;
// The latents of a tile are two halves: each is the values of one warpgroup.
constexpr int kHalfChunks = kLatentDims / 128, kHalfBytes = kHalfChunks * kChunkBytes;
// Eight keys of a chunk are a square. Squares of the same keys are adjacent, as copies leave them.
__device__ constexpr int squares_bytes(int chunks) { return chunks * kTileGroupBytes; }

// Rings of halves of latents and of shared dimensions, the query in chunks of 64 columns as
// products take them, what the warpgroup of the scores hands over, what the CTAs of a cluster tell
// each other, barriers.
template <int ROWS>
struct Memory {
  static constexpr int kHalves = ROWS == 32 ? 5 : 4, kEnds = 2;
  static constexpr int kQueryChunk = ROWS * kTileRowBytes;
  static constexpr int kEnd = kHalves * kHalfBytes;
  static constexpr int kQuery = kEnd + kEnds * kChunkBytes;
  static constexpr int kWeights = kQuery + kChunks * kQueryChunk;
  static constexpr int kFactors = kWeights + 2 * ROWS * kKeys;
  static constexpr int kTold = kFactors + 4 * ROWS;
  static constexpr int kBarriers = kTold + 16 * ROWS;
  static constexpr int kPairBarriers = kBarriers + 16 * (kHalves + kEnds);
  static constexpr int kBytes = kPairBarriers + 32;
  // Products have 64 rows; a query of 32 is followed by what may be anything.
  static_assert(kQuery + kChunks * kQueryChunk + (64 - ROWS) * kTileRowBytes <= kBytes);
};

template <int ROWS>
__device__ Ring ring_of_halves(char* shared) {
  using Mem = Memory<ROWS>;
  return Ring(reinterpret_cast<uint64_t*>(shared + Mem::kBarriers), Mem::kHalves);
}

template <int ROWS>
__device__ Ring ring_of_ends(char* shared) {
  using Mem = Memory<ROWS>;
  return Ring(reinterpret_cast<uint64_t*>(shared + Mem::kBarriers) + 2 * Mem::kHalves,
              Mem::kEnds);
}

// Barrier 0 is __syncthreads.
enum Barrier { kWeightsFull = 1, kWeightsEmpty = 2, kGroup = 3 };
constexpr int kHandingOver = 3 * kWarpgroup;

__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// This thread's two rows of a tile, as products leave them in each of the warpgroups; the thread
// of the same number hands over what belongs to them.
__device__ inline int row_of(int i) {
  return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * i;
}

// Whether this thread's warp has rows of the query; otherwise its part of products is ignored.
template <int ROWS>
__device__ inline bool has_rows() {
  return threadIdx.x / 32 % 4 * 16 < ROWS;
}

// Where the thread's weights of keys 16 i to 16 i + 15 are.
template <int ROWS>
__device__ inline uint4* weights_at(char* shared, int i) {
  return reinterpret_cast<uint4*>(shared + Memory<ROWS>::kWeights) + i * 2 * ROWS +
         threadIdx.x % kWarpgroup;
}

template <int ROWS>
__device__ inline float* factors(char* shared) {
  return reinterpret_cast<float*>(shared + Memory<ROWS>::kFactors);
}

// 16 bytes, asynchronously: zeros unless they exist.
__device__ inline void copy_16(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace vllm_cuda::latent_attention
