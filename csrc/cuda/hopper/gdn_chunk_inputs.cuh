// SPDX-License-Identifier: Apache-2.0
// What a CTA of the chunk factors works on: its shared memory, its tokens and their gates.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "gdn_chunk_factors.h"
#include "hopper/gdn_tiles.cuh"
#include "ptx.cuh"

namespace vllm_cuda {

namespace chunk_factors {

constexpr int CHUNK = 64, DIM = 128, WARPS = 4, THREADS = 32 * WARPS;
constexpr int SPLIT_BYTES = 16 * 64, TILE_BYTES = 16 * 32;

struct Inputs {
  // Rows of 256 bytes; 16-byte units are permuted within a row, here as everywhere below, so that
  // eight rows of a tile lie in different banks.
  alignas(1024) char k[CHUNK * 2 * DIM], q[CHUNK * 2 * DIM];
};

// Takes the place of the inputs once the products are in registers.
template <int HEADS>
struct Results {
  alignas(1024) char below[HEADS][6][SPLIT_BYTES];  // tiles of -A, split
  char diagonal[HEADS][4][SPLIT_BYTES];             // tiles of -A in fp32, then of X^T, split
  char out[HEADS][10][TILE_BYTES];                  // tiles of P, then of T
};

// `HEADS` value heads of one key head, one or two.
template <int HEADS>
struct Shared {
  union {
    Inputs in;
    Results<HEADS> res;
  };
  float G[HEADS][CHUNK], beta[HEADS][CHUNK];  // G in base 2: exp2 is one instruction
  float k_scale[CHUNK], q_scale[CHUNK];
};

// What a CTA works on.
struct Work {
  int64_t start, place;  // first token; chunk * heads + first head
  int length, key_head, head;
};

// Grid (value heads of a key head / HEADS, key heads, chunks).
template <int HEADS>
__device__ inline Work find_work(const ChunkFactorsArgs& args) {
  const int chunk = blockIdx.z;
  const int seq = args.chunks[2 * chunk];
  const int start = args.starts[seq] + args.chunks[2 * chunk + 1] * CHUNK;
  Work work;
  work.start = start;
  work.length = min(args.starts[seq + 1] - start, CHUNK);
  work.key_head = blockIdx.y;
  work.head = work.key_head * args.group + blockIdx.x * HEADS;
  work.place = static_cast<int64_t>(chunk) * args.k_heads * args.group + work.head;
  return work;
}

// Starts copying 64 rows of 256 bytes; rows from `length` on are zero.
__device__ inline void load_rows(char* to, const void* from, int64_t stride, const Work& work) {
  const int unit = threadIdx.x % 16, row = threadIdx.x / 16;
  const __nv_bfloat16* source = static_cast<const __nv_bfloat16*>(from) +
                                (work.start + row) * stride + work.key_head * DIM + unit * 8;
  const uint32_t place = shared_address(to) + row * 256 + ((unit ^ row) << 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    copy_async(place + i * 8 * 256, source, row + 8 * i < work.length ? 16 : 0);
    source += 8 * stride;
  }
}

__device__ inline float load_gate(const void* from, bool is_float, int64_t index) {
  return is_float ? static_cast<const float*>(from)[index]
                  : __bfloat162float(static_cast<const __nv_bfloat16*>(from)[index]);
}

// What the gates of a lane's two tokens are made of. All loads are under way at once, before those
// of keys and queries.
struct RawGates {
  float a[2] = {}, b[2] = {}, A_log = 0.f, dt_bias = 0.f;
  __device__ RawGates(const ChunkFactorsArgs& args, const Work& work, int head, int length) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * (threadIdx.x % 32) + i;
      if (t < length) {
        a[i] = load_gate(args.a, args.a_is_float, (work.start + t) * args.a_stride + head);
        b[i] = load_gate(args.b, args.b_is_float, (work.start + t) * args.b_stride + head);
      }
    }
    if (args.A_log != nullptr) {
      A_log = args.A_log[head];
      dt_bias = args.dt_bias[head];
    }
  }
};

// Gates of value head h by one warp, zero from `length` on.
template <int HEADS>
__device__ inline void gates(const ChunkFactorsArgs& args, const RawGates& raw, int length, int h,
                             Shared<HEADS>& s) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const int lane = threadIdx.x % 32;
  float g[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = raw.a[i];
    beta[i] = raw.b[i];
    if (args.A_log != nullptr) {
      const float x = g[i] + raw.dt_bias;
      g[i] = -expf(raw.A_log) * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
      beta[i] = __fdividef(1.f, 1.f + expf(-beta[i]));
    }
    const bool valid = 2 * lane + i < length;
    g[i] = valid ? g[i] * LOG2_E : 0.f;
    beta[i] = valid ? beta[i] : 0.f;
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
  const float first = before + g[0];
  // Past the end of a sequence G stays as it is, to the bit.
  const int last = length - 1;
  const float even = __shfl_sync(~0u, first, last / 2), odd = __shfl_sync(~0u, sum, last / 2);
  const float end = last % 2 ? odd : even;
  *reinterpret_cast<float2*>(&s.G[h][2 * lane]) = {2 * lane < last ? first : end,
                                                   2 * lane + 1 < last ? sum : end};
  *reinterpret_cast<float2*>(&s.beta[h][2 * lane]) = {beta[0], beta[1]};
}

}  // namespace chunk_factors

}  // namespace vllm_cuda
