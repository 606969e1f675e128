// SPDX-License-Identifier: Apache-2.0
// Chunked Kimi delta attention as a rule of `chunk_scan`; the maths and the letters are those of
// fla/ops/kda/chunk_scan.py.
#pragma once

#include "hopper/chunk_scan.cuh"
#include "kda_scan.h"

namespace vllm_cuda {

// Two warpgroups of a CTA read a head's factors once, but share the tensor cores: one is faster
// while there are multiprocessors left for the other half.
template <int WARPGROUPS>
struct KdaScan {
  using Args = KdaScanArgs;
  using Tile = chunk_scan::Tile;
  static constexpr int kChunk = chunk_scan::kChunk, kWarpgroups = WARPGROUPS;
  static constexpr int kStages = WARPGROUPS > 1 ? 2 : 3;  // what shared memory has room for

  struct Maps {
    CUtensorMap queries, keys, ends, v, T, P;
  };
  struct alignas(1024) Stage {
    // Rows are tokens; 64 columns of the head each.
    Tile keys[2], queries[2], ends[2], v[kWarpgroups];
    Tile T, P;
  };
  using Rows = float[1][chunk_scan::kHead];

  static __device__ int key_head(const Args&, int head) { return head; }
  static __device__ void fetch(const Maps& maps, const Args& args, const chunk_scan::Place& place,
                               int token, int matrix, Stage& stage, Rows& rows, uint64_t* full) {
    load_tile(stage.keys, &maps.keys, 0, matrix * kChunk, 0, full);
    load_tile(stage.v, &maps.v, 0, token, place.part, full);
    load_tile(stage.T, &maps.T, 0, 0, matrix, full);
    load_tile(stage.queries, &maps.queries, 0, matrix * kChunk, 0, full);
    bulk_copy(rows, args.rows + int64_t{matrix} * chunk_scan::kHead, sizeof(rows), full);
    load_tile(stage.ends, &maps.ends, 0, matrix * kChunk, 0, full);
    load_tile(stage.P, &maps.P, 0, 0, matrix, full);
  }
  // What was made of the other tokens is zero past the end.
  template <typename Function>
  static __device__ void for_tiles_of_tokens(Stage& stage, Function function) {
    for (Tile& tile : stage.v) function(tile);
  }

  // The chunk in stage AT. Begins with `seen` queued (complete, for the first stage).
  template <int AT>
  static __device__ void step(chunk_scan::Consumer<KdaScan>& at, int done) {
    const Stage& stage = at.shared.stages[AT];
    uint32_t operand[4][4];
    at.queue_values(stage);
    at.queue_queries<0>(stage);
    if constexpr (AT > 0) products_wait<1>(at.seen);
    // V' = T v - T (k exp(G) S)
#pragma unroll
    for (int i = 0; i < 32; ++i) at.seen[i] = -at.seen[i];
    chunk_scan::pack(operand, at.seen);
    at.queue_square(at.fresh, operand, stage.T);
    const float* decays = at.shared.rows[AT][0] + 2 * (at.lane % 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 decay = *reinterpret_cast<const float2*>(decays + 8 * i);
      at.S[4 * i] *= decay.x, at.S[4 * i + 1] *= decay.y;
      at.S[4 * i + 2] *= decay.x, at.S[4 * i + 3] *= decay.y;
    }
    at.queue_queries<1>(stage);
    products_wait<1>(at.fresh);
    // S = exp(G_C) S + V'^T (k exp(G_C - G)), O = (q exp(G)) S + P V'
    chunk_scan::pack(operand, at.fresh);
    at.queue_state(operand, stage.ends);
    at.queue_square(at.o, operand, stage.P);
    at.end_step<AT>(done);
  }
};

}  // namespace vllm_cuda
