// SPDX-License-Identifier: Apache-2.0
// The operands of a chunk's products in Kimi delta attention, which has a decay per key channel.
//
// A warp makes those of 16 tokens, two channels per lane and half, all tokens of a channel in one
// thread. Operands take the place of the inputs they are made of, word by word. exp(G_i - G_j) is
// shared out between both operands at the chunk's start, so right operands grow, up to `STRONGEST`.
#pragma once

#include "hopper/gdn_tiles.cuh"
#include "hopper/kda_prefill_memory.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// What a chunk may decay by for its start to be a reference (base 2).
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
  __device__ Two operator*(const Two& by) const { return {x * by.x, y * by.y}; }
  __device__ Two operator*(float by) const { return {x * by, y * by}; }
  __device__ Two operator-(const Two& by) const { return {x - by.x, y - by.y}; }
  __device__ Two operator-() const { return {-x, -y}; }
  __device__ float sum() const { return x + y; }
};

__device__ inline Two widen(uint32_t x) { return {low_half(x), high_half(x)}; }
__device__ inline Two exp2_of(const Two& x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }

// A lane's words of four tokens and half the channels, its two of each token in every tile.
struct Words {
  uint32_t at[4];  // queries
  __device__ Words(const Half& half, int first, int lane) {
    const uint32_t rows = shared_address(&half) + first * ROW_BYTES + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = rows + ((lane / 4 ^ first % 8 ^ i) << 4) + i * ROW_BYTES;
  }
  // TILE: where it lies in a half.
  template <size_t TILE>
  __device__ uint32_t load_packed(int i) const {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(x)
                 : "r"(at[i] + static_cast<uint32_t>(TILE))
                 : "memory");
    return x;
  }
  template <size_t TILE>
  __device__ Two load(int i) const {
    return widen(load_packed<TILE>(i));
  }
  template <size_t TILE>
  __device__ void store(int i, const Two& x) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at[i] + static_cast<uint32_t>(TILE)),
                 "r"(pack(x.x, x.y))
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
  template <int GROUPS>
  __device__ Gates(const Shared<GROUPS>& shared, int half, int lane)
      : rate(shared.rate),
        bias{shared.bias[32 * half + lane].x, shared.bias[32 * half + lane].y},
        largest(shared.largest[32 * half + lane]) {}
  // Inputs of both channels, times log2(e).
  __device__ Two of_input(uint32_t a) const {
    asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(largest));
    const Two x = widen(a);
    return {fmaf(x.x, LOG2_E, bias.x), fmaf(x.y, LOG2_E, bias.y)};
  }
};

// Two channels a thread.
template <int GROUPS>
__device__ inline void publish_gates(const KdaPrefillArgs& args, int head, int pair,
                                     Shared<GROUPS>& shared) {
  const float rate = -expf(args.A_log[head]), most = __fdividef(-160.f, rate * LOG2_E);
  const float2 of = reinterpret_cast<const float2*>(args.dt_bias)[head * DIM / 2 + pair];
  shared.bias[pair] = {of.x * LOG2_E, of.y * LOG2_E};
  shared.largest[pair] = pack(most - of.x, most - of.y);
  shared.rate = rate;
}

// Base-2 log decays but for the rate: log2(1 + 2^y), N at a time so that none waits for itself.
template <int N>
__device__ inline void softplus(float (&y)[N]) {
  // log2(1 + e) / e to 8e-6 of it: slow decays live where e is tiny.
  constexpr float SERIES[] = {0.14603270590305328f, -0.30303603410720825f, 0.46917399764060974f,
                              -0.7204261422157288f, 1.4426828622817993f};
  float e[N], series[N];
#pragma unroll
  for (int i = 0; i < N; ++i) e[i] = exp2_fast(-fabsf(y[i]));
#pragma unroll
  for (int i = 0; i < N; ++i) series[i] = fmaf(-0.03443583846092224f, e[i], SERIES[0]);
#pragma unroll
  for (int term = 1; term < 5; ++term) {
#pragma unroll
    for (int i = 0; i < N; ++i) series[i] = fmaf(series[i], e[i], SERIES[term]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = fmaf(series[i], e[i], fmaxf(y[i], 0.f));
}

// A lane's base-2 log decays of half the channels, summed up; returns those of the whole chunk.
// Loops over four tokens at a time, here and below: eight warps, each somewhere else, and the scan
// share an instruction cache that holds 2,000 instructions.
__device__ inline Two sum_decays(const Gates& gates, const Half& half, int lane,
                                 LogDecays& decays) {
  Two sum{};
#pragma unroll 1
  for (int first = 0; first < CHUNK; first += 4) {
    const Words words(half, first, lane);
    float y[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two x = gates.of_input(words.load_packed<GROWN>(i));
      y[2 * i] = x.x;
      y[2 * i + 1] = x.y;
    }
    softplus(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum.x = fmaf(gates.rate, y[2 * i], sum.x);
      sum.y = fmaf(gates.rate, y[2 * i + 1], sum.y);
      decays.at[first + i][lane] = {sum.x, sum.y};
    }
  }
  return sum;
}

// Operands of half the channels, whose decays are `total` in all. STRONG ones are seen from the
// chunk's end by what gets them.
__device__ inline void make_operands(const LogDecays& decays, const Two& total, bool strong,
                                     const Half& half, int lane) {
  const Two seen_from = strong ? total : Two{};
#pragma unroll 1
  for (int first = 0; first < CHUNK; first += 4) {
    const Words words(half, first, lane);
    Two k[4], q[4], decay[4], grow[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 sum = decays.at[first + i][lane];
      k[i] = words.load<KEYS>(i);
      q[i] = words.load<QUERIES>(i);
      decay[i] = exp2_of({sum.x, sum.y});
      grow[i] = exp2_of(seen_from - Two{sum.x, sum.y});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words.store<KEYS>(i, k[i] * decay[i]);
      words.store<QUERIES>(i, q[i] * decay[i]);
      words.store<GROWN>(i, k[i] * grow[i]);
    }
  }
}

// Adds the products of half the channels pair by pair to what was found, [key or query, i, j], for
// decays too strong for a reference; before operands are made. It is rarely needed: little code.
__device__ inline void multiply_pairs(const Gates& gates, const Half& half, int lane,
                                      float* found) {
  const auto word = [lane](const char* tile, int t) {
    return *reinterpret_cast<const uint32_t*>(tile + t * ROW_BYTES + ((lane / 4 ^ t % 8) << 4) +
                                              lane % 4 * 4);
  };
#pragma unroll 1
  for (int j = 0; j < CHUNK; ++j) {
    Two key{};  // of token j as token i sees it
#pragma unroll 1
    for (int i = j; i < CHUNK; ++i) {
      const Two own = widen(word(half.keys, i)), query = widen(word(half.queries, i));
      const Two x = gates.of_input(word(half.grown, i));
      float y[2] = {x.x, x.y};
      softplus(y);
      key = i == j ? own : key * exp2_of(Two{y[0], y[1]} * gates.rate);
      float sums[2] = {(key * own).sum(), (key * query).sum()};
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
        sums[1] += __shfl_xor_sync(~0u, sums[1], distance);
      }
      if (lane == 0) {
        found[i * CHUNK + j] += sums[0];
        found[(CHUNK + i) * CHUNK + j] += sums[1];
      }
    }
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
