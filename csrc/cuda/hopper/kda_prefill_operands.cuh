// SPDX-License-Identifier: Apache-2.0
// The operands of a chunk's products in Kimi delta attention, which has a decay per key channel.
//
// A warp makes those of 16 tokens, half the channels at a time, all tokens of a channel in one
// thread. Operands take the place of the inputs they are made of, word by word. exp(G_i - G_j) is
// shared out between both operands at the chunk's middle, so one of them grows, up to `STRONGEST`.
#pragma once

#include "hopper/gdn_tiles.cuh"
#include "hopper/kda_prefill_memory.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// What a part may decay by for the chunk's middle to be a reference (base 2).
constexpr float STRONGEST = 100.f;
constexpr float LOG2_E = 1.4426950408889634f;

// What follows from a lane's number is cheaper to make again than to keep: the compiler does not
// know that this is always the same.
__device__ inline int own_lane() {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  return lane;
}

// A lane's channels of a token.
struct Two {
  float x, y;
  __device__ Two operator+(const Two& by) const { return {x + by.x, y + by.y}; }
  __device__ Two operator-(const Two& by) const { return {x - by.x, y - by.y}; }
  __device__ Two operator*(const Two& by) const { return {x * by.x, y * by.y}; }
  __device__ Two operator*(float by) const { return {x * by, y * by}; }
  __device__ float sum() const { return x + y; }
};

__device__ inline Two widen(uint32_t x) { return {low_half(x), high_half(x)}; }
__device__ inline Two exp2_of(const Two& x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }
__device__ inline Two whole(const Two& x) { return {rintf(x.x), rintf(x.y)}; }
// By value: a reference to either would be one to local memory.
__device__ inline Two choose(bool first, Two x, Two y) {
  return {first ? x.x : y.x, first ? x.y : y.y};
}

// A lane's words of a part, its two channels of each token in every tile.
struct Words {
  uint32_t at[8];  // queries of the first eight tokens
  __device__ Words(const Half& half, int part, int lane) {
    const uint32_t rows = shared_address(&half) + part * PART_BYTES + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = rows + ((lane / 4 ^ i) << 4) + i * ROW_BYTES;
  }
  // TILE: where it lies in a half.
  template <size_t TILE>
  __device__ uint32_t load(int i) const {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(x)
                 : "r"(at[i % 8] + static_cast<uint32_t>(TILE + i / 8 * 8 * ROW_BYTES))
                 : "memory");
    return x;
  }
  template <size_t TILE>
  __device__ void store(int i, uint32_t x) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(
                     at[i % 8] + static_cast<uint32_t>(TILE + i / 8 * 8 * ROW_BYTES)),
                 "r"(x)
                 : "memory");
  }
};
constexpr size_t KEYS = offsetof(Half, keys), QUERIES = offsetof(Half, queries),
                 GROWN = offsetof(Half, grown);

// What the decays of a lane's channels in half the head are made of.
struct Gates {
  float rate;
  Two bias;
  uint32_t largest;
  __device__ Gates(const HeadGates& head, int half, int lane)
      : rate(head.rate),
        bias{head.bias[32 * half + lane].x, head.bias[32 * half + lane].y},
        largest(head.largest[32 * half + lane]) {}
  // Inputs of both channels, times log2(e).
  __device__ Two of_input(uint32_t a) const {
    asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(largest));
    const Two x = widen(a);
    return {fmaf(x.x, LOG2_E, bias.x), fmaf(x.y, LOG2_E, bias.y)};
  }
};

// What a head's gates are made of, two channels a thread.
struct GateInputs {
  float A_log;
  float2 bias;
  __device__ GateInputs(const KdaPrefillArgs& args, int head, int pair)
      : A_log(args.A_log[head]),
        bias(reinterpret_cast<const float2*>(args.dt_bias)[head * DIM / 2 + pair]) {}
  __device__ void publish(int pair, HeadGates& gates) const {
    const float rate = -expf(A_log), most = __fdividef(-160.f, rate * LOG2_E);
    gates.bias[pair] = {bias.x * LOG2_E, bias.y * LOG2_E};
    gates.largest[pair] = pack(most - bias.x, most - bias.y);
    gates.rate = rate;
  }
};

