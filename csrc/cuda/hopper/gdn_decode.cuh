// SPDX-License-Identifier: Apache-2.0
// One decode step of the gated delta rule: convolution, gates, replay of the ring's pending tokens,
// the new token and the gated norm, in one pass over the states at memory speed.
//
// An item is a sequence's key head with its group of value heads. A CTA goes through its items;
// each consuming warp fetches its own tiles of the states, rows of dv, with bulk copies several
// tiles ahead, so that memory is never idle while others are computed on. The preparing warps are
// some items ahead.
//
// The order of every sum follows from the head dimensions alone: a row's bits do not depend on the
// grid, the tiles or the other rows.
#pragma once

#include "gdn_decode_prepare.cuh"

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

// A warp's tiles in the order they are computed on, on their way through its stages.
template <typename State, int ROWS>
struct Stream {
  static constexpr uint32_t BYTES = ROWS * kHeadDim * sizeof(State);
  const GdnDecodeArgs& args;
  const Tiles& tiles;
  Item item;
  uint64_t* barriers;
  char* stages;
  int count;
  int pass, index, stage;

  __device__ Stream(const GdnDecodeArgs& args_, const Tiles& tiles_, const Item& first,
                    uint64_t* barriers_, char* stages_, int count_)
      : args(args_), tiles(tiles_), item(first), barriers(barriers_), stages(stages_),
        count(count_), pass(0), index(block()), stage(0) {}
  __device__ int block() const { return item.left > 0 ? __ldg(args.indices + item.seq) : -1; }
  // Fetches the next tile, if there is one, into the stage after the last one fetched.
  __device__ void fetch() {
    while (index < 0 && item.left > 0) {
      item.advance(args.n);
      index = block();
    }
    if (item.left == 0) return;
    if (threadIdx.x % 32 == 0) {
      const int row = item.key_head * args.group * kHeadDim + tiles.row(pass);
      const State* from =
          static_cast<const State*>(args.state) + index * args.state_stride + row * kHeadDim;
      arrive_expecting(barriers + stage, BYTES);
      bulk_copy(stages + stage * BYTES, from, BYTES, barriers + stage);
    }
    if (++stage == count) stage = 0;
    if (++pass == tiles.passes) {
      pass = 0;
      item.advance(args.n);
      index = block();
    }
  }
};

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
// key row `member % R`, lanes 4 to 7 that of the query row. The tree is the same for every R.
template <int R>
__device__ float contract(const float (&keys)[R], const float (&queries)[R], int member) {
  float half[R];
  const bool upper = member & 4;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    half[r] = (upper ? queries[r] : keys[r]) +
              __shfl_xor_sync(~0u, upper ? keys[r] : queries[r], 4);
  }
  if constexpr (R == 4) {
    const bool second = member & 2, odd = member & 1;
    float pair[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      pair[r] = (second ? half[r + 2] : half[r]) +
                __shfl_xor_sync(~0u, second ? half[r] : half[r + 2], 2);
    }
    return (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
  } else {
    static_assert(R == 2);
    const bool odd = member & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) half[r] += __shfl_xor_sync(~0u, half[r], 2);
    return (odd ? half[1] : half[0]) + __shfl_xor_sync(~0u, odd ? half[0] : half[1], 1);
  }
}

template <typename State, int R>
struct Consumer {
  const GdnDecodeArgs& args;
  int group, member;  // of 8 lanes, lane in it

  __device__ void replay(Tile<State, R>& tile, const Buffer& from, int pending, int row) const {
    const int rows = args.group * kHeadDim, head = row / kHeadDim;
    for (int i = 0; i < pending; ++i) {
      float k[16], d[R];
      load_columns(k, from.keys + i * kHeadDim, member);
      load_rows<R>(d, from.errors + i * rows + row + group * R);
      tile.scale(from.decays[i * args.group + head]);
      tile.add(d, k);
      tile.round();
    }
  }

