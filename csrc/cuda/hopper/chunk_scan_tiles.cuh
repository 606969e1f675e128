// SPDX-License-Identifier: Apache-2.0
// What a scan keeps in shared memory, and which sequence and head a CTA works on.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "chunk_scan.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ptx.cuh"

namespace vllm_cuda::chunk_scan {

constexpr int kChunk = 64;
constexpr int kHead = 128;
constexpr int kColumns = 64;  // of dv, per warpgroup
constexpr int kTiles = kHead / kColumns;
constexpr int kWarpgroup = 128;
template <typename Rule>
constexpr int kConsumers = Rule::kWarpgroups * kWarpgroup;

using Tile = __nv_bfloat16[kChunk][64];

template <typename Rule>
struct Shared {
  typename Rule::Stage stages[Rule::kStages];
  uint4 out[kConsumers<Rule> / 32][kChunk][2];  // per warp
  typename Rule::Rows rows[Rule::kStages];
  uint64_t barriers[2 * Rule::kStages];
};

// What a CTA works on.
struct Place {
  int key_head, part;         // part: the first of its dv tiles, of those of all value heads
  int first, length, chunks;  // tokens from the batch's first on, chunks of 64
  int matrix;                 // of the first chunk's T, P and rows
  int64_t state;              // elements from the pool's beginning
  bool carried;
};

template <typename Rule>
__device__ bool find_place(const typename Rule::Args& args, Place& place) {
  const int seq = blockIdx.z;
  const int index = args.state_indices[seq];
  place.first = args.starts[seq];
  place.length = args.starts[seq + 1] - place.first;
  if (index < 0 || place.length <= 0) return false;
  const int head = blockIdx.y;
  place.key_head = Rule::key_head(args, head);
  place.part = head * kTiles + blockIdx.x * Rule::kWarpgroups;
  place.chunks = (place.length + kChunk - 1) / kChunk;
  place.matrix = args.offsets[seq] * args.heads + head;
  place.state = index * args.state_stride + int64_t{place.part} * kColumns * kHead;
  place.carried = args.carried[seq];
  return true;
}

// One thread fetches every chunk.
template <typename Rule>
__device__ void produce(const typename Rule::Maps& maps, const typename Rule::Args& args,
                        const Place& place, Shared<Rule>& shared) {
  Ring ring(shared.barriers, Rule::kStages);
  for (int chunk = 0; chunk < place.chunks; ++chunk, ring.advance()) {
    auto& rows = shared.rows[ring.index];
    const int matrix = place.matrix + chunk * args.heads;
    ring.wait_empty();
    ring.expect(sizeof(typename Rule::Stage) + sizeof(rows));
    Rule::fetch(maps, args, place, place.first + chunk * kChunk, matrix,
                shared.stages[ring.index], rows, ring.full());
  }
}

// The rows past a sequence's end belong to others: what they hold, NaN included, must not count.
template <typename Rule>
__device__ void clear_rows(typename Rule::Stage& stage, int length, int thread) {
  constexpr int kPieces = kTileRowBytes / sizeof(uint4);
  for (int i = length * kPieces + thread; i < kChunk * kPieces; i += kConsumers<Rule>) {
    Rule::for_tiles_of_tokens(stage, [i](Tile& tile) { reinterpret_cast<uint4*>(tile)[i] = {}; });
  }
  shared_fence();
  consumers_sync<kConsumers<Rule>>();
}

}  // namespace vllm_cuda::chunk_scan
