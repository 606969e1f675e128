// SPDX-License-Identifier: Apache-2.0
// The recurrence of the decode step on a tile of the states: replay of what is pending, the new
// token.
//
// The order of every sum follows from the head dimensions alone: a row's bits do not depend on the
// grid, the tiles or the other rows.
#pragma once

#include "gdn_decode_memory.cuh"

namespace vllm_cuda::gdn_decode {

// Four adjacent elements of a state as fp32.
template <typename State>
struct Quad;

template <>
struct Quad<float> {
  using Word = float4;
  __device__ static float4 widen(float4 word) { return word; }
  __device__ static float4 narrow(float4 x) { return x; }
  __device__ static float rounded(float x) { return x; }
};

template <>
struct Quad<__nv_bfloat16> {
  using Word = uint2;
  __device__ static float4 widen(uint2 word) { return gdn_decode::widen(word); }
  __device__ static uint2 narrow(float4 x) { return gdn_decode::narrow(x); }
  __device__ static float rounded(float x) { return round_bf16(x); }
};

// Where a tile lies: ROWS rows of dv among the rows of the item's value heads.
struct Tiles {
  int passes, first, stride;  // rows
  __device__ Tiles(int group, int warp, int rows)
      : passes(group * kHeadDim / (kConsumers * rows)), first(warp * rows),
        stride(kConsumers * rows) {}
  __device__ int row(int pass) const { return first + pass * stride; }
};

// Starts fetching ROWS rows of an item's states, the first of which is `row`. One lane does.
template <typename State, int ROWS>
__device__ void fetch_tile(const GdnDecodeArgs& args, int index, int number, int row, char* stage,
                           uint64_t* barrier) {
  if (threadIdx.x % 32 != 0) return;
  constexpr uint32_t bytes = ROWS * kHeadDim * sizeof(State);
  const int first = number * args.heads * kHeadDim + row;
  const State* states = static_cast<const State*>(args.state) + index * args.state_stride;
  arrive_expecting(barrier, bytes);
  bulk_copy(stage, states + first * kHeadDim, bytes, barrier);
}

// A warp's tile: a group of 8 lanes has R rows, a lane of it columns 4 * member + 32 * j.
template <typename State, int R>
struct Tile {
  using Word = typename Quad<State>::Word;
  float S[R][16];

  __device__ void load(const char* stage, int group, int member) {
    const State* rows = reinterpret_cast<const State*>(stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const State* at = rows + (group * R + r) * kHeadDim + 32 * j + 4 * member;
        const float4 x = Quad<State>::widen(*reinterpret_cast<const Word*>(at));
        S[r][4 * j] = x.x, S[r][4 * j + 1] = x.y, S[r][4 * j + 2] = x.z, S[r][4 * j + 3] = x.w;
      }
    }
  }
  __device__ void store(State* rows, int group, int member) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        State* at = rows + (group * R + r) * kHeadDim + 32 * j + 4 * member;
        const float* x = S[r] + 4 * j;
        __stcs(reinterpret_cast<Word*>(at),
               Quad<State>::narrow(make_float4(x[0], x[1], x[2], x[3])));
      }
    }
  }
  __device__ void add(const float (&d)[R], const float (&k)[16]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) S[r][i] = __fmaf_rn(d[r], k[i], S[r][i]);
    }
  }
  __device__ void scale(float decay) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) S[r][i] = __fmul_rn(S[r][i], decay);
    }
  }
  __device__ void round() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) S[r][i] = Quad<State>::rounded(S[r][i]);
    }
  }
};

__device__ inline void load_columns(float (&x)[16], const float* from, int member) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 word = *reinterpret_cast<const float4*>(from + 32 * j + 4 * member);
    x[4 * j] = word.x, x[4 * j + 1] = word.y, x[4 * j + 2] = word.z, x[4 * j + 3] = word.w;
  }
}

template <int R>
__device__ void load_rows(float (&x)[R], const float* from) {
  if constexpr (R == 4) {
    const float4 word = *reinterpret_cast<const float4*>(from);
    x[0] = word.x, x[1] = word.y, x[2] = word.z, x[3] = word.w;
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] = from[r];
  }
}

// Sums of R keys' and R queries' products over the 8 lanes of a group. Lanes 0 to 3 get that of
// key row `member % R`, lanes 4 to 7 that of the query row. The tree is the same for every R. All
// lanes get the sums of `others`, on the way.
template <int R, typename... Others>
__device__ float contract(const float (&keys)[R], const float (&queries)[R], int member,
                          Others&... others) {
  float half[R];
  const bool upper = member & 4;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    half[r] = (upper ? queries[r] : keys[r]) +
              __shfl_xor_sync(~0u, upper ? keys[r] : queries[r], 4);
  }
  ((others += __shfl_xor_sync(~0u, others, 4)), ...);
  if constexpr (R == 4) {
    const bool second = member & 2, odd = member & 1;
    float pair[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      pair[r] = (second ? half[r + 2] : half[r]) +
                __shfl_xor_sync(~0u, second ? half[r] : half[r + 2], 2);
    }
    ((others += __shfl_xor_sync(~0u, others, 2)), ...);
    ((others += __shfl_xor_sync(~0u, others, 1)), ...);
    return (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
  } else {
    static_assert(R == 2);
    const bool odd = member & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) half[r] += __shfl_xor_sync(~0u, half[r], 2);
    ((others += __shfl_xor_sync(~0u, others, 2)), ...);
    ((others += __shfl_xor_sync(~0u, others, 1)), ...);
    return (odd ? half[1] : half[0]) + __shfl_xor_sync(~0u, odd ? half[0] : half[1], 1);
  }
}

