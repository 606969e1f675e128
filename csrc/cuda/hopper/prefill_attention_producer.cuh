// SPDX-License-Identifier: Apache-2.0
// The warp that claims items of prefill attention and fetches their queries, keys and values.
#pragma once

#include "hopper/prefill_attention_items.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::prefill_attention {

__device__ inline void expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

template <typename S>
struct Producer {
  static constexpr int kBoxes = S::KEYS / S::BOX_KEYS;
  static constexpr uint32_t kTileBytes = kBoxes * S::BOX_BYTES;
  static constexpr int kBoxElements = S::BOX_KEYS * S::HEAD_DIM;
  static constexpr int kHeadChunks = S::HEAD_DIM * (S::FP8 ? 1 : 2) / S::ROW_BYTES;

  const PrefillAttentionArgs& args;
  const Maps& maps;
  Shared<S>& shared;
  const int lane;
  Ring keys, values, items;
  uint32_t query_phase = 0, landed_phase = 0;
  const int* blocks = nullptr;   // of the item's sequence
  int oldest = 0, seq_len = 0;  // its keys that exist are [oldest, seq_len)

  __device__ Producer(const PrefillAttentionArgs& args_, const Maps& maps_, Shared<S>& shared_)
      : args(args_), maps(maps_), shared(shared_), lane(threadIdx.x % 32),
        keys(shared_.key_barriers, S::STAGES), values(shared_.value_barriers, S::STAGES),
        items(shared_.item_barriers, kItems) {}

  // The block of this lane's box of a tile. Where nothing is kept it is one behind the last, which
  // reads as zeros.
  __device__ int block_of(int tile) const {
    const int key = tile * S::KEYS + lane * S::BOX_KEYS;
    const bool exists = lane < kBoxes && key < seq_len && key + S::BOX_KEYS > oldest;
    return exists ? blocks[key / args.block_size] : args.num_blocks;
  }

  __device__ void load_boxes(__nv_bfloat16* to, const CUtensorMap* map, const Item& item, int tile,
                             int block, uint64_t* barrier) const {
    const int key = tile * S::KEYS + lane * S::BOX_KEYS;
    if (lane == 0) expect(barrier, kTileBytes);
    __syncwarp();
    if (lane < kBoxes) {
      load_squares(to + lane * kBoxElements + (S::FP8 ? kBoxElements / 2 : 0), map,
               item.head * kHeadChunks, key % args.block_size / 8, block, barrier);
    }
    __syncwarp();
  }

  __device__ void load_keys(const Item& item, int tile, int block) {
    keys.wait_empty();
    load_boxes(shared.keys[keys.index], &maps.keys, item, tile, block, fetched<S>(keys));
    keys.advance();
  }

  __device__ void load_values(const Item& item, int tile, int block) {
    const int start = tile * S::KEYS;
    values.wait_empty();
    __nv_bfloat16* to = shared.values[values.index];
    if (start >= oldest && start + S::KEYS <= seq_len) {
      load_boxes(to, &maps.values, item, tile, block, fetched<S>(values));
    } else {
      load_boxes(to, &maps.values, item, tile, block, &shared.landed);
      wait_parity(&shared.landed, landed_phase);
      landed_phase ^= 1;
      clear(to, oldest - start, seq_len - start);
      if (lane == 0) arrive(fetched<S>(values));
    }
    values.advance();
  }

  // Values of keys that do not exist may be any bits: a weight of zero would not do.
  __device__ void clear(__nv_bfloat16* tile, int begin, int end) const {
    constexpr int kGroup = 8 * S::BOX_BYTES / S::BOX_KEYS / 16;  // pieces of 8 tokens
    for (int i = lane; i < S::KEYS / 8 * kGroup; i += 32) {
      const int group = i / kGroup, key = group * 8 + i / (S::ROW_BYTES / 16) % 8;
      const int piece = S::FP8 ? i + (group + 1) * kGroup : i;
      if (key < begin || key >= end) reinterpret_cast<uint4*>(tile)[piece] = make_uint4(0, 0, 0, 0);
    }
    shared_fence();
    __syncwarp();
  }

  __device__ void load_query(const Item& item) {
    const int tokens = warpgroup_tokens(args.group);
    if (lane < S::CONSUMERS) {
      uint64_t* barriers = shared.query_barriers[lane];
      wait_parity(barriers + 1, query_phase ^ 1);
      expect(barriers, tokens * args.group * 2 * S::HEAD_DIM);
      for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
        load_tile(shared.query[lane][chunk], &maps.query, chunk * 64, item.head * args.group,
                  item.token + lane * tokens, barriers);
      }
    }
    query_phase ^= 1;
    __syncwarp();
  }

  __device__ void publish(const Item& item) {
    items.wait_empty();
    if (lane == 0) {
      shared.items[items.index] = item;
      arrive(items.full());
    }
    __syncwarp();
    items.advance();
  }

  // Keys are a tile ahead of values, as they are needed.
  __device__ void load(const Item& item, int seq) {
    blocks = args.table + seq * args.table_stride;
    seq_len = args.seq_lens[seq];
    const int queries = args.starts[seq + 1] - args.starts[seq];
    oldest = args.window > 0 ? max(seq_len - queries - args.window + 1, 0) : 0;
    int tile = item.last - 1, block = block_of(tile);
    load_keys(item, tile, block);
    load_query(item);
    while (tile > item.first) {
      const int next = block_of(tile - 1);
      load_keys(item, tile - 1, next);
      load_values(item, tile, block);
      block = next;
      --tile;
    }
    load_values(item, tile, block);
  }

  __device__ void run(int rows) {
    const int count = rows * args.kv_heads;
    int index = blockIdx.x;
    while (index < count) {
      int claimed = 0;
      if (lane == 0) claimed = gridDim.x + atomicAdd(args.counter, 1);
      int seq;
      const Item item = item_at<S>(args, rows, index, seq);
      if (item.tokens > 0) {
        publish(item);
        load(item, seq);
      }
      index = __shfl_sync(~0u, claimed, 0);
    }
    // The last CTA to claim in vain leaves the counter as it was.
    if (lane == 0 && index == count + static_cast<int>(gridDim.x) - 1) *args.counter = 0;
    Item end{};
    end.head = -1;
    publish(end);
  }
};

}  // namespace vllm_cuda::prefill_attention
