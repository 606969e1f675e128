// SPDX-License-Identifier: Apache-2.0
// What a CTA of the chunk factors of Kimi delta attention keeps in shared memory, what it fetches,
// and how log decays are made.
#pragma once

#include <cuda.h>

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"
#include "hopper/tma.cuh"
#include "kda_factors.h"

namespace vllm_cuda {

namespace kda_factors {

using chunk_factors::CHUNK, chunk_factors::DIM;

constexpr int SIXTEEN = 16, SIXTEENS = CHUNK / SIXTEEN;
constexpr int THREADS = 2 * 32 * SIXTEENS, CTAS = 2;  // per multiprocessor
// Half a row of channels: 128 bytes, whose 16-byte units are permuted.
constexpr int ROW_BYTES = DIM, HALF_BYTES = CHUNK * ROW_BYTES, OWN_BYTES = SIXTEEN * ROW_BYTES;
// What tokens may decay by for their start to be a reference (base 2).
constexpr float STRONGEST = 100.f;
constexpr float LOG2_E = 1.4426950408889634f;

struct Maps {
  CUtensorMap q, k, a;
};

struct Inputs {
  alignas(1024) char k[2][HALF_BYTES], q[2][HALF_BYTES], a[2][HALF_BYTES];
};
// Of the inverse, and P.
struct Results {
  alignas(1024) chunk_factors::Results<1> inverse;
  char P[10][chunk_factors::TILE_BYTES];
};

struct Shared {
  // Then left operands by token, and in the place of `a` keys as seen from the reference of their
  // own sixteen.
  Inputs in;
  union {
    // Right operands: keys of sixteen j as seen from a later sixteen i at `below_index(i, j)`.
    alignas(1024) char later[SIXTEENS * (SIXTEENS - 1) / 2][2][OWN_BYTES];
    Results res;
  };
  float totals[SIXTEENS][DIM];  // base-2 log decays of sixteen tokens
  float scales[CHUNK][2];       // of keys and queries
  float beta[CHUNK];
  float most[SIXTEENS][2];  // that sixteen tokens decay by in a channel of either half
  uint64_t barriers[2];
};

__device__ inline Shared& shared() {
  extern __shared__ __align__(1024) char memory[];
  return *reinterpret_cast<Shared*>(memory);
}

// A lane's channels of a token.
struct Two {
  float x, y;
  __device__ Two operator*(const Two& by) const { return {x * by.x, y * by.y}; }
  __device__ Two operator*(float by) const { return {x * by, y * by}; }
  __device__ Two operator+(const Two& by) const { return {x + by.x, y + by.y}; }
  __device__ Two operator-(const Two& by) const { return {x - by.x, y - by.y}; }
  __device__ Two operator-() const { return {-x, -y}; }
  __device__ float sum() const { return x + y; }
};

__device__ inline Two widen(uint32_t x) { return {low_half(x), high_half(x)}; }
__device__ inline uint32_t pack(const Two& x) { return vllm_cuda::pack(x.x, x.y); }
__device__ inline Two exp2_of(const Two& x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }
__device__ inline Two load_two(const float* at) {
  const float2 x = *reinterpret_cast<const float2*>(at);
  return {x.x, x.y};
}
__device__ inline void store_two(float* at, const Two& x) {
  *reinterpret_cast<float2*>(at) = make_float2(x.x, x.y);
}

// A warp's sixteen tokens and half: of the channels; of the products, those of keys or of queries.
struct Role {
  const int sixteen = threadIdx.x / 64, half = threadIdx.x / 32 % 2, lane = threadIdx.x % 32;
  __device__ int channel() const { return DIM / 2 * half + 2 * lane; }
  // A lane's channels of one of the sixteen tokens, in half rows of these tokens or of all.
  __device__ uint32_t* own_word(char* rows, int t) const {
    return reinterpret_cast<uint32_t*>(rows + t * ROW_BYTES + ((lane / 4 ^ t % 8) << 4) +
                                       lane % 4 * 4);
  }
  __device__ uint32_t* word(char* rows, int t) const {
    return own_word(rows + sixteen * OWN_BYTES, t);
  }
};

// A piece of a tile in half rows from `row` on, and of the tile 16 `step` channels further on.
__device__ inline uint32_t piece_address(const char* rows, int row, const Piece& piece) {
  return shared_address(rows) + (row + piece.row) * ROW_BYTES + ((piece.half ^ piece.row % 8) << 4);
}
__device__ inline uint32_t step_address(uint32_t piece, int step, int half_bytes) {
  return (piece ^ step % 4 * 32) + step / 4 * half_bytes;
}

// The warps that make the inverse meet.
__device__ inline void inverse_sync() { consumers_sync<THREADS / 2>(); }

// A chunk of a head.
struct Work {
  int64_t start, place;  // first token; chunk * heads + head
  int length, head;

