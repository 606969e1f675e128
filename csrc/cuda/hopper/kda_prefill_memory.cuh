// SPDX-License-Identifier: Apache-2.0
// What a CTA of a prefill of Kimi delta attention keeps in shared memory, which sequence and head
// it works on, and what it fetches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "kda_prefill.h"
#include "ptx.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// A chunk has two parts, whose products are tiles of 16 x 16.
constexpr int PART = 16, CHUNK = 2 * PART, DIM = 128, HALF = DIM / 2;
// Half a head of a chunk: rows of 128 bytes, whose 16-byte units are permuted by row.
constexpr int ROW_BYTES = kTileRowBytes, HALF_BYTES = CHUNK * ROW_BYTES;
constexpr int PART_BYTES = PART * ROW_BYTES;
constexpr int WARPGROUP = 128;
// Teams of two warps make a chunk each, one of the other stages is read.
constexpr int TEAMS = 4, TEAM_THREADS = 64, STAGES = 5;

// Boxes of a chunk: half a head of queries and keys and of the decays' inputs, as much of values as
// a CTA has.
struct Maps {
  CUtensorMap queries_keys, v, a;
};

// Half the channels of a chunk.
struct Half {
  // As fetched; then as seen from the chunk's middle, or from its start where decays are STRONG.
  alignas(1024) char queries[HALF_BYTES], keys[HALF_BYTES];
  // Inputs of the decays; then keys for right operands, as seen from the chunk's middle or its end.
  char grown[HALF_BYTES];
};

struct Stage {
  Half halves[2];
  char v[2][HALF_BYTES];
  // Columns 0 to 31: what multiplies the values' results in the output.
  char products[HALF_BYTES];
  // Columns 0 to 31: what multiplies values; 32 to 63: and what the state holds for the keys.
  char inverse[HALF_BYTES];

  // [queries or keys, i, j]: products that are made pair by pair, where results will be.
  __device__ float* found() { return reinterpret_cast<float*>(products); }
};

// What a chunk has per channel and token.
struct alignas(16) Scales {
  // What the state's columns decay by before the chunk's products, between them, and after them: to
  // its middle, not at all, and to its end; STRONG ones not at all, at once, and not at all.
  float before[DIM], between[DIM], after[DIM];
  float q_scale[CHUNK];   // of the output's rows
  float k_norm[CHUNK];    // lengths of the keys
  float strength[CHUNK];  // beta over the square of that
  int strong[2];          // halves whose columns decay between products
};

// What a team's warps tell each other.
struct Team {
  // The tiles on the diagonal of what is inverted, in fp32; then of the inverse, in two bf16.
  alignas(16) char diagonal[2][PART * 64];
  // Base-2 log decays of half the channels, for a half at a time: by half, part and lane.
  float2 totals[2][2][32];
};

// `GROUPS` warpgroups have 64 value rows of the state each.
template <int GROUPS>
struct Shared {
  Stage stages[STAGES];
  Scales scales[STAGES];  // of the stages
  Team teams[TEAMS];
  uint4 out[4 * GROUPS][PART][2];  // per warp
  // Of the head's decays: bias times log2(e), inputs at which a token decays by 2^-160 (more is the
  // same; in pairs), what the softplus is multiplied with.
  float2 bias[DIM / 2];
  uint32_t largest[DIM / 2];
  float rate;
  uint64_t fetched[STAGES], made[STAGES], used[STAGES];

  // One thread does.
  __device__ void init() {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(&fetched[i], 1);
      init_barrier(&made[i], TEAM_THREADS / 32);
      init_barrier(&used[i], 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  static __device__ void init_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
  }
};

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// A place in the ring of stages.
struct Turn {
  int stage;
  uint32_t phase;
  __device__ explicit Turn(int chunk) : stage(chunk % STAGES), phase(chunk / STAGES % 2) {}
  __device__ void advance(int chunks) {
    stage += chunks;
    if (stage >= STAGES) {
      stage -= STAGES;
      phase ^= 1;
    }
  }
};

// What a CTA works on.
struct Place {
  int head, part;             // part: the first of its 64 value rows, of those of all heads
  int first, length, chunks;  // tokens from the batch's first on
  int64_t state;              // elements from the pool's beginning
  bool carried;
};

// Grid (heads x 2 / GROUPS, sequences).
template <int GROUPS>
__device__ inline bool find_place(const KdaPrefillArgs& args, Place& place) {
  constexpr int PARTS = 2 / GROUPS;
  const int seq = blockIdx.y;
  const int index = args.state_indices[seq];
  place.first = args.starts[seq];
  place.length = args.starts[seq + 1] - place.first;
  if (index < 0 || place.length <= 0) return false;
  place.head = blockIdx.x / PARTS;
  place.part = GROUPS * blockIdx.x;
  place.chunks = (place.length + CHUNK - 1) / CHUNK;
  place.state = index * args.state_stride + int64_t{place.part} * HALF * DIM;
  place.carried = args.carried[seq];
  return true;
}

// One thread starts the copies of a chunk.
template <int GROUPS>
__device__ inline void fetch(const Maps& maps, const Place& place, int chunk, Stage& stage,
                             uint64_t* fetched) {
  constexpr uint32_t BYTES = (6 + GROUPS) * HALF_BYTES;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(fetched)),
               "r"(BYTES)
               : "memory");
  const int token = place.first + chunk * CHUNK, half = 2 * place.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_tile(stage.halves[i].grown, &maps.a, 0, token, half + i, fetched);
    load_tile(stage.halves[i].queries, &maps.queries_keys, 0, token, 0, half + i, fetched);
  }
  load_tile(stage.v, &maps.v, 0, token, place.part, fetched);
}

// The rows past a sequence's end belong to others. They become zero, with inputs of the gates for
// which nothing decays. A team does.
template <int GROUPS>
__device__ inline void clear_rows(Stage& stage, int length) {
  constexpr uint32_t NO_DECAY = 0xF149F149;  // -1e30
  constexpr int UNITS = ROW_BYTES / sizeof(uint4);
  const int thread = threadIdx.x % TEAM_THREADS;
  for (int i = length * UNITS + thread; i < CHUNK * UNITS; i += TEAM_THREADS) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<uint4*>(stage.halves[half].keys)[i] = uint4{};
      reinterpret_cast<uint4*>(stage.halves[half].queries)[i] = uint4{};
      reinterpret_cast<uint4*>(stage.halves[half].grown)[i] = {NO_DECAY, NO_DECAY, NO_DECAY, NO_DECAY};
      if (half < GROUPS) reinterpret_cast<uint4*>(stage.v[half])[i] = uint4{};
    }
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
