// SPDX-License-Identifier: Apache-2.0
// What the scan of Kimi delta attention keeps in shared memory, and how it comes there.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kda_scan.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ptx.cuh"

namespace vllm_cuda {

struct KdaScanMaps {
  CUtensorMap queries, keys, ends, v, T, P;
};

namespace kda_scan {

constexpr int kChunk = 64;
constexpr int kHead = 128;
constexpr int kColumns = 64;  // of dv, per CTA
constexpr int kTiles = kHead / kColumns;
constexpr int kConsumers = 128;

using Tile = __nv_bfloat16[kChunk][64];

struct alignas(1024) Stage {
  Tile keys[2], queries[2], ends[2], v;  // rows are tokens; 64 columns of the head each
  Tile T, P;
};

template <int STAGES>
struct Shared {
  Stage stages[STAGES];
  uint4 out[kConsumers / 32][kChunk][2];  // per warp
  float decays[STAGES][kHead];
  uint64_t barriers[2 * STAGES];
};

// What a CTA works on.
struct Place {
  int part;                   // which of the dv tiles of all heads
  int first, length, chunks;  // tokens from the batch's first on, chunks of 64
  int matrix;                 // of the first chunk's factors
  int64_t state;              // elements from the pool's beginning
  bool carried;
};

__device__ inline bool find_place(const KdaScanArgs& args, Place& place) {
  const int seq = blockIdx.z;
  const int index = args.state_indices[seq];
  place.first = args.starts[seq];
  place.length = args.starts[seq + 1] - place.first;
  if (index < 0 || place.length <= 0) return false;
  const int head = blockIdx.y;
  place.part = head * kTiles + blockIdx.x;
  place.chunks = (place.length + kChunk - 1) / kChunk;
  place.matrix = args.offsets[seq] * args.heads + head;
  place.state = index * args.state_stride + int64_t{place.part} * kColumns * kHead;
  place.carried = args.carried[seq];
  return true;
}

// One thread fetches every chunk.
template <int STAGES>
__device__ void produce(const KdaScanMaps& maps, const KdaScanArgs& args, const Place& place,
                        Shared<STAGES>& shared) {
  Ring ring(shared.barriers, STAGES);
  for (int chunk = 0; chunk < place.chunks; ++chunk, ring.advance()) {
    Stage& stage = shared.stages[ring.index];
    const int token = place.first + chunk * kChunk;
    const int matrix = place.matrix + chunk * args.heads;
    ring.wait_empty();
    ring.expect(sizeof(Stage) + sizeof(shared.decays[0]));
    load_tile(stage.keys, &maps.keys, 0, matrix * kChunk, 0, ring.full());
    load_tile(stage.v, &maps.v, 0, token, place.part, ring.full());
    load_tile(stage.T, &maps.T, 0, 0, matrix, ring.full());
    load_tile(stage.queries, &maps.queries, 0, matrix * kChunk, 0, ring.full());
    bulk_copy(shared.decays[ring.index], args.decays + int64_t{matrix} * kHead,
              sizeof(shared.decays[0]), ring.full());
    load_tile(stage.ends, &maps.ends, 0, matrix * kChunk, 0, ring.full());
    load_tile(stage.P, &maps.P, 0, 0, matrix, ring.full());
  }
}

// Values past a sequence's end belong to others: what they hold, NaN included, must not count.
__device__ inline void clear_rows(Stage& stage, int length, int thread) {
  constexpr int kPieces = kTileRowBytes / sizeof(uint4);
  for (int i = length * kPieces + thread; i < kChunk * kPieces; i += kConsumers) {
    reinterpret_cast<uint4*>(stage.v)[i] = uint4{};
  }
  shared_fence();
  consumers_sync<kConsumers>();
}

}  // namespace kda_scan

}  // namespace vllm_cuda
