// SPDX-License-Identifier: Apache-2.0
// A whole prefill of Kimi delta attention for bf16 and heads of 128, in one launch (sm_90a); the
// maths is that of `kda_prefill_factors.cuh`.
//
// A CTA goes through a sequence and head in chunks of 16 tokens. Eight warps make what chunks need
// besides the state. Two warpgroups, or one where half a head is a CTA's, hold 64 rows of
// S^T [dv, dk] each in fp32 and take chunk after chunk, everything transposed: each product's left
// operand is the result before it, in registers. What the next state does not wait for is queued
// behind what it does wait for.
#pragma once

#include "hopper/chunk_scan_registers.cuh"
#include "hopper/kda_prefill_factors.cuh"

namespace vllm_cuda {

namespace kda_prefill {

template <int GROUPS>
struct Scan {
  const KdaPrefillArgs& args;
  const Place& place;
  Shared<GROUPS>& shared;
  const int group = GROUPS > 1 ? threadIdx.x / WARPGROUP : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Where the lane writes: 8 of the warp's 16 columns of a token.
  __nv_bfloat16* own_out = static_cast<__nv_bfloat16*>(args.out) +
                           (place.first + lane / 2) * args.out_stride + place.part * HALF +
                           16 * warp + 8 * (lane % 2);
  // Results of products; their rows are dv.
  float S[64];                // [dv, dk], the state
  float fresh[8];             // W
  float o[2][8], seen[2][8];  // output and K S, of this chunk and of the one before it
  Turn turn{0};
  int before = 0;  // the stage of the chunk before


  // fresh = v T^T
  __device__ void queue_values(Stage& from) {
    products_fence();
    product<1, 0>(fresh, transposed_descriptor(from.v[group], 0), tile_descriptor(from.squares),
                  0);
    products_commit();
  }
  // o = S Q^T, seen = S K^T
  template <int P>
  __device__ void queue_state_products(Stage& from) {
    uint32_t rounded[8][4];
    chunk_scan::pack(rounded, S);
    const uint64_t rows = tile_descriptor(from.halves[0].queries);
    products_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product<0>(o[P], seen[P], rounded[i], advance(rows, i / 4 * sizeof(Half) + i % 4 * 32), i > 0);
    }
    products_commit();
  }
  // fresh -= operand @ T^T for what the state holds
  __device__ void queue_correction(const uint32_t (&operand)[4], Stage& from) {
    products_fence();
    product<0>(fresh, operand, advance(tile_descriptor(from.squares), 32), 1);
    products_commit();
  }
  // o += operand @ P^T. Its registers stay those of a product of 32 rows: the last 16 are whatever
  // lies behind P, for `seen` has been used.
  template <int P>
  __device__ void queue_output(const uint32_t (&operand)[4], Stage& from) {
    const uint64_t rows = tile_descriptor(from.squares);
    products_fence();
    product<0>(o[P], seen[P], operand, advance(rows, 64), 1);
    products_commit();
  }
  // S += operand @ grown keys
  __device__ void queue_update(const uint32_t (&operand)[4], Stage& from) {
    products_fence();
    product<1>(S, operand, transposed_descriptor(from.halves[0].grown, sizeof(Half)), 1);
    products_commit();
  }

  // The decays of the lane's columns.
  struct Decays {
    float2 by[16];
    __device__ Decays(const Stage& from, int lane) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        by[i] = *reinterpret_cast<const float2*>(from.decays + 2 * (lane % 4) + 8 * i);
      }
    }
  };
  // Of the halves with these bits.
  __device__ void decay(const Decays& decays, int halves) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((halves >> half & 1) == 0) continue;
