// SPDX-License-Identifier: Apache-2.0
// One of the two products of experts of a few tokens: the pieces of the weights, where these lie
// and what they give.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "hopper/few_token_experts_hits.cuh"
#include "ptx.cuh"

namespace vllm_cuda::few_token_experts {

// Warps: a team multiplies a piece of the weights, and another one copies.
constexpr int TEAM = 4, TEAMS = 5, CONSUMERS = TEAM * TEAMS, THREADS = 32 * (CONSUMERS + 1);
constexpr int GROUP = 128;     // channels that have a scale of their own
constexpr int INPUT_WORD = 8;  // bf16 elements of 16 bytes
constexpr int STAGE_BYTES = 16384, MOST_STAGES = 10;
static_assert(2 * kMostRowBytes <= STAGE_BYTES);
// So a stage is always the same team's, which sees each of its phases.
static_assert(MOST_STAGES % TEAMS == 0);

using Float8 = __nv_fp8_e4m3;

// Rows of an expert's weights that follow each other.
struct Piece {
  int hit, first_row;
};

// Rows of bf16 that are multiplied: x, or what is between the products.
struct InputRows {
  const uint4* from;
  int64_t stride;  // of rows, in words
  int count, words;

  __device__ uint4 load(int row, int word) const { return __ldcg(from + row * stride + word); }
};

// What the host knows of a product; GATED makes silu(gate(x)) * up(x), else it is what that is
// multiplied with. T: of the weights.
template <bool GATED_, typename T_>
struct Product {
  static constexpr bool GATED = GATED_;
  using T = T_;

  FewTokenExpertsArgs args;
  int ctas;
  int width, outputs;  // of a row of the weights, and of the results
  int row_bytes, words;
  // A piece is so many rows, of the gate as many as of the up projection; pieces of an expert.
  int rows, pieces;
  InputRows input;  // of tokens, or of pairs

  Product(const FewTokenExpertsArgs& args_, int ctas_)
      : args(args_),
        ctas(ctas_),
        width(GATED ? args_.hidden : args_.inner),
        outputs(GATED ? args_.inner : args_.hidden),
        row_bytes(int(sizeof(T)) * width),
        words(row_bytes / 16),
        rows(STAGE_BYTES / ((GATED ? 2 : 1) * row_bytes)),
        pieces((outputs + rows - 1) / rows),
        input{static_cast<const uint4*>(GATED ? args_.x : args_.gated),
              (GATED ? args_.x_stride : width) / INPUT_WORD,
              GATED ? args_.tokens : args_.tokens * args_.slots, width / INPUT_WORD} {}

  __device__ int rows_of(const Piece& piece) const { return min(rows, outputs - piece.first_row); }
  __device__ int input_of(const Hits& hits, int pair) const {
    return GATED ? hits.tokens[pair] : pair;
  }
  __device__ __nv_bfloat16* result(int pair, const Piece& piece) const {
    return static_cast<__nv_bfloat16*>(GATED ? args.gated : args.out) + int64_t{pair} * outputs +
           piece.first_row;
  }
  // Of the weights of an expert's piece, and how far apart those of groups are.
  __device__ const float* scale(int expert, const Piece& piece, int groups) const {
    return (GATED ? args.gate_up_scale : args.down_scale) +
           int64_t{expert} * groups * scale_stride() + piece.first_row;
  }
  __device__ int scale_stride() const { return (GATED ? 2 : 1) * outputs; }

  // One thread does.
  __device__ void copy(int expert, const Piece& piece, char* to, Ring& ring,
                       uint64_t policy) const {
    const uint32_t bytes = rows_of(piece) * row_bytes;
    const int64_t row = int64_t{GATED ? 2 : 1} * expert * outputs + piece.first_row;
    const auto* const from =
        static_cast<const char*>(GATED ? args.gate_up : args.down) + row * row_bytes;
    ring.expect(GATED ? 2 * bytes : bytes);
    bulk_copy(to, from, bytes, ring.full(), policy);
    if (GATED) {
      bulk_copy(to + bytes, from + int64_t{outputs} * row_bytes, bytes, ring.full(), policy);
    }
  }
};

// A place in a CTA's pieces of a product.
struct Turns {
  int hit, piece;

  template <typename P>
  __device__ Turns(const P& product, int first)
      : hit(blockIdx.x / product.pieces), piece(blockIdx.x - hit * product.pieces) {
    advance(product, first);
  }
  // How many there are.
  template <typename P>
  __device__ static int of(const P& product, const Hits& hits) {
    const int others = hits.count * product.pieces - int(blockIdx.x) - 1;
    return others < 0 ? 0 : others / product.ctas + 1;
  }

  __device__ bool more(const Hits& hits) const { return hit < hits.count; }
  template <typename P>
  __device__ Piece get(const P& product) const {
    return {hit, piece * product.rows};
  }
  template <typename P>
  __device__ void advance(const P& product, int by) {
    for (piece += by * product.ctas; piece >= product.pieces; piece -= product.pieces) ++hit;
  }
};

// Of the results of a 16 x 8 product, as lanes have them, those on the diagonal of its upper or its
// lower half, else 0.
struct Diagonal {
  const bool own = threadIdx.x % 4 == threadIdx.x % 32 / 8, odd = threadIdx.x & 4;
  __device__ float low(const float (&d)[4]) const { return own ? (odd ? d[1] : d[0]) : 0; }
  __device__ float high(const float (&d)[4]) const { return own ? (odd ? d[3] : d[2]) : 0; }
};

// Lanes 16 i to 16 i + 15 get the sum of x[i] over all lanes.
__device__ inline float sums_of_lanes(const float (&x)[2]) {
  const bool upper = threadIdx.x & 16;
  float sum = (upper ? x[1] : x[0]) + __shfl_xor_sync(~0u, upper ? x[0] : x[1], 16);
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}
// Lanes 8 i to 8 i + 7.
__device__ inline float sums_of_lanes(const float (&x)[4]) {
  const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
  const float first = (upper ? x[2] : x[0]) + __shfl_xor_sync(~0u, upper ? x[0] : x[2], 16);
  const float second = (upper ? x[3] : x[1]) + __shfl_xor_sync(~0u, upper ? x[1] : x[3], 16);
  float sum = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

// Rows of the weights that a warp multiplies at once, two by two: one of the gate with that of the
// up projection, or four neighbours. `first`: of a piece's results.
template <bool GATED>
struct Rows {
  static constexpr int COUNT = GATED ? 2 : 4, RESULTS = GATED ? 1 : 4;
  const int first, rows;  // of the piece

  __device__ int of(int i) const {
    return GATED ? i * rows + min(first, rows - 1) : min(first + i, rows - 1);
  }
  // `sums`: what lanes have of a row's.
  __device__ void write(const float (&sums)[COUNT], __nv_bfloat16* out) const {
    constexpr int LANES = 32 / COUNT;
    const int lane = threadIdx.x % 32;
    float sum = sums_of_lanes(sums);
    if constexpr (GATED) {
      sum = to_float(from_float<__nv_bfloat16>(sum));
      sum = silu(sum) * __shfl_xor_sync(~0u, sum, LANES);
    }
    const int result = lane / LANES, row = first + result;
    if (lane % LANES == 0 && result < RESULTS && row < rows) {
      out[row] = from_float<__nv_bfloat16>(sum);
    }
  }
};

}  // namespace vllm_cuda::few_token_experts
