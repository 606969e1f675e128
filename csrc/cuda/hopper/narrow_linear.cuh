// SPDX-License-Identifier: Apache-2.0
// The narrow matmul. A cluster of CTAs makes the outputs of TOKEN_CTAS * TOKENS tokens and ROWS
// weight rows; SPLIT of its CTAs share out the summed dimension of each tile and pass partial sums
// to each other, each adding up its own part of the tile in the order of the split. A tile of the
// weight is fetched once for all CTAs that multiply it. A row's bits depend on the cut and on k,
// not on other rows.
#pragma once

#include <algorithm>

#include "hopper/cluster.cuh"
#include "hopper/wgmma.cuh"
#include "launch.h"
#include "narrow_linear.h"

namespace vllm_cuda {

struct NarrowMaps {
  CUtensorMap x, weight;
};

namespace narrow {

constexpr int kChunk = 64;  // columns of a stage
constexpr int kBarrierBytes = 256;

template <int TOKENS_, int ROWS_, int TOKEN_CTAS_, int SPLIT_>
struct Cut {
  static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, TOKEN_CTAS = TOKEN_CTAS_, SPLIT = SPLIT_;
  static constexpr int CLUSTER = TOKEN_CTAS * SPLIT;
  static constexpr int CONSUMERS = 2 * TOKENS;  // threads: a warpgroup for 64 tokens
  static constexpr int THREADS = CONSUMERS + 32;
  static constexpr int X_BYTES = TOKENS * kTileRowBytes;
  static constexpr int STAGE_BYTES = X_BYTES + ROWS * kTileRowBytes;
  static constexpr int BESIDES = kTileGroupBytes + kBarrierBytes;  // alignment, barriers
  static constexpr int STAGES = std::min(8, (kMaxSharedBytes - BESIDES) / STAGE_BYTES);
  static constexpr int BYTES = BESIDES + STAGES * STAGE_BYTES;
  static constexpr int SUMS = ROWS / 2;  // of a thread
  // Of those, what the CTA `part` of a split adds up: from the first on.
  __host__ __device__ static constexpr int first(int part) { return SUMS / 2 * part / SPLIT * 2; }
  __host__ __device__ static constexpr int slice(int part) { return first(part + 1) - first(part); }
  static constexpr int BOX_BYTES = ((SUMS / 2 + SPLIT - 1) / SPLIT * 2) * CONSUMERS * 4;
  static_assert(CLUSTER <= 8 && TOKENS % 64 == 0 && ROWS % (8 * TOKEN_CTAS) == 0);
  static_assert((SPLIT - 1) * BOX_BYTES <= STAGES * STAGE_BYTES);
};

// Which part of the cluster's work is this CTA's.
template <typename C>
struct Place {
  int rank = cluster_rank();
  int tile = rank % C::TOKEN_CTAS;  // of tokens
  int part = rank / C::TOKEN_CTAS;  // of the split
  int first_token = (blockIdx.y * C::TOKEN_CTAS + tile) * C::TOKENS;
  int first_row = blockIdx.x / C::CLUSTER * C::ROWS;

