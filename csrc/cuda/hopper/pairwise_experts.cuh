// SPDX-License-Identifier: Apache-2.0
// Experts of a few tokens: each pair of token and slot reads its expert's weights by itself, for
// hardly two have the same one, and all that counts is that memory never waits (sm_90a).
//
// Two kernels, gate and up projections and down projections, are the same: a warp streams pieces of
// the weights, some rows each, through a ring of stages, and others multiply one each. The second
// starts once all copies of the first are under way, fetches its own behind them, and waits for the
// results with a full ring.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "hopper/bf16_pairs.cuh"
#include "pairwise_experts.h"
#include "ptx.cuh"

namespace vllm_cuda::pairwise_experts {

constexpr int WORD = 8;  // elements of 16 bytes
constexpr int CONSUMERS = 6, THREADS = 32 * (CONSUMERS + 1);  // warps, and one that copies
constexpr int TOGETHER = 4;  // rows that a warp multiplies at once
// Of a ring.
constexpr int RING_BYTES = 96 * 1024, MOST_STAGES = 12;
template <bool GATED>
constexpr int STAGE_BYTES = GATED ? 16384 : 8192;
template <bool GATED>
constexpr int STAGES = RING_BYTES / STAGE_BYTES<GATED>;
static_assert(2 * kMostRowBytes <= STAGE_BYTES<true> && kMostRowBytes <= STAGE_BYTES<false>);
static_assert(STAGES<true> <= MOST_STAGES && STAGES<false> <= MOST_STAGES);
// So a stage is always the same warp's, which sees each of its phases.
static_assert(STAGES<true> % CONSUMERS == 0 && STAGES<false> % CONSUMERS == 0);

// One of the two: GATED makes silu(gate(x)) * up(x), else what that is multiplied with.
template <bool GATED>
struct Product {
  const PairwiseExpertsArgs& args;
  // Of a row of the weights, and of the results.
  const int width, outputs;
  // A piece is rows that follow each other, of the gate as many as of the up projection.
  const int rows, per_pair, count;

  __device__ explicit Product(const PairwiseExpertsArgs& args_)
      : args(args_),
        width(GATED ? args.hidden : args.inner),
        outputs(GATED ? args.inner : args.hidden),
        rows(STAGE_BYTES<GATED> / ((GATED ? 4 : 2) * width)),
        per_pair((outputs + rows - 1) / rows),
        count(args.tokens * args.slots * per_pair) {}

  __device__ int first_row(int piece) const { return piece % per_pair * rows; }
  __device__ int rows_of(int piece) const { return min(rows, outputs - first_row(piece)); }
  __device__ int words() const { return width / WORD; }
  // What is multiplied: a token's x, or a pair's.
  __device__ int inputs() const { return GATED ? args.tokens : args.tokens * args.slots; }
  __device__ int input_of(int piece) const {
    return piece / per_pair / (GATED ? args.slots : 1);
  }
  __device__ const uint4* input() const {
    return static_cast<const uint4*>(GATED ? args.x : args.gated);
  }
  __device__ int64_t input_stride() const { return GATED ? args.x_stride / WORD : words(); }
  __device__ __nv_bfloat16* result(int piece) const {
    return static_cast<__nv_bfloat16*>(GATED ? args.gated : args.out) +
           int64_t{piece / per_pair} * outputs + first_row(piece);
  }

  __device__ int load_expert(int piece) const {
    const int pair = piece / per_pair;
    return __ldcg(args.experts + pair / args.slots * args.experts_stride + pair % args.slots);
  }
  __device__ bool is_there(int expert) const { return expert >= 0 && expert < args.num_experts; }

  // One thread does.
  __device__ void copy(int piece, int expert, char* to, Ring& ring, uint64_t policy) const {
    const uint32_t bytes = 2 * rows_of(piece) * width;
    const auto* const from = static_cast<const __nv_bfloat16*>(GATED ? args.gate_up : args.down) +
                             (int64_t{GATED ? 2 : 1} * expert * outputs + first_row(piece)) * width;
    ring.expect(GATED ? 2 * bytes : bytes);
    bulk_copy(to, from, bytes, ring.full(), policy);
    if (GATED) bulk_copy(to + bytes, from + int64_t{outputs} * width, bytes, ring.full(), policy);
  }
};

// The pieces of a CTA whose expert is there. A lane knows the expert of one of the next 32.
template <typename P>
struct Turns {
  const P& product;
  int turn = -1, own = -1, piece = 0, expert = 0;