// A lane's columns of a token's key and query, and the two's product.
struct Vectors {
  float k[16], q[16], product;

  __device__ void load(const Buffer& from, int member) {
    load_columns(k, from.k, member);
    load_columns(q, from.q, member);
    product = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) product = __fmaf_rn(k[i], q[i], product);
  }
  // The product is that of a lane's columns until then.
  __device__ void add_products() {
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) product += __shfl_xor_sync(~0u, product, mask);
  }
};

template <typename State, int R, bool SEVERAL>
struct Consumer {
  const GdnDecodeArgs& args;
  int group, member;  // of 8 lanes, lane in it

  __device__ void replay(Tile<State, R>& tile, const Buffer& from, int pending, int row) const {
    const float* keys = from.keys;
    const float* errors = from.errors + row + group * R;
    const float* decays = from.decays + row / kHeadDim;
#pragma unroll 2
    for (int i = 0; i < pending; ++i) {
      float k[16], d[R];
      const float decay = *decays;
      load_rows<R>(d, errors);
      load_columns(k, keys, member);
      tile.scale(decay);
      tile.add(d, k);
      tile.round();
      keys += kHeadDim;
      errors += args.heads * kHeadDim;
      decays += args.heads;
    }
  }

  // Where the first slot of the item's row in the ring has the error of a lane's row.
  __device__ float* own_errors(const Header& header, int row) const {
    const int heads = args.items * args.heads;
    const int64_t rows = int64_t(header.row) * args.slots * heads + header.number * args.heads;
    return args.errors + rows * kHeadDim + row + group * R + member % R;
  }

  // Token `t` of the step; `row` is the tile's first of the item, `errors` its own, `with` and
  // `vectors` that token's.
  __device__ void step(Tile<State, R>& tile, const Buffer& with, Vectors& vectors,
                       const Header& header, int row, float* errors, int t) const {
    const int own = row + group * R + member % R;
    const float2 gate = with.gates[row / kHeadDim];
    const float v = with.v[own];
    tile.scale(gate.x);
    float key_sums[R] = {}, query_sums[R] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        key_sums[r] = __fmaf_rn(tile.S[r][i], vectors.k[i], key_sums[r]);
        query_sums[r] = __fmaf_rn(tile.S[r][i], vectors.q[i], query_sums[r]);
      }
    }
    float sum;
    if constexpr (SEVERAL) {
      sum = contract<R>(key_sums, query_sums, member, vectors.product);
    } else {
      sum = contract<R>(key_sums, query_sums, member);
    }
    // The error of row `member % R`, in the lanes that have the keys' sums; then in all.
    float error = __fmul_rn(gate.y, __fsub_rn(v, sum));
    const bool keeps = header.keeps(t), adds = SEVERAL || !keeps;
    float d[R];
    if (adds) {
#pragma unroll
      for (int r = 0; r < R; ++r) d[r] = __shfl_sync(~0u, error, r, 8);
    }
    const float other = __shfl_xor_sync(~0u, error, 4);
    if (member & 4) error = other;
    if (member >= 4 && member < 4 + R) {
      with.out[own] = round_bf16(__fmaf_rn(vectors.product, error, sum));
    }
    if (keeps && member < R) {
      const int slot = header.slot_of_row(args, header.before(t));
      errors[slot * (args.items * args.heads * kHeadDim)] = error;
    }
    if (!adds) return;
    tile.add(d, vectors.k);
    if (!keeps) {
      const int64_t first = int64_t(header.number) * args.heads * kHeadDim + row;
      State* state = static_cast<State*>(args.state) + header.index * args.state_stride;
      tile.store(state + first * kHeadDim, group, member);
    }
    if (SEVERAL) tile.round();
  }

  // All tokens of the step on one tile, from its `pass`. `wait(t)`: until the token's vectors are
  // here, which a single token's are kept for all passes; `done(t)`.
  template <typename Wait, typename Done>
  __device__ void steps(Tile<State, R>& tile, const Buffer& buffer, Vectors& vectors,
                        const Header& header, int row, int pass, Wait wait, Done done) const {
    float* errors = own_errors(header, row);
    const int tokens = SEVERAL ? args.tokens : 1;
    for (int t = 0; t < tokens; ++t) {
      const Buffer with = buffer.of_token(t, args.heads);
      if (pass == 0) wait(t);
      if (SEVERAL || pass == 0) vectors.load(with, member);
      if (!SEVERAL && pass == 0) vectors.add_products();
      step(tile, with, vectors, header, row, errors, t);
      done(t);
    }
  }
};

}  // namespace vllm_cuda::gdn_decode