  __device__ int rank_of(int other_tile, int other_part) const {
    return other_tile + C::TOKEN_CTAS * other_part;
  }
  // Those that multiply the same tiles of the weight, as bits of their ranks.
  __device__ uint16_t sharers() const { return ((1 << C::TOKEN_CTAS) - 1) << rank_of(0, part); }
};

// The part's columns, in chunks.
struct Columns {
  int first, count;
  __device__ Columns(int k, int part, int split) {
    const int chunks = k / kChunk;
    first = chunks * part / split;
    count = chunks * (part + 1) / split - first;
  }
};

// Each of the CTAs that share a tile fetches an equal part of it for all.
template <typename C>
__device__ void load_weight(const CUtensorMap& map, const Place<C>& place, char* stage, int chunk,
                            uint64_t* full) {
  const int own = C::ROWS / C::TOKEN_CTAS * place.tile, row = place.first_row + own;
  char* to = stage + C::X_BYTES + own * kTileRowBytes;
  if constexpr (C::TOKEN_CTAS > 1) {
    load_box_to(to, &map, chunk * kChunk, row, full, place.sharers());
  } else {
    load_box(to, &map, chunk * kChunk, row, full);
  }
}

template <typename C>
__device__ void load_x(const CUtensorMap& map, const Place<C>& place, char* stage, int chunk,
                       uint64_t* full) {
  load_box(stage, &map, chunk * kChunk, place.first_token, full);
}

template <typename C>
__device__ void produce(const NarrowMaps& maps, const Place<C>& place, const Columns& columns,
                        char* tiles, Ring ring) {
  const int ahead = min(C::STAGES, columns.count);
  for (int i = 0; i < ahead; ++i) {
    ring.index = i;
    ring.expect(C::STAGE_BYTES);
    load_weight<C>(maps.weight, place, tiles + i * C::STAGE_BYTES, columns.first + i, ring.full());
  }
  wait_for_predecessors();
  for (int i = 0; i < ahead; ++i) {
    ring.index = i;
    load_x<C>(maps.x, place, tiles + i * C::STAGE_BYTES, columns.first + i, ring.full());
  }
  ring.advance();
  for (int i = ahead; i < columns.count; ++i) {
    char* stage = tiles + ring.index * C::STAGE_BYTES;
    ring.wait_empty();
    ring.expect(C::STAGE_BYTES);
    load_weight<C>(maps.weight, place, stage, columns.first + i, ring.full());
    load_x<C>(maps.x, place, stage, columns.first + i, ring.full());
    ring.advance();
  }
}

// A stage is free once every CTA has read it that this one's fetches go to.
template <typename C>
__device__ void release(const Place<C>& place, uint64_t* empty) {
  const int lane = threadIdx.x % 32;
  if (lane < C::TOKEN_CTAS) arrive_at(empty, place.rank_of(lane, place.part));
}

template <typename C>
__device__ void multiply_stage(float (&sums)[C::SUMS], const char* tiles, Ring& ring) {
  ring.wait_full();
  const char* stage = tiles + ring.index * C::STAGE_BYTES;
  const uint64_t x = tile_descriptor(stage + threadIdx.x / 128 * 64 * kTileRowBytes);
  const uint64_t w = tile_descriptor(stage + C::X_BYTES);
  products_fence();
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    product<0, 0>(sums, advance(x, 32 * i), advance(w, 32 * i), 1);
  }
  products_commit();
}

template <typename C>
__device__ void multiply(float (&sums)[C::SUMS], const Place<C>& place, int chunks,
                         const char* tiles, Ring ring) {
#pragma unroll
  for (int i = 0; i < C::SUMS; ++i) sums[i] = 0;
  multiply_stage<C>(sums, tiles, ring);
  for (int i = 1; i < chunks; ++i) {
    uint64_t* previous = ring.empty();
    ring.advance();
    multiply_stage<C>(sums, tiles, ring);
    products_wait<1>();
    release<C>(place, previous);
  }
  products_wait<0>(sums);
}

// Partial sums of others for this CTA's slice, one buffer for each of them.
template <typename C>
__device__ char* inbox(char* tiles, int from, int to) {
  return tiles + (from < to ? from : from - 1) * C::BOX_BYTES;
}

// Calls `four(i, offset)` and `two(i, offset)` for the slice's values from the ith on, which lie so
// many bytes into a box: together those of all threads.
template <typename C, int PART, typename Four, typename Two>
__device__ void for_slice(Four&& four, Two&& two) {
  constexpr int COUNT = C::slice(PART);
#pragma unroll
  for (int i = 0; i + 4 <= COUNT; i += 4) four(i, i * C::CONSUMERS * 4 + threadIdx.x * 16);
  constexpr int REST = COUNT / 4 * 4;
  if constexpr (COUNT % 4 != 0) two(REST, REST * C::CONSUMERS * 4 + threadIdx.x * 8);
}

// The slices of others, beginning with the next one's: no CTA receives all at once.
template <typename C, int PART, int AWAY = 1>
__device__ void send(const float (&sums)[C::SUMS], const Place<C>& place, char* tiles,
                     uint64_t* barrier) {
  constexpr int TO = (PART + AWAY) % C::SPLIT;
  const int rank = place.rank_of(place.tile, TO);
  const float* slice = sums + C::first(TO);
  const uint32_t box = address_in(rank, inbox<C>(tiles, PART, TO));
  const uint32_t counter = address_in(rank, barrier);
  for_slice<C, TO>([&](int i, int offset) { store_four(box + offset, slice + i, counter); },
                   [&](int i, int offset) { store_two(box + offset, slice + i, counter); });
  if constexpr (AWAY + 1 < C::SPLIT) send<C, PART, AWAY + 1>(sums, place, tiles, barrier);
}

template <typename C, int PART>
__device__ void receive(float (&values)[C::slice(PART)], const char* box) {
  for_slice<C, PART>(
      [&](int i, int offset) {
        const float4 four = *reinterpret_cast<const float4*>(box + offset);
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
      },
      [&](int i, int offset) {
        const float2 two = *reinterpret_cast<const float2*>(box + offset);
        values[i] = two.x, values[i + 1] = two.y;
      });
}

// This CTA's slice of the sums, all parts of the split in order.
template <typename C, int PART>
__device__ void add_up(float (&totals)[C::slice(PART)], const float (&sums)[C::SUMS],
                       char* tiles) {
  constexpr int COUNT = C::slice(PART);
#pragma unroll
  for (int from = 0; from < C::SPLIT; ++from) {
    float values[COUNT];
    if (from == PART) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) values[i] = sums[C::first(PART) + i];
    } else {
      receive<C, PART>(values, inbox<C>(tiles, from, PART));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) totals[i] = from == 0 ? values[i] : totals[i] + values[i];
  }
}

