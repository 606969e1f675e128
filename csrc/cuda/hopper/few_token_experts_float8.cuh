// SPDX-License-Identifier: Apache-2.0
// How pieces of e4m3 weights are multiplied.
#pragma once

#include "hopper/few_token_experts_float8_input.cuh"
#include "hopper/wgmma.cuh"

namespace vllm_cuda::few_token_experts {

// As `Bf16Operand`, but that a product is a warpgroup's, of two rows a warp: alone these multiply
// e4m3 without making fp16 of it, which takes twice as long as to read it.
template <typename P>
struct Float8Operand {
  using Product = P;
  using Input = Float8Input;
  static constexpr bool GATED = P::GATED;
  static constexpr int COUNT = Rows<GATED>::COUNT;
  static constexpr int RESULTS = TEAM * Rows<GATED>::RESULTS;  // of a team at once
  static constexpr int PASS_BYTES = Input::PASS_BYTES;

  P product;
  Input input;
  int turns;  // of a warp, to multiply its rows of a piece

  explicit Float8Operand(const P& product_)
      : product(product_), input(product_), turns((product.rows + RESULTS - 1) / RESULTS) {}
  int64_t shared_bytes() const {
    return input.bytes + int64_t{4} * CONSUMERS * turns * input.scales * COUNT;
  }

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }

  // [turns, scales, COUNT]: those of the warp's rows of a piece.
  __device__ float* own(char* memory) const {
    return reinterpret_cast<float*>(memory + input.bytes) + warp() * turns * input.scales * COUNT;
  }
  __device__ Rows<GATED> rows_at(int first, int rows) const {
    return {first + warp() % TEAM * Rows<GATED>::RESULTS, rows};
  }

  // A warp begins to fetch the scales of its rows.
  __device__ void request(char* memory, const Hits& hits, const Piece& piece) const {
    const int rows = product.rows_of(piece), scales = input.scales;
    const float* const from = product.scale(hits.hit[piece.hit].expert, piece, scales);
    uint32_t to = shared_address(own(memory));
#pragma unroll 1
    for (int first = 0; first < rows; first += RESULTS, to += 4 * COUNT * scales) {
      const Rows<GATED> at_once = rows_at(first, rows);
#pragma unroll 1
      for (int i = lane(); i < COUNT * scales; i += 32) {
        const int own = i % COUNT;
        const int row = GATED ? at_once.of(0) + own * product.outputs : at_once.of(own);
        const float* const at = from + i / COUNT * product.scale_stride() + row;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 4 * i), "l"(at)
                     : "memory");
      }
    }
  }

  // A team does.
  __device__ void multiply(char* memory, const uint4* weight, const Hits& hits,
                           const Piece& piece) const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const int rows = product.rows_of(piece);
    hits.for_pairs(piece.hit, [&](int pair) {
      const int by = product.input_of(hits, pair);
      const char* const runs = input.runs(memory, by);
      const float* const by_scale = input.scale(memory, by);
      const float* row_scale = own(memory);
      // All warps of a team take part in all products.
#pragma unroll 1
      for (int first = 0; first < rows; first += RESULTS, row_scale += input.scales * COUNT) {
        const Rows<GATED> at_once = rows_at(first, rows);
        const uint4* row[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) row[i] = weight + at_once.of(i) * product.words;
        float sums[COUNT]{};
#pragma unroll 1
        for (int pass = 0; pass < input.passes; ++pass) {
          add_pass(pass, row, runs, row_scale, by_scale, sums);
        }
        at_once.write(sums, product.result(pair, piece));
      }
    });
  }

  __device__ void add_pass(int pass, const uint4* (&row)[COUNT], const char* by,
                           const float* row_scale, const float* by_scale,
                           float (&sums)[COUNT]) const {
    const int word = pass * 32 + lane();
    const bool exists = word < product.words;
    uint4 a[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) a[i] = exists ? row[i][word] : uint4{};
    products_fence();
    const uint64_t runs = runs_descriptor(by + pass * PASS_BYTES);
    // Tensor cores keep too few bits of a long sum, so no product adds to another.
    float d[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const uint4 &low = a[i], &high = a[i + 1];
      product_e4m3(d[i], {low.x, high.x, low.y, high.y}, runs, 0);
      product_e4m3(d[i + 1], {low.z, high.z, low.w, high.w}, advance(runs, PASS_BYTES / 2), 0);
    }
    products_commit();
    const int group = min(input.scale_of(2 * word), input.scales - 1);
    const float factor = by_scale[group];
    const Diagonal diagonal;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      products_wait<0>(d[i]);
      products_wait<0>(d[i + 1]);
      const float2 scale = *reinterpret_cast<const float2*>(row_scale + group * COUNT + i);
      const float low = diagonal.low(d[i]) + diagonal.low(d[i + 1]);
      const float high = diagonal.high(d[i]) + diagonal.high(d[i + 1]);
      sums[i] = fmaf(low, scale.x * factor, sums[i]);
      sums[i + 1] = fmaf(high, scale.y * factor, sums[i + 1]);
    }
  }
};

}  // namespace vllm_cuda::few_token_experts