#pragma unroll
      for (int i = 8 * half; i < 8 * half + 8; ++i) {
        const float2 by = decays.by[i];
        S[4 * i] *= by.x, S[4 * i + 1] *= by.y;
        S[4 * i + 2] *= by.x, S[4 * i + 3] *= by.y;
      }
    }
  }

  // Scales, transposes and writes the output of the chunk in `from`, of so many tokens. The stage is
  // free then.
  __device__ void write(float (&x)[8], int from, int tokens) {
    const float* scales = shared.stages[from].q_scale + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 by = *reinterpret_cast<const float2*>(scales + 8 * i);
      x[4 * i] *= by.x, x[4 * i + 1] *= by.y, x[4 * i + 2] *= by.x, x[4 * i + 3] *= by.y;
    }
    uint32_t packed[1][4];
    chunk_scan::pack(packed, x);
    // Rows are tokens with 16 columns in two pieces, which lie the other way round in every second
    // four rows.
    uint4(&part)[CHUNK][2] = shared.out[warp];
    store_transposed(&part[8 * (lane / 16) + lane % 8][(lane / 8 % 2) ^ (lane / 4 % 2)],
                     packed[0][0], packed[0][1], packed[0][2], packed[0][3]);
    __syncwarp();
    if (lane == 0) arrive(&shared.used[from]);
    const uint4 piece = part[lane / 2][(lane % 2) ^ (lane / 8 % 2)];
    if (lane / 2 < tokens) *reinterpret_cast<uint4*>(own_out) = piece;
    own_out += CHUNK * args.out_stride;
    __syncwarp();
  }

  // One chunk; its values are queued. P: which output is its own. Leaves the next chunk's values
  // queued (those of whatever lies there, after the last one), and with the last step of a round
  // nothing under way: the compiler follows a product along straight code only.
  template <int P, bool ENDS_ROUND>
  __device__ void step(int chunk) {
    Stage& own = shared.stages[turn.stage];
    queue_state_products<P>(own);
    if (chunk > 0) {
      products_wait<1>(o[1 - P]);
      write(o[1 - P], before, CHUNK);
    }
    const int strong = own.strong;
    if (strong != 0) decay(Decays(own, lane), strong);
    products_wait<0>(seen[P]);
    uint32_t operand[1][4], values[1][4];
    chunk_scan::pack(operand, seen[P]);
    queue_correction(operand[0], own);
    products_wait<0>(fresh);
    chunk_scan::pack(values, fresh);
    queue_update(values[0], own);
    queue_output<P>(values[0], own);
    const Decays decays(own, lane);
    before = turn.stage;
    turn.advance(1);
    if (chunk + 1 < place.chunks) wait_parity(&shared.made[turn.stage], turn.phase);
    queue_values(shared.stages[turn.stage]);
    if constexpr (ENDS_ROUND) {
      products_wait<0>(S);
    } else {
      products_wait<2>(S);
    }
    if (strong == 0) {
      decay(decays, 3);
    } else {
      decay(decays, ~strong);
    }
  }

  __device__ void run() {
    wait_parity(&shared.made[0], 0);
    queue_values(shared.stages[0]);
    products_wait<0>(fresh);
    const int last = (place.length - 1) % CHUNK + 1;
    for (int chunk = 0;; chunk += 2) {
      step<0, false>(chunk);
      if (chunk + 1 >= place.chunks) {
        products_wait<0>(o[0]);
        return write(o[0], before, last);
      }
      step<1, true>(chunk + 1);
      if (chunk + 2 >= place.chunks) return write(o[1], before, last);
    }
  }
};

template <int GROUPS>
constexpr int THREADS = GROUPS * WARPGROUP + 32 * MAKERS;

// Grid (heads x 2 / GROUPS, sequences).
template <int GROUPS, typename State>
__global__ void __launch_bounds__(THREADS<GROUPS>, 1)
    kernel(const __grid_constant__ Maps maps, const KdaPrefillArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<GROUPS>*>(memory);
  Place place;
  if (!find_place<GROUPS>(args, place)) return;
  if (threadIdx.x == 0) shared.init();
  if (threadIdx.x < DIM / 2) publish_gates(args, place.head, threadIdx.x, shared);
  __syncthreads();
  if (threadIdx.x < GROUPS * WARPGROUP) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 168 : 216));
    Scan<GROUPS> scan{args, place, shared};
    State* const own = static_cast<State*>(args.states) + place.state +
                       (16 * scan.warp + scan.lane / 4) * DIM + 2 * (scan.lane % 4);
    chunk_scan::load_state(scan.S, own, place.carried);
    scan.run();
    chunk_scan::store_state(own, scan.S);
  } else {
    // Local memory would not fit the L1 cache beside this much shared memory: 88 must do.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 88 : 144));
    // The compiler sees that all lanes have the same number.
    make(maps, args, place, __shfl_sync(~0u, threadIdx.x / 32, 0) - 4 * GROUPS, shared);
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
