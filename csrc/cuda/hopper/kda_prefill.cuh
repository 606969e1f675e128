// SPDX-License-Identifier: Apache-2.0
// A whole prefill of Kimi delta attention for bf16 and heads of 128, in one launch (sm_90a); the
// maths is that of `kda_prefill_factors.cuh`.
//
// A CTA goes through a sequence and head in chunks of 32 tokens. Two teams of four warps make what
// chunks need besides the state. Two warpgroups, or one where half a head is a CTA's, hold 64 rows
// of S^T [dv, dk] each in fp32 and take chunk after chunk, everything transposed: each product's
// left operand is the result before it, in registers.
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
  float S[64];            // [dv, dk], the state
  float fresh[CHUNK / 2];  // W
  float o[CHUNK / 2], seen[CHUNK / 2];  // output and K S
  uint32_t written[2][4];  // the output of the chunk before
  Turn turn{0};

  // fresh = v T^T
  __device__ void queue_values(Stage& from) {
    const uint64_t v = transposed_descriptor(from.v[group], 0), rows = tile_descriptor(from.inverse);
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      product<1, 0>(fresh, advance(v, i * PART_BYTES), advance(rows, 32 * i), i > 0);
    }
    products_commit();
  }
  // o = S Q^T, seen = S K^T
  __device__ void queue_state_products(const uint32_t (&rounded)[8][4], Stage& from) {
    const uint64_t rows = tile_descriptor(from.halves[0].queries);
    products_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product<0>(o, seen, rounded[i], advance(rows, i / 4 * sizeof(Half) + i % 4 * 32), i > 0);
    }
    products_commit();
  }
  // fresh -= operand @ T^T for what the state holds
  __device__ void queue_correction(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = advance(tile_descriptor(from.inverse), 64);
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) product<0>(fresh, operand[i], advance(rows, 32 * i), 1);
    products_commit();
  }
  // o += operand @ P^T. Its registers stay those of a product of 64 rows: the last 32 are those of
  // `inverse`, for `seen` has been used.
  __device__ void queue_output(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = tile_descriptor(from.products);
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) product<0>(o, seen, operand[i], advance(rows, 32 * i), 1);
    products_commit();
  }
  // S += operand @ grown keys
  __device__ void queue_update(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = transposed_descriptor(from.halves[0].grown, sizeof(Half));
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) product<1>(S, operand[i], advance(rows, i * PART_BYTES), 1);
    products_commit();
  }

  // What half the lane's columns decay by: `decays` of a stage.
  struct Decays {
    float2 by[8];
    __device__ Decays(const float (&decays)[DIM], int half, int lane) {
      const float* const own = decays + HALF * half + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) by[i] = *reinterpret_cast<const float2*>(own + 8 * i);
    }
    __device__ void multiply(const Decays& others) {
#pragma unroll
      for (int i = 0; i < 8; ++i) by[i].x *= others.by[i].x, by[i].y *= others.by[i].y;
    }
  };
  template <int PART_OF_S>
  __device__ void decay(const Decays& decays) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 by = decays.by[i];
      float* const at = S + 32 * PART_OF_S + 4 * i;
      at[0] *= by.x, at[1] *= by.y, at[2] *= by.x, at[3] *= by.y;
    }
  }
  // After a chunk's products, and before those of the next one.
  template <int PART_OF_S>
  __device__ void pass(const Scales& own, const Scales& next, bool last) {
    Decays decays(own.after, PART_OF_S, lane);
    if (!last) decays.multiply(Decays(next.before, PART_OF_S, lane));
    decay<PART_OF_S>(decays);
  }

  // Scales and rounds the chunk's output.
  __device__ void round_output(const Scales& from) {
    const float* scales = from.q_scale + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 by = *reinterpret_cast<const float2*>(scales + 8 * i);
      o[4 * i] *= by.x, o[4 * i + 1] *= by.y, o[4 * i + 2] *= by.x, o[4 * i + 3] *= by.y;
    }
    chunk_scan::pack(written, o);
  }
  // Transposes and writes the output of a chunk of so many tokens.
  __device__ void write(int tokens) {
    // Rows are tokens with 16 columns in two pieces, which lie the other way round in every second
    // four rows.
    uint4(&part)[PART][2] = shared.out[warp];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_transposed(&part[8 * (lane / 16) + lane % 8][(lane / 8 % 2) ^ (lane / 4 % 2)],
                       written[i][0], written[i][1], written[i][2], written[i][3]);
      __syncwarp();
      const uint4 piece = part[lane / 2][(lane % 2) ^ (lane / 8 % 2)];
      if (PART * i + lane / 2 < tokens) *reinterpret_cast<uint4*>(own_out) = piece;
      own_out += PART * args.out_stride;
      __syncwarp();
    }
  }

  // One chunk; its values are queued. Leaves the next chunk's values there (those of whatever lies
  // there, after the last one), and no product under way: the compiler follows one along straight
  // code only.
  __device__ void step(int chunk) {
    Stage& own = shared.stages[turn.stage];
    {
      uint32_t rounded[8][4];
      chunk_scan::pack(rounded, S);
      queue_state_products(rounded, own);
      if (chunk > 0) write(CHUNK);
      products_wait<0>(seen);
    }
    uint32_t operand[2][4];
    chunk_scan::pack(operand, seen);
    queue_correction(operand, own);
    const Scales& scales = shared.scales[turn.stage];
    if (scales.strong[0]) decay<0>(Decays(scales.between, 0, lane));
    if (scales.strong[1]) decay<1>(Decays(scales.between, 1, lane));
    products_wait<0>(fresh);
    chunk_scan::pack(operand, fresh);
    queue_update(operand, own);
    queue_output(operand, own);
    uint64_t* const used = &shared.used[turn.stage];
    turn.advance(1);
    const Scales& next = shared.scales[turn.stage];
    const bool last = chunk + 1 == place.chunks;
    if (!last) wait_parity(&shared.made[turn.stage], turn.phase);
    queue_values(shared.stages[turn.stage]);
    products_wait<2>(S);
    pass<0>(scales, next, last);
    pass<1>(scales, next, last);
    products_wait<1>(o);
    round_output(scales);
    __syncwarp();
    if (lane == 0) arrive(used);
    products_wait<0>(fresh);
  }

  __device__ void run() {
    const Scales& first = shared.scales[0];
    wait_parity(&shared.made[0], 0);
    queue_values(shared.stages[0]);
    decay<0>(Decays(first.before, 0, lane));
    decay<1>(Decays(first.before, 1, lane));
    products_wait<0>(fresh);
    for (int chunk = 0; chunk < place.chunks; ++chunk) step(chunk);
    write((place.length - 1) % CHUNK + 1);
  }
};

template <int GROUPS>
constexpr int THREADS = GROUPS * WARPGROUP + TEAMS * TEAM_THREADS;

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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 176 : 216));
    Scan<GROUPS> scan{args, place, shared};
    State* const own = static_cast<State*>(args.states) + place.state +
                       (16 * scan.warp + scan.lane / 4) * DIM + 2 * (scan.lane % 4);
    chunk_scan::load_state(scan.S, own, place.carried);
    scan.run();
    chunk_scan::store_state(own, scan.S);
  } else {
    // Local memory would not fit the L1 cache beside this much shared memory: 88 must do.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 80 : 144));
    // The compiler sees that all lanes have the same number.
    make(maps, args, place, __shfl_sync(~0u, threadIdx.x / 32, 0) - 4 * GROUPS, shared);
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
