// SPDX-License-Identifier: Apache-2.0
// The operands of a chunk's products in Kimi delta attention, which has a decay per key channel.
//
// A pair of warps makes those of 16 tokens, two channels per lane, all tokens of a channel in one
// thread.
// exp(G_i - G_j) is shared out between both operands at a reference between the two tokens, so that
// neither factor exceeds one: for tokens of different sixteens the start of the later one.
#pragma once

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"
#include "kda_factors.h"

namespace vllm_cuda {

namespace kda_factors {

using chunk_factors::CHUNK, chunk_factors::DIM;

constexpr int SIXTEEN = 16, SIXTEENS = CHUNK / SIXTEEN;
constexpr int SIXTEEN_BYTES = SIXTEEN * 2 * DIM;
constexpr int THREADS = 2 * 32 * SIXTEENS;
// What tokens may decay by on either side of the reference in the middle of sixteen (base 2).
constexpr float STRONGEST = -100.f;

struct Shared {
  // `in`: left operands, by token; then the inverse's parts.
  chunk_factors::Shared<1> base;
  // Right operands: keys of sixteen j as seen from a later sixteen i at `below_index(i, j)`, and as
  // seen from the middle of their own.
  alignas(128) char earlier[SIXTEENS * (SIXTEENS - 1) / 2][SIXTEEN_BYTES];
  alignas(128) char own[SIXTEENS][SIXTEEN_BYTES];
  float totals[SIXTEENS][DIM];  // base-2 log decays of sixteen tokens
};

// A warp's sixteen tokens and half: of the channels; of the products, those of keys or of queries.
struct Role {
  const int sixteen = threadIdx.x / 64, half = threadIdx.x / 32 % 2, lane = threadIdx.x % 32;
  __device__ int channel() const { return DIM / 2 * half + 2 * lane; }
};
// Of the two warps of a sixteen.
__device__ inline void pair_sync() {
  asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory");
}

struct Work {
  int64_t start, place;  // first token; chunk * heads + head
  int length, head;
};

// Grid (heads, chunks).
__device__ inline Work find_work(const KdaFactorsArgs& args) {
  const int chunk = blockIdx.y, seq = args.chunks[2 * chunk];
  const int start = args.starts[seq] + args.chunks[2 * chunk + 1] * CHUNK;
  return {start, int64_t{chunk} * args.heads + blockIdx.x, min(args.starts[seq + 1] - start, CHUNK),
          static_cast<int>(blockIdx.x)};
}

// A lane's channels of a token.
struct Two {
  float x, y;
  __device__ Two operator*(const Two& by) const { return {x * by.x, y * by.y}; }
  __device__ Two operator*(float by) const { return {x * by, y * by}; }
  __device__ Two operator+(const Two& by) const { return {x + by.x, y + by.y}; }
  __device__ Two operator-(const Two& by) const { return {x - by.x, y - by.y}; }
  __device__ float sum() const { return x + y; }
};

__device__ inline Two widen(uint32_t x) { return {low_half(x), high_half(x)}; }
__device__ inline Two exp2_of(const Two& x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }
__device__ inline Two load_two(const float* at) {
  const float2 x = *reinterpret_cast<const float2*>(at);
  return {x.x, x.y};
}
__device__ inline void store_two(float* at, const Two& x) {
  *reinterpret_cast<float2*>(at) = make_float2(x.x, x.y);
}

// A lane's channels of its sixteen tokens; zero past the sequence's end.
__device__ inline void load_tokens(uint32_t (&x)[SIXTEEN], const void* from, int64_t stride,
                                   const Work& work, const Role& role) {
  const int first = SIXTEEN * role.sixteen;
  const auto* row = static_cast<const __nv_bfloat16*>(from) + (work.start + first) * stride +
                    work.head * DIM + role.channel();
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t, row += stride) {
    x[t] = first + t < work.length ? __ldg(reinterpret_cast<const uint32_t*>(row)) : 0;
  }
}

// Sums of 2 N values over the lanes, value i to the lanes with i in their last bits.
template <int N>
__device__ inline float sum_to_lanes(const float (&x)[2 * N]) {
  const bool upper = threadIdx.x & N;
  float sums[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float low = x[i], high = x[i + N];
    sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, N);
  }
  if constexpr (N > 1) {
    return sum_to_lanes<N / 2>(sums);
  } else {
    return sums[0];
  }
}
__device__ inline float sum_of_squares(const uint32_t (&x)[SIXTEEN]) {
  float squares[SIXTEEN];
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    const Two value = widen(x[t]);
    squares[t] = (value * value).sum();
  }
  const float sum = sum_to_lanes<SIXTEEN / 2>(squares);
  return sum + __shfl_xor_sync(~0u, sum, SIXTEEN);
}

