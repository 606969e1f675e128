// SPDX-License-Identifier: Apache-2.0
// A prefill of Kimi delta attention for bf16 and heads of 128 (sm_90a); the maths is that of
// `kda_prefill_factors.cuh`.
//
// A CTA goes through a sequence and head in chunks of 32 tokens. Teams of two warps make what
// chunks need besides the state, or helpers do. Two warpgroups, or one where half a head is a
// CTA's, hold 64 rows of S^T [dv, dk] each in fp32 and take chunk after chunk, everything
// transposed: each product's left operand is the result before it, in registers.
#pragma once

#include "hopper/chunk_scan_registers.cuh"
#include "hopper/kda_prefill_makers.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Where a lane of the scan reads and writes, in bytes: values, what tokens have, the output.
struct Offsets {
  uint32_t value, token, out;
  __device__ Offsets(int warp, int lane)
      : value(lane % 16 * ROW_BYTES + ((2 * (warp % 4) + lane / 16 ^ lane % 8) << 4)),
        token(lane % 4 * sizeof(float2)),
        out((lane / 16 * 8 + lane % 8) * OUT_ROW_BYTES + ((lane / 8 ^ lane / 4) % 2 << 4)) {
    // The compiler does not make them again for every chunk.
    asm volatile("" : "+r"(value), "+r"(token), "+r"(out));
  }
};

// `HANDED`: helpers make the factors.
template <int GROUPS, bool HANDED>
struct Scan {
  const Maps& maps;
  const KdaPrefillArgs& args;
  const Place& place;
  Shared<GROUPS>& shared;
  // The compiler sees that all lanes have the same number.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = GROUPS > 1 ? warp / 4 : 0;
  const int lane = threadIdx.x % 32;
  const Offsets offsets{warp, lane};
  // Results of products; their rows are dv.
  float S[64];                          // [dv, dk], the state
  float fresh[CHUNK / 2];               // W
  float o[CHUNK / 2], seen[CHUNK / 2];  // output and K S
  Turn turn{0};
  uint32_t flags;  // of the chunk's decays: `Scales::flags`

