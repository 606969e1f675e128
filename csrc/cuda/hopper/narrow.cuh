// SPDX-License-Identifier: Apache-2.0
// out [m, n] = x [m, k] @ weight [n, k]^T for m <= 64: one pass over the weight at memory speed
// (sm_90a).
//
// A tile is some rows of the weight, the left operand of the products, and all tokens, the right
// one. Two threads stream them through rings of stages, that of the weight without waiting for the
// kernels ahead; warpgroups multiply, each its own 64 rows. Where the weight has too few rows for
// all multiprocessors, a cluster of CTAs shares out a tile's columns, and each adds up all partial
// sums, in the order of the columns, of some of the tokens. A row's bits follow from its own row of
// x, the weight, k and the split alone.
#pragma once

#include <cuda_bf16.h>

#include "hopper/cluster.cuh"
#include "hopper/narrow_tiles.cuh"

namespace vllm_cuda::narrow {

__device__ inline void sync_threads(int count) {
  asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory");
}

// Rounds and writes sums; two of neighbouring rows of the weight at a time.
template <bool GATED>
struct Writer {
  const NarrowArgs& args;
  const int width;  // outputs of a token

  __device__ explicit Writer(const NarrowArgs& args_)
      : args(args_), width(GATED ? args_.n / 2 : args_.n) {}

  __device__ bool inside(int token, int column) const {
    return token < args.m && column < width;
  }
  __device__ int64_t place(int token, int column) const {
    return int64_t{token} * width + column;
  }
  __device__ __nv_bfloat162 residual(int token, int column) const {
    const auto* from = static_cast<const __nv_bfloat16*>(args.residual) + place(token, column);
    return *reinterpret_cast<const __nv_bfloat162*>(from);
  }
  __device__ __nv_bfloat162 rounded(float2 sum, int row) const {
    if (args.bias != nullptr) {
      const auto* bias = static_cast<const __nv_bfloat16*>(args.bias) + row;
      const float2 add = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(bias));
      sum.x += add.x, sum.y += add.y;
    }
    return __floats2bfloat162_rn(sum.x, sum.y);
  }
  __device__ void store(int token, int column, __nv_bfloat162 value) const {
    auto* to = static_cast<__nv_bfloat16*>(args.out) + place(token, column);
    *reinterpret_cast<__nv_bfloat162*>(to) = value;
  }

  __device__ void write(int token, int column, float2 sum, __nv_bfloat162 added) const {
    __nv_bfloat162 result = rounded(sum, column);
    if (args.residual != nullptr) {
      const float2 a = __bfloat1622float2(result), b = __bfloat1622float2(added);
      result = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
    }
    store(token, column, result);
  }
  __device__ void write_gated(int token, int column, float2 gate, float2 up) const {
    const float2 a = __bfloat1622float2(rounded(gate, column));
    const float2 b = __bfloat1622float2(rounded(up, args.n / 2 + column));
    store(token, column, __floats2bfloat162_rn(silu(a.x) * b.x, silu(a.y) * b.y));
  }
};

template <typename S>
struct Consumer {
  // Of two outputs of two tokens, what is added to so many of a thread's is fetched early.
  static constexpr int EARLY = 2;

  const NarrowArgs& args;
  const Plan& plan;
  const Shared& shared;
  const int rank, count;  // stages of a tile
  const int own;          // pairs of tokens that this CTA adds up
  const int used;         // of those, the ones with a token
  const int outputs;      // of a tile
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Writer<S::GATED> writer;
  Ring weight, tokens;
  __nv_bfloat162 added[EARLY][2];
  float sums[S::TOKENS / 2];  // [64 rows of the weight, tokens]

  __device__ Consumer(const NarrowArgs& args_, const Plan& plan_, const Shared& shared_,
                      int rank_)
      : args(args_), plan(plan_), shared(shared_), rank(rank_), count(Steps(plan_, rank_).count),
        own(S::PAIRS / plan_.split), used(used_pairs(args_, plan_, rank_)),
        outputs(S::GATED ? plan_.rows / 2 : plan_.rows), writer(args_),
        weight(shared_.weight_barriers, plan_.stages),
        tokens(shared_.token_barriers, plan_.token_stages) {}