  __device__ explicit Turns(const P& product_) : product(product_) { advance(); }
  __device__ bool more() const { return piece < product.count; }
  __device__ void advance() {
    do {
      ++turn;
      piece = blockIdx.x + turn * gridDim.x;
      if (turn % 32 == 0) {
        const int of_lane = piece + threadIdx.x % 32 * gridDim.x;
        own = of_lane < product.count ? product.load_expert(of_lane) : -1;
      }
      expert = __shfl_sync(~0u, own, turn % 32);
    } while (more() && !product.is_there(expert));
  }
};

// sum + the products of 8 elements, one after another.
__device__ inline float add_products(float sum, const uint4& x, const uint4& y) {
  const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a{low_half(left[i]), high_half(left[i])};
    const float2 b{low_half(right[i]), high_half(right[i])};
    sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
  }
  return sum;
}

// Lanes 8 i to 8 i + 7 get the sum of x[i] over all lanes.
__device__ inline float sums_of_lanes(const float (&x)[TOGETHER]) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
  const float first = (high ? x[2] : x[0]) + __shfl_xor_sync(~0u, high ? x[0] : x[2], 16);
  const float second = (high ? x[3] : x[1]) + __shfl_xor_sync(~0u, high ? x[1] : x[3], 16);
  float sum = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

// A warp multiplies a piece of so many rows, or of as many of the gate's and the up projection's:
// then two of each at once.
template <bool GATED>
__device__ inline void multiply(const uint4* weight, const uint4* x, int words, int rows,
                                __nv_bfloat16* out) {
  constexpr int EACH = GATED ? TOGETHER / 2 : TOGETHER;
  const int lane = threadIdx.x % 32, own = lane / 8 % EACH;
  for (int first = 0; first < rows; first += EACH) {
    float sums[TOGETHER]{};
#pragma unroll 2
    for (int word = lane; word < words; word += 32) {
      const uint4 value = x[word];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = i / EACH * rows + min(first + i % EACH, rows - 1);
        sums[i] = add_products(sums[i], weight[row * words + word], value);
      }
    }
    float sum = sums_of_lanes(sums);
    if constexpr (GATED) {
      sum = to_float(from_float<__nv_bfloat16>(sum));
      sum = silu(sum) * __shfl_xor_sync(~0u, sum, 16);
    }
    if (lane % 8 == 0 && lane < 8 * EACH && first + own < rows) {
      out[first + own] = from_float<__nv_bfloat16>(sum);
    }
  }
}

struct Shared {
  alignas(128) char ring[RING_BYTES];
  uint64_t barriers[2 * MOST_STAGES];
  uint4 input[];  // rows of `words`

  template <bool GATED>
  __device__ char* stage(int index) {
    return ring + index * STAGE_BYTES<GATED>;
  }
};

// A warp; its first lane copies. Experts have been chosen before the first kernel begins.
template <bool GATED>
__device__ inline void produce(const Product<GATED>& product, Shared& shared) {
  if (GATED) wait_for_predecessors();
  Ring ring(shared.barriers, STAGES<GATED>);
  const uint64_t policy = evict_first_policy();
  for (Turns turns(product); turns.more(); turns.advance(), ring.advance()) {
    if (threadIdx.x % 32 == 0) {
      ring.wait_empty();
      product.copy(turns.piece, turns.expert, shared.stage<GATED>(ring.index), ring, policy);
    }
    __syncwarp();
  }
  if (GATED) launch_dependents();
}

// The others take pieces in turn.
template <bool GATED>
__device__ inline void consume(const Product<GATED>& product, Shared& shared) {
  wait_for_predecessors();
  const int words = product.words(), all = product.inputs() * words;
  for (int i = threadIdx.x; i < all; i += 32 * CONSUMERS) {
    shared.input[i] = __ldcg(product.input() + i / words * product.input_stride() + i % words);
  }
  consumers_sync<32 * CONSUMERS>();
  Ring ring(shared.barriers, STAGES<GATED>);
  int until = threadIdx.x / 32;  // the warp's next piece
  for (Turns turns(product); turns.more(); turns.advance(), ring.advance()) {
    if (until-- > 0) continue;
    until = CONSUMERS - 1;
    ring.wait_full();
    multiply<GATED>(reinterpret_cast<const uint4*>(shared.stage<GATED>(ring.index)),
                    shared.input + product.input_of(turns.piece) * words, words,
                    product.rows_of(turns.piece), product.result(turns.piece));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release();
  }
}

// Grid (CTAs), one per multiprocessor. A CTA of the second kernel fits beside one of the first.
template <bool GATED>
__global__ void __launch_bounds__(THREADS, 2)
    kernel(const __grid_constant__ PairwiseExpertsArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) Ring(shared.barriers, STAGES<GATED>).init(1);
  __syncthreads();
  if (!GATED) launch_dependents();
  const Product<GATED> product(args);
  if (threadIdx.x / 32 == CONSUMERS) {
    produce(product, shared);
  } else {
    consume(product, shared);
  }
}

}  // namespace vllm_cuda::pairwise_experts
