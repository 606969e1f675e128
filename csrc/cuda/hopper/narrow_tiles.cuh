// SPDX-License-Identifier: Apache-2.0
// How a narrow matmul is cut up, where things are in shared memory, and how operands come there.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "hopper/boxes.cuh"
#include "hopper/wgmma.cuh"
#include "narrow.h"
#include "ptx.cuh"

namespace vllm_cuda::narrow {

constexpr int kWarpgroup = 128;
constexpr int kBlock = 64;     // rows of a tile that a warpgroup has
constexpr int kMostRows = 256;
constexpr int kColumns = 64;   // of a stage
constexpr int kMostStages = 32;
constexpr int kProducers = 2;  // warps: one fetches the weight, one the tokens
constexpr int kMostThreads = kMostRows / kBlock * kWarpgroup + 32 * kProducers;

// Products of up to TOKENS tokens.
template <int TOKENS_, bool GATED_>
struct Shape {
  static constexpr int TOKENS = TOKENS_;
  static constexpr bool GATED = GATED_;
  static constexpr int PAIRS = TOKENS / 2;  // of tokens
};

// What follows from the arguments and the cut.
struct Plan {
  int rows, split, stages, token_stages;
  int box;         // tokens fetched
  int steps;       // stages that all columns make up
  int tiles;       // of the weight
  int sums_bytes;  // of a cluster's sums, and at least what products read behind a tile's rows

  __host__ __device__ int consumers() const { return (rows + kBlock - 1) / kBlock * kWarpgroup; }
  __host__ __device__ int threads() const { return consumers() + 32 * kProducers; }
  __host__ __device__ int stage_bytes() const { return rows * int(kTileRowBytes); }
  __host__ __device__ int token_bytes() const { return box * int(kTileRowBytes); }
  // Floats from one pair of tokens to the next among the sums: neighbours in different banks.
  __host__ __device__ int pair_stride() const { return 2 * rows + (rows % 16 == 0 ? 16 : 0); }
  __host__ __device__ int barrier_bytes() const { return 16 * (stages + token_stages + 1); }
  __host__ __device__ int bytes() const {
    return token_stages * token_bytes() + stages * stage_bytes() + sums_bytes + barrier_bytes();
  }
};

struct Maps {
  CUtensorMap x, weight;
};

// Products read whole blocks: of tokens also what is behind a stage's, of rows up to the sums.
struct Shared {
  char *tokens, *weight;
  float* sums;  // of each CTA of the cluster for this one's tokens
  uint64_t *weight_barriers, *token_barriers;
  uint64_t* received;  // of a ring of one stage: counts what other CTAs store among the sums
  __device__ Shared(char* bytes, const Plan& plan) {
    tokens = bytes;
    weight = tokens + plan.token_stages * plan.token_bytes();
    char* behind = weight + plan.stages * plan.stage_bytes();
    sums = reinterpret_cast<float*>(behind);
    weight_barriers = reinterpret_cast<uint64_t*>(behind + plan.sums_bytes);
    token_barriers = weight_barriers + 2 * plan.stages;
    received = token_barriers + 2 * plan.token_stages;
  }
};

// This CTA's stages of a tile.
struct Steps {
  int first, count;
  __device__ Steps(const Plan& plan, int rank)
      : first(plan.steps * rank / plan.split),
        count(plan.steps * (rank + 1) / plan.split - first) {}
};

// Columns x on of the weight's rows, in groups of 8, or of 8 of the gate and 8 of the up projection
// for the same outputs.
__device__ inline void load_groups(void* to, const CUtensorMap* map, int x, int group,
                                   uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(0), "r"(group), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// By one thread, before the kernels that make x have finished: the weight is constant.
template <typename S>
__device__ void produce_weight(const Maps& maps, const Plan& plan, const Shared& shared,
                               const Steps& steps, int tile, int apart) {
  const uint64_t policy = evict_first_policy();
  Ring ring(shared.weight_barriers, plan.stages);
  for (; tile < plan.tiles; tile += apart) {
    const int group = tile * (plan.rows / (S::GATED ? 16 : 8));
    for (int step = 0; step < steps.count; ++step, ring.advance()) {
      ring.wait_empty();
      ring.expect(plan.stage_bytes());
      load_groups(shared.weight + ring.index * plan.stage_bytes(), &maps.weight,
                  (steps.first + step) * kColumns, group, ring.full(), policy);
    }
  }
}

// By one thread.
__device__ inline void produce_tokens(const Maps& maps, const Plan& plan, const Shared& shared,
                                      const Steps& steps, int tile, int apart) {
  Ring ring(shared.token_barriers, plan.token_stages);
  wait_for_predecessors();
  for (; tile < plan.tiles; tile += apart) {
    for (int step = 0; step < steps.count; ++step, ring.advance()) {
      ring.wait_empty();
      ring.expect(plan.token_bytes());
      load_box(shared.tokens + ring.index * plan.token_bytes(), &maps.x,
               (steps.first + step) * kColumns, 0, ring.full());
    }
  }
}

}  // namespace vllm_cuda::narrow