  // What the state lacks: values less what it holds for the keys, in units of the keys' lengths.
  struct Values {
    uint32_t of[4][2];  // by eight tokens and rows; two neighbouring tokens each
    __device__ Values(const char* v, uint32_t offset) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Tile x = load_transposed(shared_address(v) + offset + i * PART_BYTES);
        of[2 * i][0] = x.r[0], of[2 * i + 1][0] = x.r[1];
        of[2 * i][1] = x.r[2], of[2 * i + 1][1] = x.r[3];
      }
    }
    // Those past the sequence's end, which are others', become zero.
    __device__ void clear_from(int tokens) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * i + threadIdx.x % 4 * 2;
        const uint32_t kept = token + 1 < tokens ? ~0u : token < tokens ? 0xffffu : 0u;
        of[i][0] &= kept, of[i][1] &= kept;
      }
    }
  };
  // What the lane's tokens have, two neighbouring ones at a time.
  struct OfTokens {
    float2 of[4];
    __device__ OfTokens(const float (&all)[CHUNK], uint32_t offset) {
      const char* const from = reinterpret_cast<const char*>(all) + offset;
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] = *reinterpret_cast<const float2*>(from + 32 * i);
    }
  };
  __device__ void lack(const Values& v, const OfTokens& lengths) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 n = lengths.of[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const at = seen + 4 * i + 2 * half;
        at[0] = fmaf(n.x, low_half(v.of[i][half]), -at[0]);
        at[1] = fmaf(n.y, high_half(v.of[i][half]), -at[1]);
      }
    }
  }
  // o = S Q^T, seen = S K^T
  __device__ void queue_state_products(const uint32_t (&rounded)[8][4], Stage& from) {
    const uint64_t rows = tile_descriptor(from.factors.halves[0].queries);
    products_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product<0>(o, seen, rounded[i], advance(rows, i / 4 * sizeof(Half) + i % 4 * 32), i > 0);
    }
    products_commit();
  }
  // fresh = operand @ T^T
  __device__ void queue_fresh(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = transposed_descriptor(from.factors.inverse, 0);
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      product<1>(fresh, operand[i], advance(rows, i * PART_BYTES), i > 0);
    }
    products_commit();
  }
  // o += operand @ P^T. Its registers stay those of a product of 64 rows: the last 32 are those of
  // `inverse`, for `seen` has been used.
  __device__ void queue_output(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = tile_descriptor(from.factors.products);
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) product<0>(o, seen, operand[i], advance(rows, 32 * i), 1);
    products_commit();
  }
  // S += operand @ grown keys
  __device__ void queue_update(const uint32_t (&operand)[2][4], Stage& from) {
    const uint64_t rows = transposed_descriptor(from.factors.halves[0].grown, sizeof(Half));
    products_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) product<1>(S, operand[i], advance(rows, i * PART_BYTES), 1);
    products_commit();
  }

  // Groups take turns at the tensor cores.
  __device__ void await_turn() const {
    if (GROUPS > 1) asm volatile("bar.sync %0, 256;" ::"r"(8 + group) : "memory");
  }
  __device__ void pass_turn() const {
    if (GROUPS > 1) asm volatile("bar.arrive %0, 256;" ::"r"(9 - group) : "memory");
  }

  // What half the lane's columns decay by: `decays` of a stage.
  struct Decays {
    float2 by[8];
    Decays() = default;
    __device__ Decays(const float (&decays)[DIM], int half, int lane) {
      const int column = lane % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(decays + HALF * half +
                                                          decay_unit(column, i));
        by[2 * i] = {x.x, x.y};
        by[2 * i + 1] = {x.z, x.w};
      }
    }
    __device__ void multiply(const Decays& more) {
#pragma unroll
      for (int i = 0; i < 8; ++i) by[i].x *= more.by[i].x, by[i].y *= more.by[i].y;
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
  // By the queries' lengths.
  __device__ void scale_output(const OfTokens& scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 by = scales.of[i];
      o[4 * i] *= by.x, o[4 * i + 1] *= by.y, o[4 * i + 2] *= by.x, o[4 * i + 3] *= by.y;
    }
  }
  // A warp's output of a chunk, 16 columns of 32 tokens, transposed in shared memory. The copy
  // before has left it.
  __device__ char* out_unit(int row, int unit) const {
    return shared.out[warp] + row * OUT_ROW_BYTES + ((unit ^ row / 4 % 2) << 4);
  }
  __device__ void stage_output() const {
    uint32_t packed[2][4];
    chunk_scan::pack(packed, o);
    if (lane == 0) wait_for_stores();
    __syncwarp();
    char* const to = shared.out[warp] + offsets.out;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_transposed(to + i * PART * OUT_ROW_BYTES, packed[i][0], packed[i][1], packed[i][2],
                       packed[i][3]);
    }
  }
  __device__ int out_column() const { return place.part * HALF + warp * PART; }
  // Of the chunk before.
  __device__ void write(int chunk) const {
    shared_fence();
    __syncwarp();
    if (lane == 0) {
      store_box(&maps.out, shared.out[warp], out_column(), place.first + chunk * CHUNK);
      commit_stores();
    }
  }
  // The rows past a sequence's end are others'.
  __device__ void write_last() const {
    __syncwarp();
    const int token = (place.chunks - 1) * CHUNK + lane;
    if (token >= place.length) return;
    auto* const to = static_cast<__nv_bfloat16*>(args.out) +
                     (place.first + token) * args.out_stride + out_column();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      *reinterpret_cast<uint4*>(to + 8 * unit) =
          *reinterpret_cast<const uint4*>(out_unit(lane, unit));
    }
  }

  // One chunk. No product is under way before it and after: the compiler follows one along straight
  // code only.
  __device__ void step(int chunk) {
    Stage& own = shared.stages[turn.stage];
    const bool last = chunk + 1 == place.chunks;
    await_turn();
    {
      uint32_t rounded[8][4];
      chunk_scan::pack(rounded, S);
      queue_state_products(rounded, own);
      if (chunk > 0) write(chunk - 1);
      Values v(own.v[group], offsets.value);
      if (last) v.clear_from(place.length - chunk * CHUNK);
      products_wait<0>(seen);
      if (group == 0 || !last) pass_turn();
      lack(v, OfTokens(shared.scales[turn.stage].k_norm, offsets.token));
    }
    uint32_t operand[2][4];
    chunk_scan::pack(operand, seen);
    queue_fresh(operand, own);
    const Scales& scales = shared.scales[turn.stage];
    if (flags & BETWEEN) decay<0>(Decays(scales.between, 0, lane));
    if (flags & BETWEEN * SECOND) decay<1>(Decays(scales.between, 1, lane));
    products_wait<0>(fresh);
    chunk_scan::pack(operand, fresh);
    queue_update(operand, own);
    queue_output(operand, own);
    uint64_t* const used = &shared.used[turn.stage];
    turn.advance(1);
    const Scales& next = shared.scales[turn.stage];
    if (!last) wait_parity(&shared.made[turn.stage], turn.phase);
    // Between the products of two chunks, at once. After even ones it nearly always decays
    // (`Reference`): that need not wait for the flags.
    Decays first, second;
    const uint32_t known = chunk % 2 == 0 ? EITHER : flags / AFTER & EITHER;
    if (!last) flags = next.flags();
    const uint32_t passes =
        last ? 0 : known | (HANDED ? flags & EITHER * BEFORE : joined_halves(flags));
    if (passes & FIRST) {
      first = Decays(next.before, 0, lane);
      if (HANDED) first.multiply(Decays(scales.after, 0, lane));
    }
    if (passes & SECOND) {
      second = Decays(next.before, 1, lane);
      if (HANDED) second.multiply(Decays(scales.after, 1, lane));
    }
    const OfTokens of_queries(scales.q_scale, offsets.token);
    products_wait<0>(S);
    products_wait<0>(o);
    __syncwarp();
    if (lane == 0) arrive(used);
    if (passes & FIRST) decay<0>(first);
    if (passes & SECOND) decay<1>(second);
    scale_output(of_queries);
    stage_output();
  }

  __device__ void run() {
    const Scales& first = shared.scales[0];
    wait_parity(&shared.made[0], 0);
    flags = first.flags();
    if (flags & EITHER * BEFORE) {
      decay<0>(Decays(first.before, 0, lane));
      decay<1>(Decays(first.before, 1, lane));
    }
    if (GROUPS > 1 && group == 1) pass_turn();
    for (int chunk = 0; chunk < place.chunks; ++chunk) step(chunk);
    const Scales& last = shared.scales[(place.chunks - 1) % STAGES];
    if (flags & EITHER * AFTER) {
      decay<0>(Decays(last.after, 0, lane));
      decay<1>(Decays(last.after, 1, lane));
    }
    write_last();
  }
};

