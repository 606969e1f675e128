// SPDX-License-Identifier: Apache-2.0
// Attention of short queries over the paged cache: one block of threads per multiprocessor goes
// through shares of sequences' keys. A warp streams tiles of keys and values, ahead across shares,
// into rings of the computing warps, each of which takes every n-th tile of a share.
//
// Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1), shares joined by their
// log-sum-exp as in Flash-Decoding. The shares of a sequence follow from its length and host
// integers, their tiles' order from their place, and all sums are in a fixed order: a row's bits
// do not depend on which block of threads or in which order anything is computed.
#pragma once

#include <cuda.h>

#include "decode_attention_share.cuh"
#include "decode_attention_tile.cuh"

namespace vllm_cuda::decode_attention {

template <int THREADS>
__device__ inline void computing_warps_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// `x * sigmoid(gate)` with the same approximations as the Triton kernel of `mul_sigmoid`.
__device__ inline float times_sigmoid(float x, float gate) {
  float power, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(1.0f + power));
  return x * quotient;
}

// Shared memory: every computing warp's ring of tiles, what the warps of a share have each seen,
// barriers. A ring is one warp's alone: whoever waits for a stage has waited for all its fillings.
template <typename KV, int HEAD_DIM, int WARPS>
struct Memory {
  static constexpr int kTile = TileLayout<KV, HEAD_DIM>::kBytes;
  static constexpr int kPitch = HEAD_DIM + 4;  // of a row's sums: 16-byte pieces, banks apart
  static constexpr int kMaxStages = 8;

  int rows, stages;  // of a ring
  __host__ __device__ Memory(int rows_, int stages_) : rows(rows_), stages(stages_) {}
  // Of one more stage: tiles and two barriers each.
  __host__ __device__ static constexpr int stage_bytes() { return WARPS * (kTile + 16); }
  __host__ __device__ int sums() const { return WARPS * stages * kTile; }
  __host__ __device__ int stats() const { return sums() + 4 * WARPS * rows * kPitch; }
  __host__ __device__ int barriers() const { return stats() + 8 * WARPS * kMaxQueryRows; }
  __host__ __device__ int shares() const { return barriers() + 16 * WARPS * stages; }
  __host__ __device__ int bytes(int num_seqs) const {
    return shares() + Shares<WARPS>::bytes(num_seqs);
  }
};

// A stage of a warp's ring, which has taken `count` tiles before.
struct Stage {
  int index;
  uint32_t phase;
  __device__ Stage(int warp, int count, int stages)
      : index(warp * stages + count % stages), phase(count / stages & 1) {}
};

struct Barriers {
  uint64_t *full, *empty;
  __device__ Barriers(char* memory, int count)
      : full(reinterpret_cast<uint64_t*>(memory)), empty(full + count) {}
  // By all threads of the block.
  __device__ void init(int count) const {
    for (int i = threadIdx.x; i < 2 * count; i += blockDim.x)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + i)));
    barriers_fence();
  }
};

// A tile is one copy: rows of 128 bytes, 16 tokens of a block, their chunks, keys and values.
__device__ inline void load_tile(void* to, const CUtensorMap* map, int token, int chunk, int block,
                                 uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %2, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(token), "r"(chunk), "r"(block), "r"(shared_address(barrier)),
      "l"(policy)
      : "memory");
}

template <typename KV, int HEAD_DIM, int WARPS>
__device__ void stream_tiles(const DecodeAttentionArgs& args, const CUtensorMap* map,
                             const Shares<WARPS>& shares, char* tiles, int stages,
                             Barriers barriers, bool early) {
  using Layout = TileLayout<KV, HEAD_DIM>;
  const int lane = threadIdx.x % 32;
  int count = 0;  // of tiles that computing warp `lane` has had before this share
  const uint64_t policy = evict_first_policy();
  bool waited = !early;
  if (waited) wait_for_predecessors();
  for (int i = blockIdx.x; i < shares.count(); i += gridDim.x) {
    const Share share = shares.at(args, i);
    const int* table = args.table + share.seq * args.table_stride;
    const auto block_of = [&](int tile) {
      const int n = share.first + tile * kTileKeys;
      return n < share.last ? table[n / args.block_size] : 0;
    };
    int blocks = 0, next = block_of(lane);
    for (int tile = 0; tile < share.tiles(); ++tile) {
      if (tile % 32 == 0) {
        blocks = next;
        next = block_of(tile + 32 + lane);
      }
      const int block = __shfl_sync(~0u, blocks, tile % 32);
      const int start = share.first + tile * kTileKeys;
      if (!waited && start + kTileKeys > share.lowest) {
        wait_for_predecessors();
        waited = true;
      }
      const int warp = tile % WARPS;
      const Stage stage(warp, __shfl_sync(~0u, count, warp) + tile / WARPS, stages);
      // The first round finds every stage free.
      wait_parity(barriers.empty + stage.index, stage.phase ^ 1);
      if (lane == 0) {
        uint64_t* full = barriers.full + stage.index;
        arrive_expecting(full, Layout::kBytes);
        load_tile(tiles + stage.index * Layout::kBytes, map, start % args.block_size,
                  share.head * Layout::kChunks, block, full, policy);
      }
      __syncwarp();
    }
    count += share.tiles_of(lane, WARPS);
  }
  if (!waited) wait_for_predecessors();
}