__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(1 + exp(x)), with relative accuracy where it is tiny: slow decays live there.
__device__ inline float softplus2(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const float e = exp2_fast(-LOG2_E * fabsf(x));
  const float series = LOG2_E * e * (1.f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
  return fmaf(LOG2_E, fmaxf(x, 0.f), e < 0.03125f ? series : log2_fast(1.f + e));
}

// Writes a lane's channels of a token to rows of 256 swizzled bytes.
__device__ inline void put(char* rows, int token, const Role& role, const Two& x) {
  const int unit = (8 * role.half + role.lane / 4) ^ token % 8;
  *reinterpret_cast<uint32_t*>(rows + token * 256 + (unit << 4) + role.lane % 4 * 4) =
      pack(x.x, x.y);
}

// A lane's channels of its sixteen tokens.
struct Tokens {
  uint32_t k[SIXTEEN], q[SIXTEEN];
  Two G[SIXTEEN];  // running sums of the base-2 log decays
  float scales;    // of k in lanes 0 to 15, of q in 16 to 31

  // Both warps of the sixteen meet here.
  __device__ void load(const KdaFactorsArgs& args, const Work& work, const Role& role, Shared& s) {
    uint32_t a[SIXTEEN];
    load_tokens(a, args.a, args.a_stride, work, role);
    load_tokens(k, args.k, args.k_stride, work, role);
    load_tokens(q, args.q, args.q_stride, work, role);
    const float rate = -expf(args.A_log[work.head]);
    const Two bias = load_two(args.dt_bias + work.head * DIM + role.channel());
    Two sum{};
#pragma unroll
    for (int t = 0; t < SIXTEEN; ++t) {
      const Two x = widen(a[t]) + bias;
      if (SIXTEEN * role.sixteen + t < work.length) {
        sum.x += fmaxf(rate * softplus2(x.x), -160.f);
        sum.y += fmaxf(rate * softplus2(x.y), -160.f);
      }
      G[t] = sum;
    }
    // Of half of each key's channels, then each query's.
    auto& shared = *reinterpret_cast<float(*)[2][2 * SIXTEEN]>(s.own[role.sixteen]);
    const float of_k = sum_of_squares(k), of_q = sum_of_squares(q);
    shared[role.half][role.lane] = role.lane < SIXTEEN ? of_k : of_q;
    pair_sync();
    scales = rsqrtf(shared[0][role.lane] + shared[1][role.lane] + 1e-6f) *
             (role.lane < SIXTEEN ? 1.f : args.scale);
  }
  // Whether decays of these tokens need to be taken pair by pair. Both warps meet here.
  __device__ bool strong(const Role& role) const {
    const Two middle = G[SIXTEEN / 2 - 1], rest = G[SIXTEEN - 1] - middle;
    const float least = fminf(fminf(middle.x, middle.y), fminf(rest.x, rest.y));
    int any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\n"
        "barrier.cta.red.or.pred out, %2, 64, in;\nselp.b32 %0, 1, 0, out;\n}"
        : "=r"(any)
        : "r"(static_cast<int>(least < STRONGEST)), "r"(1 + role.sixteen)
        : "memory");
    return any != 0;
  }
  __device__ Two key(int t) const { return widen(k[t]) * __shfl_sync(~0u, scales, t); }
  __device__ Two query(int t) const {
    return widen(q[t]) * __shfl_sync(~0u, scales, SIXTEEN + t);
  }
};