// A thread's pairs of outputs in [m, n]: of two tokens, and of two in each eight of weight rows.
template <typename C>
struct Outputs {
  const NarrowArgs& args;
  int token, row;
  __device__ Outputs(const NarrowArgs& args_, const Place<C>& place) : args(args_) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    token = place.first_token + warp * 16 + lane / 4;
    row = place.first_row + lane % 4 * 2;
  }
  // Sums 4 i and 4 i + 1 are of `token` and the eight i, the next two of `token` + 8.
  __device__ bool inside(int sum) const {
    return token + sum / 2 % 2 * 8 < args.m && row + sum / 4 * 8 < args.n;
  }
  template <typename T>
  __device__ T* at(T* matrix, int sum) const {
    return matrix + int64_t(token + sum / 2 % 2 * 8) * args.n + row + sum / 4 * 8;
  }
};

// Fetches the residual while the cluster's other CTAs finish, and writes.
template <typename C, int PART>
__device__ void finish(const float (&sums)[C::SUMS], const NarrowArgs& args,
                       const Place<C>& place, char* tiles, uint64_t* barrier) {
  constexpr int PAIRS = C::slice(PART) / 2, FIRST = C::first(PART);
  const Outputs<C> outputs(args, place);
  const auto* residual = static_cast<const __nv_bfloat16*>(args.residual);
  auto* out = static_cast<__nv_bfloat16*>(args.out);
  __nv_bfloat162 added[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    if (residual == nullptr || !outputs.inside(FIRST + 2 * i)) continue;
    added[i] = *reinterpret_cast<const __nv_bfloat162*>(outputs.at(residual, FIRST + 2 * i));
  }
  cluster_wait();
  float totals[C::slice(PART)];
  if constexpr (C::SPLIT > 1) {
    send<C, PART>(sums, place, tiles, barrier);
    wait_for_parts(barrier, 0);
  }
  add_up<C, PART>(totals, sums, tiles);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    if (!outputs.inside(FIRST + 2 * i)) continue;
    __nv_bfloat162 result = __floats2bfloat162_rn(totals[2 * i], totals[2 * i + 1]);
    if (residual != nullptr) {
      const float2 low = __bfloat1622float2(result), high = __bfloat1622float2(added[i]);
      result = __floats2bfloat162_rn(low.x + high.x, low.y + high.y);
    }
    *reinterpret_cast<__nv_bfloat162*>(outputs.at(out, FIRST + 2 * i)) = result;
  }
}

template <typename C, int PART>
__device__ void finish_part(const float (&sums)[C::SUMS], const NarrowArgs& args,
                            const Place<C>& place, char* tiles, uint64_t* barrier) {
  if constexpr (PART + 1 < C::SPLIT) {
    if (place.part != PART) return finish_part<C, PART + 1>(sums, args, place, tiles, barrier);
  }
  finish<C, PART>(sums, args, place, tiles, barrier);
}

}  // namespace narrow

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    narrow_linear_kernel(const __grid_constant__ NarrowMaps maps, const NarrowArgs args) {
  extern __shared__ char bytes[];
  char* tiles = bytes + (-shared_address(bytes) & (kTileGroupBytes - 1));
  auto* words = reinterpret_cast<uint64_t*>(tiles + C::STAGES * C::STAGE_BYTES);
  Ring ring(words, C::STAGES), parts(words + 2 * C::STAGES, 1);
  const narrow::Place<C> place;
  const narrow::Columns columns(args.k, place.part, C::SPLIT);
  if (threadIdx.x == 0) {
    ring.init(C::CONSUMERS / 32 * C::TOKEN_CTAS);
    parts.init(1);
    parts.expect((C::SPLIT - 1) * C::slice(place.part) * C::CONSUMERS * 4);
  }
  __syncthreads();
  cluster_arrive();
  launch_dependents();
  cluster_wait();
  if (threadIdx.x >= C::CONSUMERS) {
    // The weight is constant, so it is fetched before the kernels that make x have finished.
    if (threadIdx.x == C::CONSUMERS) narrow::produce<C>(maps, place, columns, tiles, ring);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    return;
  }
  // As in the skinny matmul, every kernel of a chain waits here, so no earlier reader of this one's
  // output buffer is still at work.
  wait_for_predecessors();
  float sums[C::SUMS];
  narrow::multiply<C>(sums, place, columns.count, tiles, ring);
  cluster_arrive();
  narrow::finish_part<C, 0>(sums, args, place, tiles, parts.full());
}

}  // namespace vllm_cuda
