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
constexpr int OUT_ROW_BYTES = 2 * PART;
constexpr int WARPGROUP = 128;
// Teams of two warps make a chunk each, one of the other stages is read.
constexpr int TEAMS = 4, TEAM_THREADS = 64, STAGES = 5;

// Boxes of a chunk: half a head of queries and keys and of the decays' inputs, as much of values as
// a CTA has.
struct Maps {
  CUtensorMap queries_keys, v, a, out;
};

// Half the channels of a chunk.
struct Half {
  // As fetched; then as seen from the chunk's reference (`Reference`).
  alignas(1024) char queries[HALF_BYTES], keys[HALF_BYTES];
  // Inputs of the decays; then keys for right operands, as seen from there or, where decays are
  // STRONG, from the chunk's end.
  char grown[HALF_BYTES];
};

// What a chunk needs besides its values and the state.
struct Factors {
  Half halves[2];
  // Columns 0 to 31: what multiplies the values' results in the output. What is off the triangle
  // of tiles stays zero, and of the inverse's tiles and blocks (`clear_zeros`).
  char products[HALF_BYTES];
  // Columns 0 to 31: what multiplies values less what the state holds for the keys, transposed.
  // Before that, in the other units: the tiles on the diagonal of the inverse, without D.
  char inverse[HALF_BYTES];

  // [queries or keys, i, j]: products that are made pair by pair, where results will be.
  __device__ float* found() { return reinterpret_cast<float*>(products); }
};

struct Stage {
  Factors factors;
  char v[2][HALF_BYTES];
};

enum When { BEFORE = 1, BETWEEN = 2, AFTER = 4 };
// In `Scales::flags`: of the halves.
constexpr uint32_t FIRST = 1, SECOND = 0x100, EITHER = FIRST | SECOND;
// Those whose joined decays are not all one (`Scales::when`).
__device__ inline uint32_t joined_halves(uint32_t flags) {
  return flags >> 16 & FIRST | flags >> 9 & SECOND;
}

// What a chunk has per channel and token.
struct alignas(16) Scales {
  // What the state's columns decay by before the chunk's products, between them and after them: to
  // where they are seen from, if that is not their start; at once, if decays are STRONG; to the
  // chunk's end. Those of a half lie as lanes of the scan read them (`decay_unit`).
  float before[DIM], between[DIM], after[DIM];
  float q_scale[CHUNK];   // of the output's rows
  float k_norm[CHUNK];    // lengths of the keys
  float strength[CHUNK];  // beta over the square of that
  // When the columns of either half decay: BEFORE, BETWEEN, AFTER; then which halves do before the
  // chunk's products once what the chunk before has in `after` is joined to `before`, a bit each.
  uint8_t when[4];
  __device__ uint32_t flags() const { return *reinterpret_cast<const uint32_t*>(when); }
};

// Where 16 bytes of a half's decays lie that a lane of the scan reads: channels 16 i + 2 column and
// the next, and those 8 further on. Neighbouring lanes read and write different banks.
__device__ inline int decay_unit(int column, int i) {
  return 4 * (4 * column + (i ^ (column & 2)));
}
// Those of the channels 2 pair and the next.
__device__ inline int decay_place(int pair) {
  return decay_unit(pair % 4, pair / 8) + pair / 4 % 2 * 2;
}

// Blocks on the diagonal of what is inverted.
constexpr int BLOCK = 8;
using Blocks = float[CHUNK / BLOCK][BLOCK][BLOCK];

// What a team's warps tell each other.
struct Team {
  // Base-2 log decays of half the channels, for a half at a time: by half, part and lane.
  float2 totals[2][2][32];
  alignas(16) Blocks blocks;
};

// Of a head's decays: bias times log2(e), inputs at which a token decays by 2^-160 (more is the
// same; in pairs), what the softplus is multiplied with.
struct HeadGates {
  float2 bias[DIM / 2];
  uint32_t largest[DIM / 2];
  float rate;
};

// Of a CTA that scans: `GROUPS` warpgroups have 64 value rows of the state each.
template <int GROUPS>
struct Shared {
  Stage stages[STAGES];
  // A warp's 16 columns of a chunk's output, whose 16-byte units are permuted by row.
  alignas(1024) char out[4 * GROUPS][CHUNK * OUT_ROW_BYTES];
  Scales scales[STAGES];                       // of the stages
  // Of those that make the factors.
  Team teams[TEAMS];
  HeadGates gates;
  uint64_t decays_fetched[STAGES], fetched[STAGES], made[STAGES], used[STAGES];

  // One thread does.
  __device__ void init(int makers) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(&decays_fetched[i], 1);
      init_barrier(&fetched[i], 1);
      init_barrier(&made[i], makers);
      init_barrier(&used[i], 4 * GROUPS);
    }
    barriers_fence();
  }
};

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

// What a CTA that scans works on.
struct Place {
  int head, part;             // part: the first of its 64 value rows, of those of all heads
  int seq;
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
  place.seq = seq;
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

// One thread starts the copies of what a chunk's factors are made of: inputs of the decays first,
// which are needed first. `more` bytes come with the others.
__device__ inline void fetch_inputs(const Maps& maps, int head, int token, Factors& to,
                                    uint64_t* decays, uint64_t* others, uint32_t more) {
  arrive_expecting(decays, 2 * HALF_BYTES);
  arrive_expecting(others, 4 * HALF_BYTES + more);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_tile(to.halves[i].grown, &maps.a, 0, token, 2 * head + i, decays);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_tile(to.halves[i].queries, &maps.queries_keys, 0, token, 0, 2 * head + i, others);
  }
}

// The rows past a sequence's end belong to others. They become zero, with inputs of the gates for
// which nothing decays. A team does.
__device__ inline void clear_rows(Factors& factors, int length) {
  constexpr uint32_t NO_DECAY = 0xF149F149;  // -1e30
  constexpr int UNITS = ROW_BYTES / sizeof(uint4);
  const int thread = threadIdx.x % TEAM_THREADS;
  for (int i = length * UNITS + thread; i < CHUNK * UNITS; i += TEAM_THREADS) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Half& inputs = factors.halves[half];
      reinterpret_cast<uint4*>(inputs.keys)[i] = uint4{};
      reinterpret_cast<uint4*>(inputs.queries)[i] = uint4{};
      reinterpret_cast<uint4*>(inputs.grown)[i] = {NO_DECAY, NO_DECAY, NO_DECAY, NO_DECAY};
    }
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
