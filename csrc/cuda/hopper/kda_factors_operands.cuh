// SPDX-License-Identifier: Apache-2.0
// The operands of a chunk's products in Kimi delta attention, which has a decay per key channel.
//
// A warp makes those of 16 tokens, four channels per lane, all tokens of a channel in one thread.
// exp(G_i - G_j) is shared out between both operands at a reference between the two tokens, so that
// neither factor exceeds one: for tokens of different sixteens the start of the later one.
#pragma once

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"
#include "kda_factors.h"

namespace vllm_cuda {

namespace kda_factors {

using chunk_factors::CHUNK, chunk_factors::DIM, chunk_factors::THREADS;

constexpr int SIXTEEN = 16, SIXTEENS = CHUNK / SIXTEEN;
constexpr int SIXTEEN_BYTES = SIXTEEN * 2 * DIM;
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

struct Four {
  float v[4];
  __device__ Four operator*(const Four& by) const {
    return {{v[0] * by.v[0], v[1] * by.v[1], v[2] * by.v[2], v[3] * by.v[3]}};
  }
  __device__ Four operator*(float by) const {
    return {{v[0] * by, v[1] * by, v[2] * by, v[3] * by}};
  }
  __device__ Four operator+(const Four& by) const {
    return {{v[0] + by.v[0], v[1] + by.v[1], v[2] + by.v[2], v[3] + by.v[3]}};
  }
  __device__ Four operator-(const Four& by) const {
    return {{v[0] - by.v[0], v[1] - by.v[1], v[2] - by.v[2], v[3] - by.v[3]}};
  }
  __device__ float sum() const { return (v[0] + v[1]) + (v[2] + v[3]); }
  __device__ float least() const { return fminf(fminf(v[0], v[1]), fminf(v[2], v[3])); }
};

__device__ inline Four widen(uint2 x) {
  return {{low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y)}};
}
__device__ inline uint2 narrow(const Four& x) {
  return {pack(x.v[0], x.v[1]), pack(x.v[2], x.v[3])};
}
__device__ inline Four exp2_of(const Four& x) {
  return {{exp2_fast(x.v[0]), exp2_fast(x.v[1]), exp2_fast(x.v[2]), exp2_fast(x.v[3])}};
}
__device__ inline Four load_four(const float* at) {
  const float4 x = *reinterpret_cast<const float4*>(at);
  return {{x.x, x.y, x.z, x.w}};
}

// A lane's four channels of the warp's tokens; zero past the sequence's end.
__device__ inline void load_tokens(uint2 (&x)[SIXTEEN], const void* from, int64_t stride,
                                   const Work& work) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* row = static_cast<const __nv_bfloat16*>(from) +
                    (work.start + SIXTEEN * warp) * stride + work.head * DIM + 4 * lane;
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t, row += stride) {
    x[t] = SIXTEEN * warp + t < work.length ? __ldg(reinterpret_cast<const uint2*>(row)) : uint2{};
  }
}

// Sums of 32 values over the lanes, value i to lane i.
__device__ inline float sum_to_lanes(float (&x)[32]) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? x[i] : x[i + half];
      x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(~0u, sent, half);
    }
  }
  return x[0];
}

