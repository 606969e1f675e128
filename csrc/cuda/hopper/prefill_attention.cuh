// SPDX-License-Identifier: Apache-2.0
// Attention of long queries over the paged cache: one persistent CTA per multiprocessor (sm_90a).
//
// As FlashAttention-3 (arXiv 2407.08608): a producer warp fetches queries, keys and values through
// rings of stages, where converter warps make bf16 of e4m3; each consumer warpgroup has 64 query
// rows, whose scores with the next keys are multiplied while the softmax of the last ones runs, and
// warpgroups take turns to multiply so that one's softmax hides behind the other's products. Where
// prompts are long the CTAs of a cluster have consecutive rows, and each fetches half of every tile
// of keys and values for both: moving them from the L2 cache costs power.
//
// A row sees tiles of keys that begin at multiples of their length, the last first, whatever its
// neighbours see: its bits follow from its own query, keys and values alone.
#pragma once

#include "hopper/prefill_attention_converter.cuh"
#include "hopper/prefill_attention_producer.cuh"
#include "hopper/prefill_attention_row.cuh"
#include "hopper/prefill_attention_softmax.cuh"
#include "hopper/wgmma.cuh"

namespace vllm_cuda::prefill_attention {

// What all lanes agree on, in a register of the warp.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Squares of 8 rows of 128 swizzled bytes, STRIDE bytes from 8 rows to the next 8; the next 64
// columns follow a square. They begin `bytes` after a tile, whose place counts 16 bytes. Built of
// two halves, a descriptor stays in registers of the warp.
template <uint32_t STRIDE>
__device__ inline uint64_t squares_descriptor(uint32_t place, uint32_t bytes) {
  constexpr uint32_t kHigh = 1u << 30 | STRIDE >> 4, kLow = kTileGroupBytes >> 4 << 16;
  return uint64_t{kHigh} << 32 | (kLow + place + (bytes >> 4));
}
__device__ inline uint32_t place_of(const void* tile) {
  return uniform((shared_address(tile) & 0x3FFFF) >> 4);
}

template <typename S>
struct Consumer {
  static constexpr uint32_t kGroupBytes = S::CHUNKS * kTileGroupBytes;  // of 8 tokens
  static constexpr uint32_t kQueryChunkBytes = kQueryRows * kTileRowBytes;

  const PrefillAttentionArgs& args;
  Shared<S>& shared;
  const Cluster cluster;
  const int warpgroup, lane;
  const uint32_t query;           // its place
  const int first_token, tokens;  // of this warpgroup, from the item's first
  Ring keys, values, items;
  uint32_t query_phase = 0;
  int token[2];  // of this thread's rows, from the item's first
  float scores[S::KEYS / 2], sums[S::HEAD_DIM / 2];
  uint32_t weights[S::KEYS / 16][4];
  Softmax<S::KEYS> softmax;

