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

constexpr int CHUNK = 16, DIM = 128, HALF = DIM / 2;
// Half a head of a chunk: rows of 128 bytes, whose 16-byte units are permuted by row.
constexpr int ROW_BYTES = kTileRowBytes, HALF_BYTES = CHUNK * ROW_BYTES;
constexpr int WARPGROUP = 128;
// Warps that make the operands of a chunk each, and stages, of which two are fetched or read.
constexpr int MAKERS = 8, STAGES = MAKERS + 2;

// Boxes of a chunk: half a head of queries and keys and of the decays' inputs, as much of values as
// a CTA has.
struct Maps {
  CUtensorMap queries_keys, v, a;
};

// Half the channels of a chunk.
struct Half {
  // As fetched; then as seen from the chunk's start.
  alignas(1024) char queries[HALF_BYTES], keys[HALF_BYTES];
  // Inputs of the decays; then keys that grow by what decays are, or STRONG ones as seen from the
  // chunk's end.
  char grown[HALF_BYTES];
};

struct Stage {
  Half halves[2];
  char v[2][HALF_BYTES];
  // Columns 0 to 15: what multiplies values; 16 to 31: and what the state holds for the keys; 32 to
  // 47: what multiplies their results in the output. A place for other things before.
  char squares[HALF_BYTES];
  float decays[DIM];      // of the whole chunk
  float q_scale[CHUNK];   // of the output's rows
  float k_norm[CHUNK];    // lengths of the keys
  float strength[CHUNK];  // beta over the square of that
  int strong;             // bits: halves whose channels decay before they get anything
};

// A maker's base-2 log decays of half the channels, summed up: tokens, two channels a lane.
struct alignas(16) LogDecays {
  float2 at[CHUNK][32];
};

// `GROUPS` warpgroups have 64 value rows of the state each.
template <int GROUPS>
struct Shared {
  Stage stages[STAGES];
  LogDecays decays[MAKERS];
  uint4 out[4 * GROUPS][CHUNK][2];  // per warp
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
      init_barrier(&made[i], 1);
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
// which nothing decays. A warp does.
template <int GROUPS>
__device__ inline void clear_rows(Stage& stage, int length) {
  constexpr uint32_t NO_DECAY = 0xF149F149;  // -1e30
  constexpr int UNITS = ROW_BYTES / sizeof(uint4);
  for (int i = length * UNITS + threadIdx.x % 32; i < CHUNK * UNITS; i += 32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<uint4*>(stage.halves[half].keys)[i] = uint4{};
      reinterpret_cast<uint4*>(stage.halves[half].queries)[i] = uint4{};
      reinterpret_cast<uint4*>(stage.halves[half].grown)[i] = {NO_DECAY, NO_DECAY, NO_DECAY, NO_DECAY};
      if (half < GROUPS) reinterpret_cast<uint4*>(stage.v[half])[i] = uint4{};
    }
  }
  __syncwarp();
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