// log2(1 + exp(x)), with relative accuracy where it is tiny: slow decays live there.
__device__ inline float softplus2(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const float e = exp2_fast(-LOG2_E * fabsf(x));
  const float series = LOG2_E * e * (1.f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
  return fmaf(LOG2_E, fmaxf(x, 0.f), e < 0.03125f ? series : __log2f(1.f + e));
}

// Where a lane's four channels of a token lie among rows of 256 swizzled bytes.
__device__ inline char* channels_of(char* rows, int token) {
  const int lane = threadIdx.x % 32;
  return rows + token * 256 + ((lane / 2 ^ token % 8) << 4) + lane % 2 * 8;
}
__device__ inline void put(char* rows, int token, const Four& x) {
  *reinterpret_cast<uint2*>(channels_of(rows, token)) = narrow(x);
}

// The warp's tokens.
struct Tokens {
  uint2 k[SIXTEEN], q[SIXTEEN];
  Four G[SIXTEEN];  // running sums of the base-2 log decays
  float scales;     // of k in lanes 0 to 15, of q in 16 to 31

  __device__ void load(const KdaFactorsArgs& args, const Work& work) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint2 a[SIXTEEN];
    load_tokens(a, args.a, args.a_stride, work);
    load_tokens(k, args.k, args.k_stride, work);
    load_tokens(q, args.q, args.q_stride, work);
    const float rate = -expf(args.A_log[work.head]);
    const Four bias = load_four(args.dt_bias + work.head * DIM + 4 * lane);
    Four sum{};
#pragma unroll
    for (int t = 0; t < SIXTEEN; ++t) {
      const Four x = widen(a[t]) + bias;
      if (SIXTEEN * warp + t < work.length) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum.v[c] += fmaxf(rate * softplus2(x.v[c]), -160.f);
      }
      G[t] = sum;
    }
    float squares[32];
#pragma unroll
    for (int t = 0; t < SIXTEEN; ++t) {
      const Four of_k = widen(k[t]), of_q = widen(q[t]);
      squares[t] = (of_k * of_k).sum();
      squares[SIXTEEN + t] = (of_q * of_q).sum();
    }
    scales = rsqrtf(sum_to_lanes(squares) + 1e-6f) * (lane < SIXTEEN ? 1.f : args.scale);
  }
  __device__ void publish(Shared& s) const {
    const float(&sum)[4] = G[SIXTEEN - 1].v;
    *reinterpret_cast<float4*>(&s.totals[threadIdx.x / 32][4 * (threadIdx.x % 32)]) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  // Whether decays of the warp's tokens need to be taken pair by pair.
  __device__ bool strong() const {
    const Four middle = G[SIXTEEN / 2 - 1];
    const float least = fminf(middle.least(), (G[SIXTEEN - 1] - middle).least());
    return __any_sync(~0u, least < STRONGEST);
  }
  __device__ Four key(int t) const { return widen(k[t]) * __shfl_sync(~0u, scales, t); }
  __device__ Four query(int t) const {
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

// A lane's four channels of a token of the results.
__device__ inline void write_token(void* to, const Work& work, int token, const Four& x) {
  auto* row = static_cast<__nv_bfloat16*>(to) + (work.place * CHUNK + token) * DIM;
  *reinterpret_cast<uint2*>(row + 4 * (threadIdx.x % 32)) = narrow(x);
}

// Operands of the products between sixteens, and what the scan reads.
__device__ inline void make_operands(const KdaFactorsArgs& args, const Work& work,
                                     const Tokens& tokens, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Four before{}, after{}, skipped[2] = {};
#pragma unroll
  for (int i = 0; i < SIXTEENS; ++i) {
    const Four total = load_four(&s.totals[i][4 * lane]);
    if (i < warp) before = before + total;
    if (i > warp) after = after + total;
    if (i == warp + 1) skipped[0] = total;
    if (i == warp + 2) skipped[1] = skipped[0] + total;
  }
  if (warp == 0) {
    const Four whole = exp2_of(tokens.G[SIXTEEN - 1] + after);
    *reinterpret_cast<float4*>(args.decays + work.place * DIM + 4 * lane) =
        make_float4(whole.v[0], whole.v[1], whole.v[2], whole.v[3]);
  }
  before = exp2_of(before), after = exp2_of(after);
  skipped[0] = exp2_of(skipped[0]), skipped[1] = exp2_of(skipped[1]);
  char* const k_rows = s.base.in.k + warp * SIXTEEN_BYTES;
  char* const q_rows = s.base.in.q + warp * SIXTEEN_BYTES;
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    const int token = SIXTEEN * warp + t;
    const Four forward = exp2_of(tokens.G[t]), key = tokens.key(t);
    const Four k = key * forward, q = tokens.query(t) * forward;
    put(k_rows, t, k);
    put(q_rows, t, q);
    write_token(args.keys, work, token, k * before);
    write_token(args.queries, work, token, q * before);
    const Four end = key * exp2_of(tokens.G[SIXTEEN - 1] - tokens.G[t]);
    write_token(args.ends, work, token, end * after);
    if (warp < 3) put(s.earlier[chunk_factors::below_index(warp + 1, warp)], t, end);
    if (warp < 2) put(s.earlier[chunk_factors::below_index(warp + 2, warp)], t, end * skipped[0]);
    if (warp < 1) put(s.earlier[chunk_factors::below_index(warp + 3, warp)], t, end * skipped[1]);
  }
}

// Operands of the products within sixteen tokens, with their middle as the reference.
__device__ inline void make_own_operands(const Tokens& tokens, Shared& s) {
  const int warp = threadIdx.x / 32;
  char* const k_rows = s.base.in.k + warp * SIXTEEN_BYTES;
  char* const q_rows = s.base.in.q + warp * SIXTEEN_BYTES;
#pragma unroll
  for (int t = 0; t < SIXTEEN; ++t) {
    const Four key = tokens.key(t), distance = tokens.G[t] - tokens.G[SIXTEEN / 2 - 1];
    const Four factor = exp2_of(distance);
    put(k_rows, t, key * factor);
    put(q_rows, t, tokens.query(t) * factor);
    put(s.own[warp], t, key * exp2_of(distance * -1.f));
  }
}

}  // namespace kda_factors

}  // namespace vllm_cuda