  __device__ Consumer(const PrefillAttentionArgs& args_, Shared<S>& shared_, Cluster cluster_)
      : args(args_), shared(shared_), cluster(cluster_),
        warpgroup(uniform(threadIdx.x / kWarpgroup - 1)), lane(threadIdx.x % 32),
        query(place_of(shared_.query[warpgroup])),
        first_token(warpgroup * warpgroup_tokens(args.group)),
        tokens(warpgroup_tokens(args.group)), keys(shared_.key_barriers, S::STAGES),
        values(shared_.value_barriers, S::STAGES), items(shared_.item_barriers, kItems) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      token[i] = first_token + row(i) / args.group;
    }
  }

  // Of this thread, in the warpgroup.
  __device__ int row(int i) const { return threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i; }

  // Warpgroups multiply in turns.
  __device__ void take_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(2 * kWarpgroup) : "memory");
  }
  __device__ void pass_turn() const {
    const int next = warpgroup + 1 == S::CONSUMERS ? 0 : warpgroup + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + next), "n"(2 * kWarpgroup) : "memory");
  }

  __device__ void release(uint64_t* empty) const {
    if (lane == 0) arrive(empty);
  }

  // Queues scores = query @ keys^T.
  __device__ void multiply_keys(uint32_t k) {
    products_fence();
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        product<0, 0>(
            scores, squares_descriptor<kTileGroupBytes>(query, chunk * kQueryChunkBytes + 32 * i),
            squares_descriptor<kGroupBytes>(k, chunk * kTileGroupBytes + 32 * i), chunk + i > 0);
      }
    }
    products_commit();
  }

  // Queues sums += weights @ values.
  __device__ void multiply_values(uint32_t v, int add) {
    products_fence();
#pragma unroll
    for (int i = 0; i < S::KEYS / 16; ++i) {
      product<1>(sums, weights[i], squares_descriptor<kGroupBytes>(v, 2 * i * kGroupBytes),
                 i > 0 ? 1 : add);
    }
    products_commit();
  }

  // All CTAs of the cluster fetch into a stage.
  __device__ void release_stage(Ring& ring) const {
    release(ring.empty());
    if (lane > 0 && lane < cluster.size) arrive_at(ring.empty(), cluster.rank ^ lane);
    ring.advance();
  }

  // Tiles [first, last), which only other CTAs of the cluster see.
  __device__ void skip(int first, int last) {
    for (int tile = first; tile < last; ++tile) {
      keys.wait_full();
      values.wait_full();
      __syncwarp();
      release_stage(keys);
      release_stage(values);
    }
  }

  // Returns whether some are large.
  __device__ bool make_weights(const Item& item, int tile) {
    const int start = tile * S::KEYS, column = 2 * (lane % 4);
    const int lowest = item.position + first_token;
    const bool newest_here = start + S::KEYS > lowest;
    if (newest_here) {
      const int newest[2] = {item.position + token[0] - start - column,
                             item.position + token[1] - start - column};
      softmax.hide(scores, [&](int r, int key) { return key > newest[r]; });
    }
    if (args.window > 0 && start <= lowest + tokens - 1 - args.window) {
      const int before = item.position - args.window - start - column;
      const int older[2] = {before + token[0], before + token[1]};
      softmax.hide(scores, [&](int r, int key) { return key <= older[r]; });
    }
    if (newest_here) softmax.settle(scores, args.scale);
    return softmax.step(scores, args.scale);
  }

  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < S::KEYS / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[i][j] = pack(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
      }
    }
  }

  __device__ int head_of(const Item& item, int i) const {
    return item.head * args.group + row(i) % args.group;
  }
  __device__ bool exists(const Item& item, int i) const {
    return row(i) < tokens * args.group && token[i] < item.tokens;
  }

  __device__ float sink(const Item& item, int i) const {
    return args.sinks == nullptr ? -INFINITY
                                 : args.sinks[head_of(item, i)] * kLog2E;
  }

  __device__ void attend(const Item& item) {
    uint64_t* barriers = shared.query_barriers[warpgroup];
    softmax.start();
    int tile = item.own_last - 1;
    const uint32_t k = place_of(shared.keys[keys.index]);
    wait_parity(barriers, query_phase);
    query_phase ^= 1;
    keys.wait_full();
    multiply_keys(k);
    products_wait<0>(scores);
    release_stage(keys);
    make_weights(item, tile);
    pack_weights();
    int add = 0;
#pragma unroll 1
    for (--tile; tile >= item.own_first; --tile, add = 1) step(item, tile, add);
    release(barriers + 1);
    const uint32_t v = place_of(shared.values[values.index]);
    values.wait_full();
    multiply_values(v, add);
    products_wait<0>(sums);
    release_stage(values);
  }

  // Scores and weights of a tile, while the last one's are multiplied with its values.
  __device__ void step(const Item& item, int tile, int add) {
    const uint32_t k = place_of(shared.keys[keys.index]);
    const uint32_t v = place_of(shared.values[values.index]);
    keys.wait_full();
    take_turn();
    multiply_keys(k);
    values.wait_full();
    multiply_values(v, add);
    pass_turn();
    products_wait<1>(scores);
    release_stage(keys);
    const bool large = make_weights(item, tile);
    // The branch on what softmax ends with keeps the compiler from moving the wait for products
    // ahead of softmax.
    if (large) asm volatile("nanosleep.u32 0;");
    products_wait<0>(sums);
    release_stage(values);
    if (large) softmax.lower(scores, sums);
    pack_weights();
  }

  __device__ void write(const Item& item) {
    uint32_t lost = 0;  // rows whose weights a float could not hold: bits lane + i
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = softmax.sum_of(i);
      lost |= __ballot_sync(~0u, lane % 4 == 0 && exists(item, i) && total == INFINITY) << i;
      if (args.sinks != nullptr) total += exp2_fast(sink(item, i) - softmax.peak[i]);
      const float factor = args.v_scale / (total > 0.0f ? total : 1.0f);
      const int64_t place = item.token + token[i], head = head_of(item, i);
      const bool kept = exists(item, i);
      const auto* gate = static_cast<const __nv_bfloat16*>(args.gate);
      if (gate != nullptr) gate += place * args.gate_token + head * args.gate_head;
      auto* out = static_cast<__nv_bfloat16*>(args.out) + place * args.out_token +
                  head * args.out_head;
#pragma unroll
      for (int g = 0; g < S::HEAD_DIM / 8; g += 4) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 4 * (g + j) + 2 * i;
          word[j] = pack(sums[at] * factor, sums[at + 1] * factor);
        }
        transpose_words(word);
        if (!kept) continue;
        const int column = 8 * (g + lane % 4);
        if (gate != nullptr) {
          const uint4 by = *reinterpret_cast<const uint4*>(gate + column);
          word[0] = gated(word[0], by.x);
          word[1] = gated(word[1], by.y);
          word[2] = gated(word[2], by.z);
          word[3] = gated(word[3], by.w);
        }
        *reinterpret_cast<uint4*>(out + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
    for (__syncwarp(); lost != 0; lost &= lost - 1) attend_again(item, __ffs(lost) - 1);
  }

  // The row of a bit of `lost`.
  __device__ void attend_again(const Item& item, int bit) const {
    const int found = threadIdx.x / 32 % 4 * 16 + bit / 4 + 8 * (bit % 4);
    const int ahead = first_token + found / args.group;
    const int head = item.head * args.group + found % args.group;
    attend_row<S>(args, {item.token + ahead, item.position + ahead, head, item.head});
  }

  __device__ void run() {
    if (warpgroup + 1 == S::CONSUMERS) pass_turn();
    while (true) {
      items.wait_full();
      Item item = shared.items[items.index];
      item.first = uniform(item.first), item.last = uniform(item.last);
      item.own_first = uniform(item.own_first), item.own_last = uniform(item.own_last);
      item.head = uniform(item.head), item.position = uniform(item.position);
      item.tokens = uniform(item.tokens);
      __syncwarp();
      release(items.empty());
      items.advance();
      if (item.head < 0) break;
      skip(item.own_last, item.last);
      if (item.tokens > 0) {
        attend(item);
        write(item);
      }
      skip(item.first, item.own_first);
    }
  }
};

}  // namespace vllm_cuda::prefill_attention