// What a share's tile holds after its last key: no bits of another tensor count as values.
template <typename Layout>
__device__ void clear_values(char* tile, int live) {
  constexpr int kPieces = 128 / 16;
  for (int i = threadIdx.x % 32; i < Layout::kPart / 16; i += 32) {
    if (i / kPieces % kTileKeys >= live)
      reinterpret_cast<uint4*>(tile + Layout::kPart)[i] = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

template <typename KV, int HEAD_DIM, int WARPS>
struct Computing {
  using Layout = TileLayout<KV, HEAD_DIM>;
  using Sums = Softmax<KV, HEAD_DIM>;
  using Mem = Memory<KV, HEAD_DIM, WARPS>;
  static constexpr int kThreads = 32 * WARPS, kQuads = HEAD_DIM / 4;

  const DecodeAttentionArgs& args;
  char* shared;
  const Mem memory;

  // This warp's tiles of a share; it has had `count` before.
  __device__ void add_tiles(Sums& sums, const Share& share, int count, Barriers barriers) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Queries<KV, HEAD_DIM> q;
    q.load([&](int row) -> const __nv_bfloat16* {
      const int token = row / args.group;
      if (row >= args.rows || token >= share.query_len) return nullptr;
      return static_cast<const __nv_bfloat16*>(args.query) +
             (share.q_start + token) * args.q_token +
             (share.head * args.group + row % args.group) * args.q_head;
    });
    int place[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      place[e] = share.lowest + (2 * (lane % 4) + e) / args.group;
    for (int tile = warp; tile < share.tiles(); tile += WARPS) {
      const Stage stage(warp, count + tile / WARPS, memory.stages);
      const int start = share.first + tile * kTileKeys, live = share.last - start;
      char* keys = shared + stage.index * Layout::kBytes;
      wait_parity(barriers.full + stage.index, stage.phase);
      if (live < kTileKeys) clear_values<Layout>(keys, live);
      const bool whole = live >= kTileKeys && start + kTileKeys - 1 <= share.lowest &&
                         (args.window == 0 || start > share.highest() - args.window);
      const auto visible = [&](int e, int key) {
        const int n = start + key;
        return key < live && n <= place[e] &&
               (args.window == 0 || n > place[e] - args.window);
      };
      if (whole) {
        sums.template add<false>(q, shared_address(keys), args.scale, visible);
      } else {
        sums.template add<true>(q, shared_address(keys), args.scale, visible);
      }
      __syncwarp();
      if (lane == 0) arrive(barriers.empty + stage.index);
    }
  }

  __device__ void leave_sums(Sums& sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    float* mine = reinterpret_cast<float*>(shared + memory.sums()) + warp * args.rows * Mem::kPitch;
    float2* stats = reinterpret_cast<float2*>(shared + memory.stats()) + warp * kMaxQueryRows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float total = sums.total[e];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      const int row = 2 * t + e;
      if (row >= args.rows) continue;
      if (lane < 4) stats[row] = make_float2(sums.peak[e], total);
#pragma unroll
      for (int step = 0; step < Sums::kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          mine[row * Mem::kPitch + Sums::dim(step, half)] = sums.acc[step][e + 2 * half];
    }
  }

  // Four dims of a row over all warps, and the row's log-sum-exp.
  __device__ float4 add_warps(int row, int quad, float& lse) const {
    const float* sums = reinterpret_cast<const float*>(shared + memory.sums());
    const float2* stats = reinterpret_cast<const float2*>(shared + memory.stats());
    float peak = -INFINITY, total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
      peak = fmaxf(peak, stats[warp * kMaxQueryRows + row].x);
    const float shift = peak == -INFINITY ? 0.0f : peak;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float2 stat = stats[warp * kMaxQueryRows + row];
      const float weight = exp2_fast(stat.x - shift);
      const float4 part = *reinterpret_cast<const float4*>(
          sums + (warp * args.rows + row) * Mem::kPitch + 4 * quad);
      add_scaled(sum, part, weight);
      total += stat.y * weight;
    }
    lse = peak + __log2f(total);
    scale_by(sum, args.v_scale / (total > 0.0f ? total : 1.0f));
    return sum;
  }

  __device__ static void add_scaled(float4& sum, float4 part, float weight) {
    sum.x = fmaf(part.x, weight, sum.x);
    sum.y = fmaf(part.y, weight, sum.y);
    sum.z = fmaf(part.z, weight, sum.z);
    sum.w = fmaf(part.w, weight, sum.w);
  }
  __device__ static void scale_by(float4& sum, float factor) {
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
  }

  // The first of the row's shares.
  __device__ int64_t share_of(const Share& share, int row) const {
    const int64_t token = share.q_start + row / args.group;
    return (token * args.kv_heads * args.group + share.head * args.group + row % args.group) *
           args.splits;
  }

  // Four dims of a row over all shares, in their order; a warp has one row.
  __device__ float4 join(const Share& share, int row, int quad) const {
    const int64_t base = share_of(share, row);
    const int lane = threadIdx.x % 32;
    const float lse = lane < share.used ? __ldcg(args.lse + base + lane) : -INFINITY;
    float peak = lse;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, mask));
    const float weight = exp2_fast(lse - (peak == -INFINITY ? 0.0f : peak));
    float4 sum = make_float4(0, 0, 0, 0);
    float total = 0.0f;
    const float4* part = reinterpret_cast<const float4*>(args.part) + base * kQuads + quad;
#pragma unroll 8
    for (int s = 0; s < share.used; ++s) {
      const float of_share = __shfl_sync(~0u, weight, s);
      add_scaled(sum, __ldcg(part + s * kQuads), of_share);
      total += of_share;
    }
    scale_by(sum, 1.0f / (total > 0.0f ? total : 1.0f));
    return sum;
  }

  __device__ void write(const Share& share, int row, int quad, float4 sum) const {
    const int64_t token = share.q_start + row / args.group;
    const int head = share.head * args.group + row % args.group;
    uint2 words = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
    if (args.gate != nullptr) {
      const uint2 gate = *reinterpret_cast<const uint2*>(
          static_cast<const __nv_bfloat16*>(args.gate) + token * args.gate_token +
          head * args.gate_head + 4 * quad);
      words.x = gated(words.x, gate.x);
      words.y = gated(words.y, gate.y);
    }
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + token * args.out_token +
                              head * args.out_head + 4 * quad) = words;
  }

  __device__ static uint32_t gated(uint32_t x, uint32_t gate) {
    return pack(times_sigmoid(__uint_as_float(x << 16), __uint_as_float(gate << 16)),
                times_sigmoid(__uint_as_float(x & 0xffff0000u),
                              __uint_as_float(gate & 0xffff0000u)));
  }

  template <typename Take>
  __device__ void each_quad(const Share& share, Take take) const {
    for (int i = threadIdx.x; i < args.rows * kQuads; i += kThreads) {
      const int row = i / kQuads;
      if (row / args.group < share.query_len) take(row, i % kQuads);
    }
  }

  __device__ void finish(const Share& share, Sums& sums, int* last) {
    leave_sums(sums);
    computing_warps_sync<kThreads>();
    each_quad(share, [&](int row, int quad) {
      float lse;
      const float4 sum = add_warps(row, quad, lse);
      if (share.used == 1) {
        write(share, row, quad, sum);
        return;
      }
      const int64_t at = share_of(share, row) + share.split;
      reinterpret_cast<float4*>(args.part)[at * kQuads + quad] = sum;
      if (quad == 0) args.lse[at] = lse;
    });
    computing_warps_sync<kThreads>();
    if (share.used == 1) return;
    if (threadIdx.x == 0) {
      int* counter = args.arrived + share.seq * args.kv_heads + share.head;
      __threadfence();
      const bool is_last = atomicAdd(counter, 1) == share.used - 1;
      __threadfence();
      if (is_last) *counter = 0;
      *last = is_last;
    }
    computing_warps_sync<kThreads>();
    if (!*last) return;
    each_quad(share, [&](int row, int quad) {
      write(share, row, quad, join(share, row, quad));
    });
  }
};

