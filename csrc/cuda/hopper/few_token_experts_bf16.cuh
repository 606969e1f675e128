// SPDX-License-Identifier: Apache-2.0
// How pieces of bf16 weights are multiplied.
#pragma once

#include "hopper/few_token_experts_product.cuh"

namespace vllm_cuda::few_token_experts {

// What the consumers of a CTA multiply by, in shared memory: [rows, words].
struct Bf16Input {
  InputRows rows;
  int bytes;

  template <typename P>
  explicit Bf16Input(const P& product)
      : rows(product.input), bytes(16 * rows.count * rows.words) {}

  __device__ uint4* row(char* memory, int index) const {
    return reinterpret_cast<uint4*>(memory) + index * rows.words;
  }
  // All threads of the CTA do, and wait for each other.
  __device__ void prepare(char*) const {}
  // All threads do, then wait for each other.
  struct Early {};
  __device__ Early begin(char* memory) const {
    copy(memory, THREADS);
    return {};
  }
  // All consumers do.
  __device__ void finish(char*, const Early&) const {}
  __device__ void load(char* memory) const {
    copy(memory, 32 * CONSUMERS);
    consumers_sync<32 * CONSUMERS>();
  }
  __device__ void copy(char* memory, int threads) const {
    const int all = rows.count * rows.words;
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += threads) {
      const int row = i / rows.words;
      reinterpret_cast<uint4*>(memory)[i] = rows.load(row, i - row * rows.words);
    }
  }
};

// A warp has two rows of the weights at a time. Its lanes read runs of them one after another, four
// lanes' being a row of a product of tensor cores: such a product is of eight runs of a row with
// the same ones of x, and the sums that count are on its diagonal. Its other eight rows are the
// other row.
template <typename P>
struct Bf16Operand {
  using Product = P;
  using Input = Bf16Input;
  static constexpr bool GATED = P::GATED;
  static constexpr int AT_ONCE = GATED ? 4 : 2;  // words of each lane and row
  static constexpr int COUNT = Rows<GATED>::COUNT;

  P product;
  Input input;

  explicit Bf16Operand(const P& product_) : product(product_), input(product_) {}
  int64_t shared_bytes() const { return input.bytes; }

  // A warp does, before it multiplies a piece.
  __device__ void request(char*, const Hits&, const Piece&) const {}

  // A team does.
  __device__ void multiply(char* memory, const uint4* weight, const Hits& hits,
                           const Piece& piece) const {
    constexpr int RESULTS = Rows<GATED>::RESULTS;
    const int words = product.words, rows = product.rows_of(piece), lane = threadIdx.x % 32;
    hits.for_pairs(piece.hit, [&](int pair) {
      const uint4* const by = input.row(memory, product.input_of(hits, pair)) + lane;
#pragma unroll 1
      for (int first = threadIdx.x / 32 % TEAM * RESULTS; first < rows; first += TEAM * RESULTS) {
        const Rows<GATED> at_once{first, rows};
        float sums[COUNT];
        multiply_rows(weight + lane, at_once, by, sums);
        at_once.write(sums, product.result(pair, piece));
      }
    });
  }

  __device__ void multiply_rows(const uint4* weight, const Rows<GATED>& at_once, const uint4* by,
                                float (&sums)[COUNT]) const {
    const uint4* row[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) row[i] = weight + at_once.of(i) * product.words;
    float d[COUNT][4]{};
    int word = 0;
#pragma unroll 1
    for (; word + 32 * AT_ONCE <= product.words; word += 32 * AT_ONCE) {
      add_words<AT_ONCE>(row, by, word, d);
    }
#pragma unroll 1
    for (; word < product.words; word += 32) add_words<1>(row, by, word, d);
    const Diagonal diagonal;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      sums[i] = diagonal.low(d[i]) + diagonal.low(d[i + 1]);
      sums[i + 1] = diagonal.high(d[i]) + diagonal.high(d[i + 1]);
    }
  }

  // Of one word the last may not exist.
  template <int WORDS>
  __device__ void add_words(const uint4* (&row)[COUNT], const uint4* by, int word,
                            float (&d)[COUNT][4]) const {
    const bool exists = WORDS > 1 || word + int(threadIdx.x % 32) < product.words;
    uint4 a[COUNT][WORDS], b[WORDS];
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) a[i][j] = exists ? row[i][word + 32 * j] : uint4{};
      b[j] = exists ? by[word + 32 * j] : uint4{};
    }
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2) {
        const uint4 &low = a[i][j], &high = a[i + 1][j];
        mma<__nv_bfloat16>(d[i], low.x, high.x, low.y, high.y, b[j].x, b[j].y);
        mma<__nv_bfloat16>(d[i + 1], low.z, high.z, low.w, high.w, b[j].z, b[j].w);
      }
    }
  }
};

}  // namespace vllm_cuda::few_token_experts