__device__ inline void publish_beta(const KdaFactorsArgs& args, const Work& work, Shared& s) {
  const int t = threadIdx.x;
  if (t >= CHUNK) return;
  const auto* b = static_cast<const __nv_bfloat16*>(args.b) + work.head;
  const float x = t < work.length ? __bfloat162float(b[(work.start + t) * args.b_stride]) : 0.f;
  s.base.beta[0][t] = t < work.length ? __fdividef(1.f, 1.f + __expf(-x)) : 0.f;
}

// Operands of the products within sixteen tokens, with their middle as the reference.
__device__ inline void make_own_operands(const Tokens& tokens, const Role& role, Shared& s) {
  char* const k_rows = s.base.in.k + role.sixteen * SIXTEEN_BYTES;
  char* const q_rows = s.base.in.q + role.sixteen * SIXTEEN_BYTES;
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    const Two key = tokens.key(t), distance = tokens.G[t] - tokens.G[SIXTEEN / 2 - 1];
    const Two factor = exp2_of(distance);
    put(k_rows, t, role, key * factor);
    put(q_rows, t, role, tokens.query(t) * factor);
    put(s.own[role.sixteen], t, role, key * exp2_of(distance * -1.f));
  }
}

// Operands of the products between sixteens, and what the scan reads.
__device__ inline void make_operands(const KdaFactorsArgs& args, const Work& work,
                                     const Tokens& tokens, const Role& role, Shared& s) {
  Two before{}, after{}, skipped[2] = {};
#pragma unroll
  for (int i = 0; i < SIXTEENS; ++i) {
    const Two total = load_two(&s.totals[i][role.channel()]);
    if (i < role.sixteen) before = before + total;
    if (i > role.sixteen) after = after + total;
    if (i == role.sixteen + 1) skipped[0] = total;
    if (i == role.sixteen + 2) skipped[1] = skipped[0] + total;
  }
  if (role.sixteen == 0) {
    store_two(args.decays + work.place * DIM + role.channel(),
              exp2_of(tokens.G[SIXTEEN - 1] + after));
  }
  before = exp2_of(before), after = exp2_of(after);
  skipped[0] = exp2_of(skipped[0]), skipped[1] = exp2_of(skipped[1]);
  char* const k_rows = s.base.in.k + role.sixteen * SIXTEEN_BYTES;
  char* const q_rows = s.base.in.q + role.sixteen * SIXTEEN_BYTES;
  char* const later = s.earlier[0];
  const auto seen_from = [&](int distance) {
    return later + chunk_factors::below_index(role.sixteen + distance, role.sixteen) * SIXTEEN_BYTES;
  };
  int64_t at = (work.place * CHUNK + SIXTEEN * role.sixteen) * DIM + role.channel();
  const auto write = [&at](void* to, const Two& x) {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(to) + at) = pack(x.x, x.y);
  };
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t, at += DIM) {
    const Two forward = exp2_of(tokens.G[t]), key = tokens.key(t);
    const Two k = key * forward, q = tokens.query(t) * forward;
    put(k_rows, t, role, k);
    put(q_rows, t, role, q);
    write(args.keys, k * before);
    write(args.queries, q * before);
    const Two end = key * exp2_of(tokens.G[SIXTEEN - 1] - tokens.G[t]);
    write(args.ends, end * after);
    if (role.sixteen < 3) put(seen_from(1), t, role, end);
    if (role.sixteen < 2) put(seen_from(2), t, role, end * skipped[0]);
    if (role.sixteen < 1) put(seen_from(3), t, role, end * skipped[1]);
  }
}

}  // namespace kda_factors

}  // namespace vllm_cuda