template <typename KV, int HEAD_DIM, int WARPS>
__global__ void __launch_bounds__(32 * (WARPS + 1))
    decode_attention_kernel(const DecodeAttentionArgs args, const __grid_constant__ CUtensorMap map,
                            int stages, bool early) {
  extern __shared__ __align__(1024) char shared[];
  launch_dependents();
  const Memory<KV, HEAD_DIM, WARPS> memory(args.rows, stages);
  const Barriers barriers(shared + memory.barriers(), WARPS * stages);
  barriers.init(WARPS * stages);
  const Shares<WARPS> shares(args, reinterpret_cast<int*>(shared + memory.shares()));
  if (threadIdx.x / 32 == WARPS) {
    stream_tiles<KV, HEAD_DIM, WARPS>(args, &map, shares, shared, stages, barriers, early);
    return;
  }
  wait_for_predecessors();
  Computing<KV, HEAD_DIM, WARPS> computing{args, shared, memory};
  int count = 0;
  for (int i = blockIdx.x; i < shares.count(); i += gridDim.x) {
    const Share share = shares.at(args, i);
    Softmax<KV, HEAD_DIM> sums;
    sums.clear();
    computing.add_tiles(sums, share, count, barriers);
    computing.finish(share, sums, shares.flag());
    count += share.tiles_of(threadIdx.x / 32, WARPS);
  }
}

}  // namespace vllm_cuda::decode_attention