  __device__ static int used_pairs(const NarrowArgs& args, const Plan& plan, int rank) {
    const int own = S::PAIRS / plan.split;
    return max(0, min(own, (args.m + 1) / 2 - rank * own));
  }
  // What the cluster's other CTAs store among this one's sums.
  __device__ static uint32_t received_bytes(const NarrowArgs& args, const Plan& plan, int rank) {
    return (plan.split - 1) * used_pairs(args, plan, rank) * plan.rows * 8;
  }

  // Stages are given back one behind those that are queued.
  __device__ void multiply() {
#pragma unroll
    for (int i = 0; i < S::TOKENS / 2; ++i) sums[i] = 0;
    const int block = warp / 4 * kBlock * int(kTileRowBytes);
    Ring weight_behind = weight, tokens_behind = tokens;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      weight.wait_full();
      tokens.wait_full();
      const char* rows = shared.weight + weight.index * plan.stage_bytes() + block;
      const uint64_t a = tile_descriptor(rows);
      const uint64_t b = tile_descriptor(shared.tokens + tokens.index * plan.token_bytes());
      products_fence();
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        product<0, 0>(sums, advance(a, 32 * i), advance(b, 32 * i), 1);
      }
      products_commit();
      products_wait<1>();
      if (step > 0) release(weight_behind, tokens_behind);
      weight.advance();
      tokens.advance();
    }
    products_wait<0>(sums);
    if (count > 0) release(weight_behind, tokens_behind);
  }
  __device__ void release(Ring& weight_stage, Ring& tokens_stage) const {
    if (lane == 0) {
      weight_stage.release();
      tokens_stage.release();
    }
    weight_stage.advance();
    tokens_stage.advance();
  }

  // This thread's first row of a tile; the other is 8 behind. Sums 4 j and 4 j + 1 are the first
  // row's for the pair of tokens 4 j + lane % 4, the next two the other's.
  __device__ int row() const { return warp * 16 + lane / 4; }

  // Lanes of neighbouring rows trade, so that each has both for one token of a pair.
  __device__ float2 trade(float first, float second) const {
    const bool odd = lane / 4 % 2;
    const float got = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
    return odd ? make_float2(got, second) : make_float2(first, got);
  }

  // Where no other CTA has sums of this tile.
  __device__ void write_own(int tile) const {
    const int even = row() / 2 * 2;
#pragma unroll
    for (int j = 0; j < S::TOKENS / 8; ++j) {
      const int token = 2 * (4 * j + lane % 4) + lane / 4 % 2;
      const float2 low = trade(sums[4 * j], sums[4 * j + 1]);
      const float2 high = trade(sums[4 * j + 2], sums[4 * j + 3]);
      if constexpr (S::GATED) {
        const int column = tile * outputs + even / 16 * 8 + even % 8;
        if (even < plan.rows && writer.inside(token, column)) {
          writer.write_gated(token, column, low, high);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = tile * outputs + even + 8 * i;
          if (even + 8 * i >= plan.rows || !writer.inside(token, column)) continue;
          __nv_bfloat162 residual{};
          if (args.residual != nullptr) residual = writer.residual(token, column);
          writer.write(token, column, i == 0 ? low : high, residual);
        }
      }
    }
  }

  // The sums of CTA `from` for one of this CTA's pairs of tokens: [rows, 2].
  __device__ float* place(int from, int pair) const {
    return shared.sums + (from * own + pair) * plan.pair_stride();
  }

  // Each sum goes to the CTA that has its token.
  __device__ void pass_sums() const {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 8; ++j) {
      const int pair = 4 * j + lane % 4, to = pair / own;
      if (2 * pair >= args.m) continue;
      float* here = place(rank, pair % own);
      const uint32_t there = address_in(to, here), received = address_in(to, shared.received);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = row() + 8 * i;
        if (at >= plan.rows) continue;
        const float *sum = sums + 4 * j + 2 * i;
        if (to == rank) {
          *reinterpret_cast<float2*>(here + 2 * at) = make_float2(sum[0], sum[1]);
        } else {
          store_two(there + 8 * at, sum[0], sum[1], received);
        }
      }
    }
  }

  // Two rows of two tokens: {first row's, second row's}, all CTAs' sums in order.
  __device__ float4 total(int pair, int at) const {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int from = 0; from < plan.split; ++from) {
      const float4 part = *reinterpret_cast<const float4*>(place(from, pair) + 2 * at);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
  }

  // Two outputs of a tile for a pair of tokens: the `index`th of this CTA's.
  struct Item {
    int pair, output, token, column;
    __device__ Item(const Consumer& consumer, int index, int tile) {
      pair = index / (consumer.outputs / 2);
      output = 2 * (index % (consumer.outputs / 2));
      token = 2 * (consumer.rank * consumer.own + pair);
      column = tile * consumer.outputs + output;
    }
  };

  __device__ void fetch_added(int tile) {
    if constexpr (!S::GATED) {
      if (args.residual == nullptr) return;
#pragma unroll
      for (int i = 0; i < EARLY; ++i) {
        const Item item(*this, threadIdx.x + i * plan.consumers(), tile);
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          if (item.pair >= used || !writer.inside(item.token + token, item.column)) continue;
          added[i][token] = writer.residual(item.token + token, item.column);
        }
      }
    }
  }

  __device__ void write_item(const Item& item, const __nv_bfloat162 (*early)[2]) const {
    const int at = S::GATED ? item.output / 8 * 16 + item.output % 8 : item.output;
    const float4 sum = total(item.pair, at);
    const float2 of_token[2] = {{sum.x, sum.z}, {sum.y, sum.w}};
    float4 up{};
    if (S::GATED) up = total(item.pair, at + 8);
    const float2 up_of_token[2] = {{up.x, up.z}, {up.y, up.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = item.token + i;
      if (!writer.inside(token, item.column)) continue;
      if constexpr (S::GATED) {
        writer.write_gated(token, item.column, of_token[i], up_of_token[i]);
      } else {
        __nv_bfloat162 residual{};
        if (early != nullptr) {
          residual = (*early)[i];
        } else if (args.residual != nullptr) {
          residual = writer.residual(token, item.column);
        }
        writer.write(token, item.column, of_token[i], residual);
      }
    }
  }

  __device__ void write_totals(int tile) const {
    const int items = used * (outputs / 2);
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      const int index = threadIdx.x + i * plan.consumers();
      if (index < items) write_item(Item(*this, index, tile), &added[i]);
    }
    for (int index = threadIdx.x + EARLY * plan.consumers(); index < items;
         index += plan.consumers()) {
      write_item(Item(*this, index, tile), nullptr);
    }
  }

  __device__ void run(int tile, int apart) {
    for (; tile < plan.tiles; tile += apart) {
      multiply();
      write_own(tile);
    }
  }
  // A cluster has one tile, whose sums each of its CTAs receives once.
  __device__ void run_in_cluster(int tile) {
    fetch_added(tile);
    multiply();
    cluster_wait();
    pass_sums();
    sync_threads(plan.consumers());
    wait_for_stored(shared.received, 0);
    write_totals(tile);
  }
};

}  // namespace vllm_cuda::narrow