  // The new token; `row` is the tile's first of the item.
  __device__ void step(Tile<State, R>& tile, const Buffer& with, const Header& header, int key_head,
                       int row) const {
    float k[16], q[16];
    load_columns(k, with.k, member);
    load_columns(q, with.q, member);
    const float2 gate = with.gates[row / kHeadDim];
    tile.scale(gate.x);
    float kq = 0, key_sums[R] = {}, query_sums[R] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      kq = __fmaf_rn(k[i], q[i], kq);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        key_sums[r] = __fmaf_rn(tile.S[r][i], k[i], key_sums[r]);
        query_sums[r] = __fmaf_rn(tile.S[r][i], q[i], query_sums[r]);
      }
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) kq += __shfl_xor_sync(~0u, kq, mask);
    const float sum = contract<R>(key_sums, query_sums, member);
    const int own = row + group * R + member % R;
    // The error of row `member % R`, first in the lanes that have the keys' sums.
    float error = __fmul_rn(gate.y, __fsub_rn(with.v[own], sum));
    const float other = __shfl_xor_sync(~0u, error, 4);
    if (member & 4) error = other;
    const int heads = args.k_heads * args.group;
    if (member >= 4 && member < 4 + R) {
      with.out[own] = round_bf16(__fmaf_rn(kq, error, sum));
    }
    if (header.commit) {
      float d[R];
#pragma unroll
      for (int r = 0; r < R; ++r) d[r] = __shfl_sync(~0u, error, r, 8);
      tile.add(d, k);
      const int64_t first = int64_t(key_head) * args.group * kHeadDim + row;
      State* state = static_cast<State*>(args.state) + header.index * args.state_stride;
      tile.store(state + first * kHeadDim, group, member);
    } else if (member < R) {
      float* errors = args.errors + int64_t(header.slot) * heads * kHeadDim;
      errors[key_head * args.group * kHeadDim + own] = error;
    }
  }
};

template <typename State, int R>
__device__ void run_consumers(const GdnDecodeArgs& args, Item item, const Barriers& barriers,
                              char* buffers, int buffer_bytes,
                              char* stages, int count) {
  constexpr int ROWS = 4 * R;
  using Tiled = Stream<State, ROWS>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles(args.group, warp, ROWS);
  uint64_t* full = barriers.tiles + warp * kMaxStages;
  char* own = stages + warp * count * Tiled::BYTES;
  Tiled stream(args, tiles, item, full, own, count);
  for (int i = 0; i < count; ++i) stream.fetch();
  const Consumer<State, R> consumer{args, lane / 8, lane % 8};
  uint32_t tile_phase = 0;
  int stage = 0;
  for (Place place; item.left > 0; item.advance(args.n), place.advance()) {
    const Buffer buffer(buffers + place.index * buffer_bytes, args.group, args.slots);
    wait_parity(barriers.ring + place.index, place.phase);
    const Header header = *buffer.header;
    const int passes = header.index < 0 ? 0 : tiles.passes;
    if (passes == 0) wait_parity(barriers.vectors + place.index, place.phase);
    for (int pass = 0; pass < passes; ++pass) {
      Tile<State, R> tile;
      wait_parity(full + stage, tile_phase);
      tile.load(own + stage * Tiled::BYTES, consumer.group, consumer.member);
      if (++stage == count) {
        stage = 0;
        tile_phase ^= 1;
      }
      __syncwarp();
      stream.fetch();
      consumer.replay(tile, buffer, header.pending, tiles.row(pass));
      wait_parity(barriers.vectors + place.index, place.phase);
      consumer.step(tile, buffer, header, item.key_head, tiles.row(pass));
    }
    __syncwarp();
    if (lane == 0) arrive(barriers.done + place.index);
  }
}

template <typename State, int R>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_decode_kernel(const __grid_constant__ GdnDecodeArgs args, int stages) {
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args, Stream<State, 4 * R>::BYTES, stages);
  const Barriers barriers(shared);
  barriers.init();
  __syncthreads();
  launch_dependents();
  const Item first(args, blockIdx.x, gridDim.x);
  char* buffers = shared + layout.buffers;
  if (threadIdx.x < 32 * kConsumers) {
    run_consumers<State, R>(args, first, barriers, buffers, layout.buffer_bytes,
                            shared + layout.stages, stages);
  } else {
    run_preparers(Preparer(args, barriers), first, buffers, layout.buffer_bytes);
  }
}

}  // namespace vllm_cuda::gdn_decode
