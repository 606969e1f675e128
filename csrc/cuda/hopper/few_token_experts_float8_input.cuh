// SPDX-License-Identifier: Apache-2.0
// How e4m3 is made of what is multiplied by e4m3 weights.
#pragma once

#include "hopper/bf16_pairs.cuh"
#include "hopper/few_token_experts_product.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::few_token_experts {

// x has scales as the weights do: one per row, or one per row and group of channels, whose largest
// value becomes 448. The arithmetic is that of `vllm.kernels.fp8`.
struct Float8Input {
  static constexpr float MOST = 448;
  // Of a row: what lanes of a warp read of the weights at once; such a pass of x lies as [4 words
  // of each lane, 8 runs, 4 lanes], eight runs' 16 bytes together being what a product reads.
  static constexpr int PASS_BYTES = 512;

  InputRows rows;
  int passes, chunks, scales;  // of a row: `chunks` of 32 words of bf16
  int scale_at, most_at, bytes;

  template <typename P>
  explicit Float8Input(const P& product)
      : rows(product.input),
        passes((product.width + PASS_BYTES - 1) / PASS_BYTES),
        chunks((rows.words + 31) / 32),
        scales(product.args.grouped ? (product.width + GROUP - 1) / GROUP : 1),
        scale_at(rows.count * passes * PASS_BYTES),
        most_at(scale_at + 4 * rows.count * scales),
        bytes((most_at + 4 * rows.count + 15) / 16 * 16) {}

  // Of a row.
  __device__ char* runs(char* memory, int row) const { return memory + row * passes * PASS_BYTES; }
  __device__ float* scale(char* memory, int row) const {
    return reinterpret_cast<float*>(memory + scale_at) + row * scales;
  }
  // The largest of a row.
  __device__ float* most(char* memory, int row) const {
    return reinterpret_cast<float*>(memory + most_at) + row;
  }
  __device__ int scale_of(int word) const {
    return scales == 1 ? 0 : word / (GROUP / INPUT_WORD);
  }

  // All threads of the CTA do, and wait for each other.
  __device__ void prepare(char* memory) const {
    for (int i = threadIdx.x; i < rows.count; i += THREADS) *most(memory, i) = 0;
    if (rows.words * INPUT_WORD == passes * PASS_BYTES) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < scale_at / 16; i += THREADS) {
      reinterpret_cast<uint4*>(memory)[i] = uint4{};
    }
  }

  // Fetches x while nothing else is under way: behind the weights each fetch takes microseconds.
  // All threads do, a warp some chunks, and wait for each other.
  static constexpr int EARLY = 4;
  struct Early {
    uint4 word[EARLY];
  };
  struct Chunk {
    int row, index;
  };
  __device__ Chunk chunk_of(int index) const {
    const int row = index / chunks;
    return {row, index - row * chunks};
  }
  __device__ Early begin(char* memory) const {
    Early early;
    const int own = threadIdx.x / 32, all = rows.count * chunks;
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      const Chunk at = chunk_of(own + i * CONSUMERS);
      early.word[i] = own < CONSUMERS ? fetch(at.row, at.index) : uint4{};
    }
    if (scales > 1 || own >= CONSUMERS) return early;
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      if (own + i * CONSUMERS < all) note(memory, chunk_of(own + i * CONSUMERS), early.word[i]);
    }
#pragma unroll 1
    for (int i = own + EARLY * CONSUMERS; i < all; i += CONSUMERS) {
      const Chunk at = chunk_of(i);
      note(memory, at, fetch(at.row, at.index));
    }
    return early;
  }
  __device__ void note(char* memory, const Chunk& at, const uint4& value) const {
    const float largest = largest_of_lanes<32>(largest_of(value));
    // What is not negative has the order of its bits.
    if (threadIdx.x % 32 == 0) {
      atomicMax(reinterpret_cast<int*>(most(memory, at.row)), __float_as_int(largest));
    }
  }
  // All consumers do.
  __device__ void finish(char* memory, const Early& early) const {
    const int own = threadIdx.x / 32, all = rows.count * chunks;
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      if (own + i * CONSUMERS >= all) continue;
      const Chunk at = chunk_of(own + i * CONSUMERS);
      write(memory, at.row, at.index, early.word[i], *most(memory, at.row));
    }
#pragma unroll 1
    for (int i = own + EARLY * CONSUMERS; i < all; i += CONSUMERS) {
      const Chunk at = chunk_of(i);
      write(memory, at.row, at.index, fetch(at.row, at.index), *most(memory, at.row));
    }
    shared_fence();
    consumers_sync<32 * CONSUMERS>();
  }

  // All consumers do, a warp a row, of which a lane keeps so many words; others it fetches twice.
  static constexpr int KEPT = 2;
  __device__ void load(char* memory) const {
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < rows.count; row += CONSUMERS) {
      uint4 kept[KEPT];
#pragma unroll
      for (int i = 0; i < KEPT; ++i) kept[i] = fetch(row, i);
      float largest = 0;
      if (scales == 1) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) largest = fmaxf(largest, largest_of(kept[i]));
#pragma unroll 4
        for (int i = KEPT; i < chunks; ++i) largest = fmaxf(largest, largest_of(fetch(row, i)));
        largest = largest_of_lanes<32>(largest);
      }
#pragma unroll
      for (int i = 0; i < KEPT; ++i) write(memory, row, i, kept[i], largest);
#pragma unroll 2
      for (int i = KEPT; i < chunks; ++i) write(memory, row, i, fetch(row, i), largest);
    }
    shared_fence();
    consumers_sync<32 * CONSUMERS>();
  }

  __device__ uint4 fetch(int row, int chunk) const {
    const int word = 32 * chunk + threadIdx.x % 32;
    return row < rows.count && word < rows.words ? rows.load(row, word) : uint4{};
  }
  __device__ static float largest_of(const uint4& value) {
    const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = fmaxf(largest, fmaxf(fabsf(low_half(pairs[i])), fabsf(high_half(pairs[i]))));
    }
    return largest;
  }
  template <int LANES>
  __device__ static float largest_of_lanes(float largest) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    }
    return largest;
  }

  // `largest`: of the row, if that has one scale; half a warp has a group.
  __device__ void write(char* memory, int row, int chunk, const uint4& value,
                        float largest) const {
    if (scales > 1) largest = largest_of_lanes<GROUP / INPUT_WORD>(largest_of(value));
    const int word = 32 * chunk + threadIdx.x % 32;
    if (word >= rows.words) return;
    if (word % (GROUP / INPUT_WORD) == 0) {
      scale(memory, row)[scale_of(word)] = largest > 0 ? __fdiv_rn(largest, MOST) : 1;
    }
    const float factor = largest > 0 ? __fdiv_rn(MOST, largest) : 1;
    const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
    uint32_t made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 scaled{low_half(pairs[i]) * factor, high_half(pairs[i]) * factor};
      made[i] = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    // 8 bytes of a row, the half of one lane's 16.
    const int pass = word / 64, of_lane = word / 2 % 32, half = word % 2;
    char* const to = runs(memory, row) + pass * PASS_BYTES + 256 * half + 4 * of_lane;
    *reinterpret_cast<uint32_t*>(to) = made[0] | made[1] << 16;
    *reinterpret_cast<uint32_t*>(to + 128) = made[2] | made[3] << 16;
  }
};

}  // namespace vllm_cuda::few_token_experts
