// SPDX-License-Identifier: Apache-2.0
// Attention of long queries over the paged cache: one persistent CTA per multiprocessor (sm_90a).
//
// As FlashAttention-3 (arXiv 2407.08608): a producer warp fetches queries, keys and values through
// rings of stages, where converter warps make bf16 of e4m3; each consumer warpgroup has 64 query
// rows, whose scores with the next keys are multiplied while the softmax of the last ones runs, and
// warpgroups take turns to multiply so that one's softmax hides behind the other's products.
//
// A row sees tiles of keys that begin at multiples of their length, the last first, whatever its
// neighbours see: its bits follow from its own query, keys and values alone.
#pragma once

#include "hopper/prefill_attention_converter.cuh"
#include "hopper/prefill_attention_producer.cuh"
#include "hopper/prefill_attention_softmax.cuh"
#include "hopper/wgmma.cuh"

namespace vllm_cuda::prefill_attention {

template <typename S>
struct Consumer {
  static constexpr uint32_t kGroupBytes = S::CHUNKS * kTileGroupBytes;  // of 8 tokens
  static constexpr uint32_t kQueryChunkBytes = kQueryRows * kTileRowBytes;

  const PrefillAttentionArgs& args;
  Shared<S>& shared;
  const int warpgroup, lane;
  Ring keys, values, items;
  uint32_t query_phase = 0;
  int row[2], token[2];  // of this thread in the warpgroup; tokens from the item's first
  float scores[S::KEYS / 2], sums[S::HEAD_DIM / 2];
  uint32_t weights[S::KEYS / 16][4];
  Softmax<S::KEYS> softmax;