template <int GROUPS, bool HANDED>
constexpr int THREADS = GROUPS * WARPGROUP + (HANDED ? 32 : TEAMS * TEAM_THREADS);

// Grid (heads x 2 / GROUPS, sequences).
template <int GROUPS, bool HANDED, typename State>
__global__ void __launch_bounds__(THREADS<GROUPS, HANDED>, 1)
    kernel(const __grid_constant__ Maps maps, const KdaPrefillArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<GROUPS>*>(memory);
  Place place;
  if (!find_place<GROUPS>(args, place)) return;
  if (threadIdx.x == 0) shared.init(HANDED ? 1 : TEAM_THREADS / 32);
  static_assert(HANDED || THREADS<GROUPS, HANDED> >= STAGES * TEAM_THREADS);
  if (!HANDED && threadIdx.x < STAGES * TEAM_THREADS) {
    clear_zeros(shared.stages[threadIdx.x / TEAM_THREADS].factors, threadIdx.x / 32 % 2);
    shared_fence();
  }
  if (!HANDED && threadIdx.x < DIM / 2) {
    GateInputs(args, place.head, threadIdx.x).publish(threadIdx.x, shared.gates);
  }
  __syncthreads();
  if (threadIdx.x < GROUPS * WARPGROUP) {
    // What does not fit goes to memory: the L1 cache is next to nothing beside this much shared
    // memory.
    if (!HANDED) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 176 : 216));
    Scan<GROUPS, HANDED> scan{maps, args, place, shared};
    State* const own = static_cast<State*>(args.states) + place.state +
                       (16 * scan.warp + scan.lane / 4) * DIM + 2 * (scan.lane % 4);
    chunk_scan::load_state(scan.S, own, place.carried);
    scan.run();
    chunk_scan::store_state(own, scan.S);
    // What comes after this launch comes after the helpers.
    if (HANDED) wait_for_predecessors();
  } else if (HANDED) {
    if (threadIdx.x % 32 == 0) receive(maps, args, place, shared);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS > 1 ? 80 : 144));
    // The compiler sees that all lanes have the same number.
    make(maps, args, place, __shfl_sync(~0u, threadIdx.x / 32, 0) - 4 * GROUPS, shared);
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