namespace vllm_cuda {

template <typename S>
__global__ void __launch_bounds__(narrow::kMostThreads, 1)
    narrow_kernel(const __grid_constant__ narrow::Maps maps, const NarrowArgs args,
                  const narrow::Plan plan) {
  extern __shared__ __align__(1024) char memory[];
  const narrow::Shared shared(memory, plan);
  const bool clustered = plan.split > 1;
  const int rank = clustered ? cluster_rank() : 0, consumers = plan.consumers();
  const int tile = blockIdx.x / plan.split, apart = gridDim.x / plan.split;
  if (threadIdx.x == 0) {
    Ring(shared.weight_barriers, plan.stages).init(consumers / 32);
    Ring(shared.token_barriers, plan.token_stages).init(consumers / 32);
    Ring received(shared.received, 1);
    received.init(1);
    received.expect(narrow::Consumer<S>::received_bytes(args, plan, rank));
  }
  __syncthreads();
  if (clustered) cluster_arrive();
  launch_dependents();
  if (threadIdx.x >= consumers) {
    const narrow::Steps steps(plan, rank);
    if (threadIdx.x == consumers) {
      narrow::produce_weight<S>(maps, plan, shared, steps, tile, apart);
    } else if (threadIdx.x == consumers + 32) {
      narrow::produce_tokens(maps, plan, shared, steps, tile, apart);
    }
    __syncwarp();
    if (clustered) cluster_wait();
    return;
  }
  // As in the skinny matmul, every kernel of a chain waits here, so no earlier reader of this one's
  // output buffer is still at work.
  wait_for_predecessors();
  narrow::Consumer<S> consumer(args, plan, shared, rank);
  if (clustered) {
    consumer.run_in_cluster(tile);
  } else {
    consumer.run(tile, apart);
  }
}

}  // namespace vllm_cuda