namespace vllm_cuda {

template <typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    prefill_attention_kernel(const PrefillAttentionArgs args,
                             const __grid_constant__ prefill_attention::Maps maps, int rows,
                             int cluster_size) {
  using namespace prefill_attention;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<S>*>(memory);
  constexpr int kWarps = 4 * S::CONSUMERS, kProducers = S::FP8 ? S::CONVERTERS : 1;
  const Cluster cluster{cluster_size, cluster_size > 1 ? cluster_rank() : 0};
  if (threadIdx.x == 0) {
    Ring(shared.key_barriers, S::STAGES).init(cluster.size * kWarps, kProducers);
    Ring(shared.value_barriers, S::STAGES).init(cluster.size * kWarps, kProducers);
    Ring(shared.item_barriers, kItems).init(kWarps + S::CONVERTERS);
    if constexpr (S::FP8) {
      for (int i = 0; i < S::STAGES; ++i) {
        init_barrier(shared.key_barriers + 2 * S::STAGES + i, 1);
        init_barrier(shared.value_barriers + 2 * S::STAGES + i, 1);
      }
    }
    for (auto& barriers : shared.query_barriers) Ring(barriers, 1).init(4);
    for (auto& barrier : shared.landed) init_barrier(&barrier, 1);
    Ring(shared.claim_barriers, kClaims).init(max(cluster.size - 1, 1));
    barriers_fence();
  }
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    if (threadIdx.x < 32) {
      Producer<S>(args, maps, shared, cluster).run(rows);
    } else if constexpr (S::FP8) {
      Converter<S>(shared).run();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    Consumer<S>(args, shared, cluster).run();
  }
  __syncwarp();
  cluster_sync();  // others may still arrive here
}

}  // namespace vllm_cuda