  __device__ Work(const KdaFactorsArgs& args, int index) : place(index) {
    const int chunk = index / args.heads;
    head = index % args.heads;
    const int seq = args.chunks[2 * chunk];
    start = args.starts[seq] + args.chunks[2 * chunk + 1] * CHUNK;
    length = max(0, min(args.starts[seq + 1] - static_cast<int>(start), CHUNK));
  }
};

// What the gates of a thread's channels, and of its token, are made of.
struct Gates {
  float A_log, b = 0.f;
  Two bias;
  __device__ Gates(const KdaFactorsArgs& args, const Work& work, const Role& role) {
    const int t = threadIdx.x;
    if (t < work.length) {
      const auto* from = static_cast<const __nv_bfloat16*>(args.b) + work.head;
      b = __bfloat162float(from[(work.start + t) * args.b_stride]);
    }
    A_log = args.A_log[work.head];
    bias = load_two(args.dt_bias + work.head * DIM + role.channel());
  }
  __device__ void publish_beta(const Work& work, Shared& s) const {
    const int t = threadIdx.x;
    if (t < CHUNK) s.beta[t] = t < work.length ? __fdividef(1.f, 1.f + __expf(-b)) : 0.f;
  }
};

// One thread starts the copies of a chunk; all have read what lies there.
__device__ inline void fetch(const Maps& maps, const Work& work, Shared& s) {
  Ring ring(s.barriers, 1);
  ring.expect(sizeof(Inputs));
  const int row = static_cast<int>(work.start), column = 2 * work.head;
  load_tile(s.in.a, &maps.a, 0, row, column, ring.full());
  load_tile(s.in.k, &maps.k, 0, row, column, ring.full());
  load_tile(s.in.q, &maps.q, 0, row, column, ring.full());
}

// The rows past a sequence's end belong to others. They become zero, with inputs of the gates for
// which nothing decays. All threads of the CTA meet.
__device__ inline void clear_rows(int length, Shared& s) {
  constexpr uint32_t NO_DECAY = 0xF149F149;  // -1e30
  constexpr int UNITS = ROW_BYTES / sizeof(uint4);
  for (int i = length * UNITS + threadIdx.x; i < CHUNK * UNITS; i += THREADS) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<uint4*>(s.in.k[half])[i] = uint4{};
      reinterpret_cast<uint4*>(s.in.q[half])[i] = uint4{};
      reinterpret_cast<uint4*>(s.in.a[half])[i] = {NO_DECAY, NO_DECAY, NO_DECAY, NO_DECAY};
    }
  }
  __syncthreads();
}

// What a head's softplus is multiplied with.
struct Rate {
  float rate, largest;
  __device__ explicit Rate(float A_log) : rate(-expf(A_log)), largest(-160.f / rate) {}
  // The sum and the base-2 log decay for `y` = x log2(e): log2(1 + 2^y), not above 160.
  __device__ float add(float sum, float y) const {
    // log2(1 + e) / e to 8e-6 of it: slow decays live where e is tiny.
    const float e = exp2_fast(-fabsf(y));
    float series = fmaf(-0.03443583846092224f, e, 0.14603270590305328f);
    series = fmaf(series, e, -0.30303603410720825f);
    series = fmaf(series, e, 0.46917399764060974f);
    series = fmaf(series, e, -0.7204261422157288f);
    series = fmaf(series, e, 1.4426828622817993f);
    return fmaf(rate, fminf(fmaf(series, e, fmaxf(y, 0.f)), largest), sum);
  }
};

}  // namespace kda_factors

}  // namespace vllm_cuda
