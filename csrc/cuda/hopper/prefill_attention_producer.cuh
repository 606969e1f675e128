// SPDX-License-Identifier: Apache-2.0
// The warp that claims items of prefill attention and fetches their queries, keys and values.
#pragma once

#include "hopper/boxes.cuh"
#include "hopper/prefill_attention_items.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::prefill_attention {

// 16 tokens of a head: groups of 8 tokens, chunks of 128 bytes, rows. All CTAs of a cluster get
// them at the same place and count them at their own barrier.
__device__ inline void load_box(void* to, const CUtensorMap* map, int chunk, int group, int block,
                                uint64_t* barrier, int ctas) {
  if (ctas > 1) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %2, %3, %4, %5}], [%6], %7;" ::"r"(
            shared_address(to)),
        "l"(map), "r"(0), "r"(chunk), "r"(group), "r"(block), "r"(shared_address(barrier)),
        "h"(static_cast<uint16_t>((1 << ctas) - 1))
        : "memory");
    return;
  }
  load_squares(to, map, chunk, group, block, barrier);
}

// Stores an int in CTA `rank` and counts its bytes at a barrier there.
__device__ inline void send(int rank, int value, int* to, uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b32 place, word;\n"
      "mapa.shared::cluster.u32 place, %0, %3;\n"
      "mapa.shared::cluster.u32 word, %1, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [place], %2, [word];\n}"
      ::"r"(shared_address(to)),
      "r"(shared_address(barrier)), "r"(value), "r"(rank)
      : "memory");
}

// Of tokens that one copy brings.
struct Place {
  int block, group;  // group of 8 tokens in the block
};

template <typename S>
struct Producer {
  static constexpr int kBoxes = S::KEYS / S::BOX_KEYS;
  static constexpr uint32_t kTileBytes = kBoxes * S::BOX_BYTES;
  static constexpr int kBoxElements = S::BOX_KEYS * S::HEAD_DIM;
  static constexpr int kHeadChunks = S::HEAD_DIM * (S::FP8 ? 1 : 2) / S::ROW_BYTES;

  const PrefillAttentionArgs& args;
  const Maps& maps;
  Shared<S>& shared;
  const Cluster cluster;
  const int lane;
  Ring keys, values, items, claims;
  uint32_t query_phase = 0, landed_phases = 0;
  const int* blocks = nullptr;   // of the item's sequence
  int oldest = 0, seq_len = 0;  // its keys that exist are [oldest, seq_len)

  __device__ Producer(const PrefillAttentionArgs& args_, const Maps& maps_, Shared<S>& shared_,
                      Cluster cluster_)
      : args(args_), maps(maps_), shared(shared_), cluster(cluster_), lane(threadIdx.x % 32),
        keys(shared_.key_barriers, S::STAGES), values(shared_.value_barriers, S::STAGES),
        items(shared_.item_barriers, kItems), claims(shared_.claim_barriers, kClaims) {}

  // Of this lane's box of a tile. Where nothing is kept its block is one behind the last, which
  // reads as zeros.
  __device__ Place place_of_box(int tile) const {
    const int key = tile * S::KEYS + lane * S::BOX_KEYS, block = key / args.block_size;
    const bool exists = lane < kBoxes && key < seq_len && key + S::BOX_KEYS > oldest;
    return {exists ? blocks[block] : args.num_blocks, (key - block * args.block_size) / 8};
  }

  __device__ void load_boxes(__nv_bfloat16* to, const CUtensorMap* map, int head, Place place,
                             uint64_t* barrier) const {
    if (lane == 0) arrive_expecting(barrier, kTileBytes);
    __syncwarp();
    if (lane < kBoxes && (lane & (cluster.size - 1)) == cluster.rank) {
      load_box(to + lane * kBoxElements + (S::FP8 ? kBoxElements / 2 : 0), map,
               head * kHeadChunks, place.group, place.block, barrier, cluster.size);
    }
    __syncwarp();
  }

  __device__ void load_keys(int head, Place place) {
    keys.wait_empty();
    load_boxes(shared.keys[keys.index], &maps.keys, head, place, fetched<S>(keys));
    keys.advance();
  }

  __device__ void load_values(int head, int tile, Place place) {
    const int start = tile * S::KEYS;
    values.wait_empty();
    __nv_bfloat16* to = shared.values[values.index];
    if (start >= oldest && start + S::KEYS <= seq_len) {
      load_boxes(to, &maps.values, head, place, fetched<S>(values));
    } else {
      uint64_t* landed = shared.landed + values.index;
      load_boxes(to, &maps.values, head, place, landed);
      wait_parity(landed, landed_phases >> values.index & 1);
      landed_phases ^= 1 << values.index;
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
    if (item.tokens <= 0) return;
    const int tokens = warpgroup_tokens(args.group);
    if (lane < S::CONSUMERS) {
      uint64_t* barriers = shared.query_barriers[lane];
      wait_parity(barriers + 1, query_phase ^ 1);
      arrive_expecting(barriers, tokens * args.group * 2 * S::HEAD_DIM);
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

  // What a cluster's first CTA claims is the next item of all.
  __device__ void pass_on(int claimed) {
    if (cluster.rank > 0 || cluster.size == 1) return;
    const int next = __shfl_sync(~0u, claimed, 0);
    claims.wait_empty();
    if (lane > 0 && lane < cluster.size) {
      send(lane, next, shared.claims + claims.index, claims.full());
    }
    __syncwarp();
    claims.advance();
  }
  __device__ int passed_on() {
    if (lane == 0) arrive_expecting(claims.full(), sizeof(int));
    claims.wait_full();
    const int next = shared.claims[claims.index];
    __syncwarp();
    if (lane == 0) arrive_at(claims.empty(), 0);
    claims.advance();
    return next;
  }

  // Keys are a tile ahead of values, as they are needed.
  __device__ void load(const Item& item, const Sequence& sequence, int claimed) {
    blocks = args.table + sequence.index * args.table_stride;
    seq_len = sequence.len;
    oldest = args.window > 0 ? max(seq_len - sequence.queries - args.window + 1, 0) : 0;
    int tile = item.last - 1;
    Place place = place_of_box(tile);
    load_keys(item.head, place);
    load_query(item);
    pass_on(claimed);
    while (tile > item.first) {
      const Place next = place_of_box(tile - 1);
      load_keys(item.head, next);
      load_values(item.head, tile, place);
      place = next;
      --tile;
    }
    load_values(item.head, tile, place);
  }

  __device__ void run(int rows) {
    const int count = rows * args.kv_heads, clusters = gridDim.x / cluster.size;
    int index = blockIdx.x / cluster.size;
    while (index < count) {
      int claimed = 0;
      if (cluster.rank == 0 && lane == 0) claimed = clusters + atomicAdd(args.counter, 1);
      Sequence sequence;
      const Item item = item_at<S>(args, cluster, rows, index, sequence);
      if (item.first < item.last) {
        publish(item);
        load(item, sequence, claimed);
      } else {
        pass_on(claimed);
      }
      index = cluster.rank == 0 ? __shfl_sync(~0u, claimed, 0) : passed_on();
    }
    // The last cluster to claim in vain leaves the counter as it was.
    if (cluster.rank == 0 && lane == 0 && index == count + clusters - 1) *args.counter = 0;
    Item end{};
    end.head = -1;
    publish(end);
  }
};

}  // namespace vllm_cuda::prefill_attention
