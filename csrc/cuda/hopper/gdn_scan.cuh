// SPDX-License-Identifier: Apache-2.0
// The chunked gated delta rule as a rule of `chunk_scan`; the maths and the letters are those of
// fla/ops/gated_delta_rule/inter.py.
#pragma once

#include "gdn_scan.h"
#include "hopper/chunk_scan.cuh"

namespace vllm_cuda {

struct GdnScan {
  using Args = GdnScanArgs;
  using Tile = chunk_scan::Tile;
  static constexpr int kChunk = chunk_scan::kChunk, kWarpgroups = 1, kStages = 3;

  struct Maps {
    CUtensorMap q, k, v, T, P;
  };
  struct alignas(1024) Stage {
    Tile keys[2], queries[2], v[kWarpgroups];  // rows are tokens; 64 columns of the head each
    Tile T, P;
  };
  using Rows = float[4][kChunk];

  static __device__ int key_head(const Args& args, int head) {
    return head / (args.heads / args.key_heads);
  }
  static __device__ void fetch(const Maps& maps, const Args& args, const chunk_scan::Place& place,
                               int token, int matrix, Stage& stage, Rows& rows, uint64_t* full) {
    load_tile(stage.keys, &maps.k, 0, token, 2 * place.key_head, full);
    load_tile(stage.v, &maps.v, 0, token, place.part, full);
    load_tile(stage.T, &maps.T, 0, 0, matrix, full);
    bulk_copy(rows, args.rows + int64_t{matrix} * 4 * kChunk, sizeof(rows), full);
    load_tile(stage.queries, &maps.q, 0, token, 2 * place.key_head, full);
    load_tile(stage.P, &maps.P, 0, 0, matrix, full);
  }
  template <typename Function>
  static __device__ void for_tiles_of_tokens(Stage& stage, Function function) {
    for (Tile* tile :
         {&stage.keys[0], &stage.keys[1], &stage.queries[0], &stage.queries[1], &stage.v[0]}) {
      function(*tile);
    }
  }

  // Factors of the thread's columns of a result with 64 of them: 8 i + 2 (lane % 4) + {0, 1}.
  struct Factors {
    float2 at[8];
    __device__ void load(const float (&row)[kChunk], int lane) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        at[i] = reinterpret_cast<const float2*>(row)[4 * i + lane % 4];
      }
    }
  };
  // As `pack`, each column times its factor.
  static __device__ void pack_scaled(uint32_t (&packed)[4][4], const float (&x)[32],
                                     const Factors& by, float sign) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 factor = by.at[i / 2];
      packed[i / 4][i % 4] = chunk_scan::pack_bf16(x[2 * i] * (sign * factor.x),
                                                   x[2 * i + 1] * (sign * factor.y));
    }
  }

  // The chunk in stage AT. Begins with `seen` queued (complete, for the first stage).
  template <int AT>
  static __device__ void step(chunk_scan::Consumer<GdnScan>& at, int done) {
    const Stage& stage = at.shared.stages[AT];
    const Rows& rows = at.shared.rows[AT];
    Factors factors;
    uint32_t operand[4][4];
    at.queue_values(stage);
    at.queue_queries<0>(stage);
    factors.load(rows[0], at.lane);
    if constexpr (AT > 0) products_wait<1>(at.seen);
    // V' = T v - T (exp(G) k S)
    pack_scaled(operand, at.seen, factors, -1.0f);
    at.queue_square(at.fresh, operand, stage.T);
    const float decay = rows[3][kChunk - 1];
#pragma unroll
    for (int i = 0; i < 64; ++i) at.S[i] *= decay;
    at.queue_queries<1>(stage);
    factors.load(rows[2], at.lane);
    products_wait<1>(at.fresh);
    // S = exp(G_C) S + (exp(G_C - G) V')^T k
    pack_scaled(operand, at.fresh, factors, 1.0f);
    at.queue_state(operand, stage.keys);
    // O = exp(G) q S + P V'
    uint32_t values[4][4];
    chunk_scan::pack(values, at.fresh);
    factors.load(rows[1], at.lane);
    products_wait<1>(at.o);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      at.o[i] *= i % 2 == 0 ? factors.at[i / 4].x : factors.at[i / 4].y;
    }
    at.queue_square(at.o, values, stage.P);
    at.end_step<AT>(done);
  }
};

}  // namespace vllm_cuda
