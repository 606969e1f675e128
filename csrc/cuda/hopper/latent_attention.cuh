// SPDX-License-Identifier: Apache-2.0
// Attention of few queries to a paged cache of latents: a row is key and value of all heads, so the
// rows of a sequence's query, its tokens times heads, share every tile of keys that is read.
//
// A warp streams tiles ahead, across shares. One warpgroup multiplies the scores of a tile and
// makes weights of them while two others multiply the weights of the tile before with its values,
// half the dimensions each: weights keep the layout of registers that both products have. Products
// have 64 rows; where the query has fewer, the rest is of no use but takes no memory.
// Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1), its peaks raised only by
// scores far above them. The shares of a sequence follow from its length and host integers, and
// all sums are in a fixed order: a row's bits do not depend on which block of threads computes it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "latent_attention_scores.cuh"
#include "latent_attention_values.cuh"

namespace vllm_cuda::latent_attention {

constexpr int kThreads = 4 * kWarpgroup;
// Registers a thread has: of the producer, of scores, of values.
constexpr int kProducerRegisters = 40, kScoresRegisters = 104, kValuesRegisters = 184;
static_assert(kProducerRegisters + kScoresRegisters + 2 * kValuesRegisters == 512);

// Of the cache, for boxes of a half's columns and of the shared dimensions.
struct Maps {
  CUtensorMap half, end;
};

template <int ROWS>
struct Producer {
  using Mem = Memory<ROWS>;

  const LatentAttentionArgs& args;
  const Maps& maps;
  char* shared;
  const int box_keys, lane;
  Ring halves, ends;

  __device__ Producer(const LatentAttentionArgs& args_, const Maps& maps_, char* shared_,
                      int box_keys_)
      : args(args_), maps(maps_), shared(shared_), box_keys(box_keys_), lane(threadIdx.x % 32),
        halves(ring_of_halves<ROWS>(shared_)), ends(ring_of_ends<ROWS>(shared_)) {}

  __device__ void run() {
#pragma unroll 1
    for (int i = blockIdx.x; i < num_shares(args); i += gridDim.x) {
      const Share share(args, i, ROWS);
      if (!share.exists) continue;
      const int* table = args.table + share.seq * args.table_stride;
      // A lane copies the box of a tile that it is the number of.
      const auto block_of = [&](int tile) {
        const int key = share.first + tile * kKeys + lane * box_keys;
        return lane * box_keys < kKeys && key < share.last ? table[key / args.block_size] : 0;
      };
      int next = block_of(0);
#pragma unroll 1
      for (int tile = 0; tile < share.tiles(); ++tile) {
        const int block = next, start = share.first + tile * kKeys;
        next = block_of(tile + 1);
        const int boxes = ceil_div(min(share.last - start, kKeys), box_keys);
        for (int half = 0; half < 2; ++half)
          load(halves, &maps.half, shared + halves.index * kHalfBytes, kHalfChunks,
               half * kHalfChunks, block, start, boxes);
        load(ends, &maps.end, shared + Mem::kEnd + ends.index * kChunkBytes, 1, 2 * kHalfChunks,
             block, start, boxes);
      }
    }
  }

  // Some chunks of columns of a tile, from `first` on.
  __device__ void load(Ring& ring, const CUtensorMap* map, char* stage, int chunks, int first,
                       int block, int start, int boxes) {
    const int box_bytes = box_keys * kTileRowBytes * chunks;
    ring.wait_empty();
    if (lane == 0) ring.expect(boxes * box_bytes);
    __syncwarp();
    if (lane < boxes)
      load_squares(stage + lane * box_bytes, map, first,
                   (start + lane * box_keys) % args.block_size / 8, block, ring.full());
    __syncwarp();
    ring.advance();
  }
};

template <int ROWS>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_kernel(const LatentAttentionArgs args, const __grid_constant__ Maps maps,
                            const int box_keys, const bool paired) {
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x == 0) {
    ring_of_halves<ROWS>(shared).init(4);
    ring_of_ends<ROWS>(shared).init(4);
    Pair<ROWS>(shared).init();
  }
  __syncthreads();
  if (paired) cluster_arrive();
  launch_dependents();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x < 32) Producer<ROWS>(args, maps, shared, box_keys).run();
  } else if (warpgroup == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kScoresRegisters));
    Scores<ROWS>(args, shared, paired).run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kValuesRegisters));
    Values<ROWS>(args, shared, warpgroup - 2, paired).run();
  }
}

}  // namespace vllm_cuda::latent_attention