// Base-2 log decays but for the rate: log2(1 + 2^y), N at a time so that none waits for itself.
template <int N>
__device__ inline void softplus(float (&y)[N]) {
  // log2(1 + e) / e to 4e-4 of it, less than bf16 keeps of an input: slow decays live where e is
  // tiny.
  constexpr float SERIES[] = {0.3664808f, -0.7017474f, 1.4421281f};
  float e[N], series[N];
#pragma unroll
  for (int i = 0; i < N; ++i) e[i] = exp2_fast(-fabsf(y[i]));
#pragma unroll
  for (int i = 0; i < N; ++i) series[i] = fmaf(-0.1072545f, e[i], SERIES[0]);
#pragma unroll
  for (int term = 1; term < 3; ++term) {
#pragma unroll
    for (int i = 0; i < N; ++i) series[i] = fmaf(series[i], e[i], SERIES[term]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = fmaf(series[i], e[i], fmaxf(y[i], 0.f));
}

// A lane's base-2 log decays in a part, summed up.
__device__ inline void sum_decays(const Gates& gates, const Words& words, Two (&sums)[PART]) {
  Two sum{};
  uint32_t inputs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) inputs[i] = words.load<GROWN>(i);
#pragma unroll
  for (int first = 0; first < PART; first += 4) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two x = gates.of_input(inputs[first % 8 + i]);
      if (first + i + 8 < PART) inputs[first % 8 + i] = words.load<GROWN>(first + i + 8);
      y[2 * i] = x.x;
      y[2 * i + 1] = x.y;
    }
    softplus(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum.x = fmaf(gates.rate, y[2 * i], sum.x);
      sum.y = fmaf(gates.rate, y[2 * i + 1], sum.y);
      sums[first + i] = sum;
    }
  }
}

__device__ inline uint32_t multiply_pairs_of(uint32_t x, uint32_t y) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}

// Operands of a part that begins at `left` as seen from left operands' reference, and at `right` as
// seen from that of right ones.
__device__ inline void make_operands(const Words& words, const Two (&sums)[PART], const Two& left,
                                     const Two& right) {
#pragma unroll
  for (int first = 0; first < PART; first += 4) {
    uint32_t keys[4], queries[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[i] = words.load<KEYS>(first + i);
      queries[i] = words.load<QUERIES>(first + i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two decay = exp2_of(left + sums[first + i]), grow = exp2_of(right - sums[first + i]);
      const uint32_t by = pack(decay.x, decay.y);
      words.store<GROWN>(first + i, multiply_pairs_of(keys[i], pack(grow.x, grow.y)));
      words.store<KEYS>(first + i, multiply_pairs_of(keys[i], by));
      words.store<QUERIES>(first + i, multiply_pairs_of(queries[i], by));
    }
  }
}

// Adds the products of half the channels pair by pair to what was found, [query or key, i, j], for
// decays too strong for a reference; before operands are made. Every second j from `first` on. It
// is rarely needed: little code.
__device__ inline void multiply_pairs(const Gates& gates, const Half& half, int first, int lane,
                                      float* found) {
  const auto word = [lane](const char* tile, int t) {
    return *reinterpret_cast<const uint32_t*>(tile + t * ROW_BYTES + ((lane / 4 ^ t % 8) << 4) +
                                              lane % 4 * 4);
  };
#pragma unroll 1
  for (int j = first; j < CHUNK; j += 2) {
    Two key{};  // of token j as token i sees it
#pragma unroll 1
    for (int i = j; i < CHUNK; ++i) {
      const Two own = widen(word(half.keys, i)), query = widen(word(half.queries, i));
      const Two x = gates.of_input(word(half.grown, i));
      float y[2] = {x.x, x.y};
      softplus(y);
      key = i == j ? own : key * exp2_of(Two{y[0], y[1]} * gates.rate);
      float sums[2] = {(key * query).sum(), (key * own).sum()};
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
        sums[1] += __shfl_xor_sync(~0u, sums[1], distance);
      }
      if (lane < 2) found[(CHUNK * lane + i) * CHUNK + j] += lane ? sums[1] : sums[0];
    }
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