  __device__ Consumer(const PrefillAttentionArgs& args_, Shared<S>& shared_)
      : args(args_), shared(shared_), warpgroup(threadIdx.x / kWarpgroup - 1),
        lane(threadIdx.x % 32), keys(shared_.key_barriers, S::STAGES),
        values(shared_.value_barriers, S::STAGES), items(shared_.item_barriers, kItems) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i;
      token[i] = warpgroup * warpgroup_tokens(args.group) + row[i] / args.group;
    }
  }

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
  __device__ void multiply_keys() {
    const uint64_t q = tile_descriptor(shared.query[warpgroup]);
    const uint64_t k =
        squares_descriptor(shared.keys[keys.index], kTileGroupBytes, kGroupBytes);
    products_fence();
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        product<0, 0>(scores, advance(q, chunk * kQueryChunkBytes + 32 * i),
                      advance(k, chunk * kTileGroupBytes + 32 * i), chunk + i > 0);
      }
    }
    products_commit();
  }

  // Queues sums += weights @ values.
  __device__ void multiply_values(int add) {
    const uint64_t v =
        squares_descriptor(shared.values[values.index], kTileGroupBytes, kGroupBytes);
    products_fence();
#pragma unroll
    for (int i = 0; i < S::KEYS / 16; ++i) {
      product<1>(sums, weights[i], advance(v, 2 * i * kGroupBytes), i > 0 ? 1 : add);
    }
    products_commit();
  }

  __device__ void release_keys() {
    release(keys.empty());
    keys.advance();
  }
  __device__ void release_values() {
    release(values.empty());
    values.advance();
  }

  __device__ void make_weights(const Item& item, int tile) {
    const int start = tile * S::KEYS, column = 2 * (lane % 4);
    const int tokens = warpgroup_tokens(args.group);
    const int lowest = item.position + warpgroup * tokens;
    if (start + S::KEYS - 1 > lowest) {
      const int newest[2] = {item.position + token[0] - start - column,
                             item.position + token[1] - start - column};
      softmax.hide(scores, [&](int r, int key) { return key > newest[r]; });
    }
    if (args.window > 0 && start <= lowest + tokens - 1 - args.window) {
      const int before = item.position - args.window - start - column;
      const int older[2] = {before + token[0], before + token[1]};
      softmax.hide(scores, [&](int r, int key) { return key <= older[r]; });
    }
    softmax.step(scores, args.scale);
  }

  // Never true: but the branch on what softmax ends with keeps the compiler from moving the wait for
  // products ahead of softmax.
  __device__ void end_softmax() const {
    if (softmax.total[0] + softmax.total[1] < 0.0f) asm volatile("nanosleep.u32 0;");
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

  __device__ void fade_sums() {
    if (!__any_sync(~0u, softmax.fade[0] != 1.0f || softmax.fade[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < S::HEAD_DIM / 2; ++i) sums[i] *= softmax.fade[i / 2 % 2];
  }

  __device__ int head_of(const Item& item, int i) const {
    return item.head * args.group + row[i] % args.group;
  }
  __device__ bool exists(const Item& item, int i) const {
    return row[i] < warpgroup_tokens(args.group) * args.group && token[i] < item.tokens;
  }

  __device__ float sink(const Item& item, int i) const {
    return args.sinks == nullptr ? -INFINITY
                                 : args.sinks[head_of(item, i)] * 1.4426950408889634f;
  }

  __device__ void attend(const Item& item) {
    uint64_t* query = shared.query_barriers[warpgroup];
    softmax.start(sink(item, 0), sink(item, 1));
    int tile = item.last - 1;
    wait_parity(query, query_phase);
    query_phase ^= 1;
    keys.wait_full();
    multiply_keys();
    products_wait<0>(scores);
    release_keys();
    make_weights(item, tile);
    pack_weights();
    int add = 0;
#pragma unroll 1
    for (--tile; tile >= item.first; --tile, add = 1) step(item, tile, add);
    release(query + 1);
    values.wait_full();
    multiply_values(add);
    products_wait<0>(sums);
    release_values();
  }

  // Scores and weights of a tile, while the last one's are multiplied with its values.
  __device__ void step(const Item& item, int tile, int add) {
    keys.wait_full();
    take_turn();
    multiply_keys();
    values.wait_full();
    multiply_values(add);
    pass_turn();
    products_wait<1>(scores);
    release_keys();
    make_weights(item, tile);
    end_softmax();
    products_wait<0>(sums);
    release_values();
    fade_sums();
    pack_weights();
  }

  __device__ void write(const Item& item) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = softmax.sum_of(i);
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
  }

  __device__ void run() {
    if (warpgroup + 1 == S::CONSUMERS) pass_turn();
    while (true) {
      items.wait_full();
      const Item item = shared.items[items.index];
      __syncwarp();
      release(items.empty());
      items.advance();
      if (item.head < 0) break;
      attend(item);
      write(item);
    }
  }
};

}  // namespace vllm_cuda::prefill_attention

namespace vllm_cuda {

template <typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    prefill_attention_kernel(const PrefillAttentionArgs args,
                             const __grid_constant__ prefill_attention::Maps maps, int rows) {
  using namespace prefill_attention;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<S>*>(memory);
  constexpr int kWarps = 4 * S::CONSUMERS, kProducers = S::FP8 ? S::CONVERTERS : 1;
  if (threadIdx.x == 0) {
    Ring(shared.key_barriers, S::STAGES).init(kWarps, kProducers);
    Ring(shared.value_barriers, S::STAGES).init(kWarps, kProducers);
    Ring(shared.item_barriers, kItems).init(kWarps + S::CONVERTERS);
    if constexpr (S::FP8) {
      for (int i = 0; i < S::STAGES; ++i) {
        init_barrier(shared.key_barriers + 2 * S::STAGES + i);
        init_barrier(shared.value_barriers + 2 * S::STAGES + i);
      }
    }
    for (auto& barriers : shared.query_barriers) Ring(barriers, 1).init(4);
    init_barrier(&shared.landed);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    if (threadIdx.x < 32) {
      Producer<S>(args, maps, shared).run(rows);
    } else if constexpr (S::FP8) {
      Converter<S>(shared).run();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    Consumer<S>(args, shared).run();
  }
}

}  // namespace vllm_cuda
