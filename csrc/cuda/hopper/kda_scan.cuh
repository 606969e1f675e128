// SPDX-License-Identifier: Apache-2.0
// The sequential part of chunked Kimi delta attention for bf16 and heads of 128 (sm_90a); the maths
// and the letters are those of fla/ops/kda/chunk_scan.py.
//
// A warpgroup holds 64 rows of S^T [dv, dk] in fp32 and goes through the chunks of its sequence,
// everything transposed: each product's left operand is the result before it, in registers. A
// further warp fetches the chunks ahead. Products run in the order in which they are queued: what
// the next state does not wait for (T v, q S, P V') is queued behind what it does wait for, and so
// covers the arithmetic between the two.
#pragma once

#include "hopper/gdn_scan_registers.cuh"
#include "hopper/kda_scan_tiles.cuh"

namespace vllm_cuda {

namespace kda_scan {

using gdn_scan::pack;

template <int STAGES>
struct Consumer {
  const KdaScanArgs& args;
  const Place& place;
  Shared<STAGES>& shared;
  uint32_t phase;  // of the ring of stages
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Where the lane writes: 8 of the warp's 16 columns of every 16th token.
  __nv_bfloat16* own_out = static_cast<__nv_bfloat16*>(args.out) +
                           (place.first + lane / 2) * args.out_stride + place.part * kColumns +
                           16 * warp + 8 * (lane % 2);
  // Results of products; their rows are dv.
  float S[64];             // [dv, dk], the state
  float seen[32];          // k S
  float fresh[32];         // V'
  float o[32];             // O
  uint32_t rounded[8][4];  // S

  // seen = S keys^T
  __device__ void queue_seen(const Stage& stage) {
    pack(rounded, S);
    const uint64_t keys = tile_descriptor(stage.keys);
    products_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product<0>(seen, rounded[i], advance(keys, i / 4 * sizeof(Tile) + i % 4 * 32), i > 0);
    }
    products_commit();
  }
  // fresh = v T^T
  __device__ void queue_values(const Stage& stage) {
    const uint64_t v = transposed_descriptor(stage.v, 0), T = tile_descriptor(stage.T);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<1, 0>(fresh, advance(v, i * 2 * kTileGroupBytes), advance(T, i * 32), i > 0);
    }
  }
  // o (+)= S queries^T over half of dk
  template <int HALF>
  __device__ void queue_queries(const Stage& stage) {
    const uint64_t q = tile_descriptor(stage.queries[HALF]);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<0>(o, rounded[4 * HALF + i], advance(q, i * 32), HALF + i > 0);
    }
    products_commit();
  }
  // d += operand @ matrix^T for T and P
  __device__ void queue_square(float (&d)[32], const uint32_t (&operand)[4][4],
                               const Tile& matrix) {
    const uint64_t rows = tile_descriptor(matrix);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) product<0>(d, operand[i], advance(rows, i * 32), 1);
    products_commit();
  }
  // S += operand @ ends
  __device__ void queue_state(const uint32_t (&operand)[4][4], const Stage& stage) {
    const uint64_t ends = transposed_descriptor(stage.ends, sizeof(Tile));
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<1>(S, operand[i], advance(ends, i * 2 * kTileGroupBytes), 1);
    }
    products_commit();
  }

  // Transposes O in the warp's part of shared memory, whose rows are tokens with 16 columns in two
  // pieces, which lie the other way round in every second four rows.
  __device__ void stage_output() {
    uint32_t packed[4][4];
    pack(packed, o);
    uint4(&part)[kChunk][2] = shared.out[warp];
    uint4* const row = &part[8 * (lane / 16) + lane % 8][(lane / 8 % 2) ^ (lane / 4 % 2)];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_transposed(row + 32 * i, packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
    }
  }
  // Writes what is staged: WHOLE, or this many tokens.
  template <bool WHOLE>
  __device__ void copy_output(int tokens) {
    const uint4* const row = &shared.out[warp][lane / 2][(lane % 2) ^ (lane / 8 % 2)];
    __syncwarp();
    uint4 values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = row[32 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (WHOLE || 16 * i + lane / 2 < tokens) *reinterpret_cast<uint4*>(own_out) = values[i];
      own_out += 16 * args.out_stride;
    }
  }

  template <int AT>
  __device__ Ring ring() {
    Ring ring(shared.barriers, STAGES);
    ring.index = AT;
    ring.phase = phase;
    return ring;
  }
  // Waits for the stage of the chunk that starts there.
  template <int AT>
  __device__ void wait_stage(int done) {
    ring<AT>().wait_full();
    const int left = place.length - done;
    if (left < kChunk) clear_rows(shared.stages[AT], left, threadIdx.x);
  }

  // The chunk in stage AT. Begins with `seen` queued (complete, for the first stage), and queues it
  // for the next chunk; after the last one that product runs on what lies there, for nothing. O is
  // staged here and copied beside the next chunk's products.
  template <int AT>
  __device__ void step(int done) {
    const Stage& stage = shared.stages[AT];
    uint32_t operand[4][4];
    queue_values(stage);
    queue_queries<0>(stage);
    if constexpr (AT > 0) products_wait<1>(seen);
    // V' = T v - T (k exp(G) S)
#pragma unroll
    for (int i = 0; i < 32; ++i) seen[i] = -seen[i];
    pack(operand, seen);
    queue_square(fresh, operand, stage.T);
    const float* decays = shared.decays[AT] + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 decay = *reinterpret_cast<const float2*>(decays + 8 * i);
      S[4 * i] *= decay.x, S[4 * i + 1] *= decay.y;
      S[4 * i + 2] *= decay.x, S[4 * i + 3] *= decay.y;
    }
    queue_queries<1>(stage);
    products_wait<1>(fresh);
    // S = exp(G_C) S + V'^T (k exp(G_C - G)), O = (q exp(G)) S + P V'
    pack(operand, fresh);
    queue_state(operand, stage);
    queue_square(o, operand, stage.P);
    if (done > 0) copy_output<true>(kChunk);
    constexpr int NEXT = (AT + 1) % STAGES;
    if (NEXT == 0) phase ^= 1;
    if (done + kChunk < place.length) wait_stage<NEXT>(done + kChunk);
    products_wait<1>(S);
    queue_seen(shared.stages[NEXT]);
    products_wait<1>(o);
    __syncwarp();
    if (lane == 0) ring<AT>().release();
    stage_output();
  }

  // The compiler follows a product from where it is queued to where it is waited for only along
  // straight code, else it puts them one after another: hence once round the ring at a time.
  __device__ void scan() {
    static_assert(STAGES == 3);
    wait_stage<0>(0);
    queue_seen(shared.stages[0]);
    products_wait<0>(seen);
    for (int done = 0; done < place.length; done += STAGES * kChunk) {
      step<0>(done);
      if (done + kChunk >= place.length) {
        products_wait<0>(seen);
        break;
      }
      step<1>(done + kChunk);
      if (done + 2 * kChunk >= place.length) {
        products_wait<0>(seen);
        break;
      }
      step<2>(done + 2 * kChunk);
      products_wait<0>(seen);
    }
    copy_output<false>((place.length - 1) % kChunk + 1);
  }
};

}  // namespace kda_scan

constexpr int kKdaScanThreads = kda_scan::kConsumers + 32;

// Grid (dv tiles, value heads, sequences).
template <typename State, int STAGES>
__global__ void __launch_bounds__(kKdaScanThreads, 1)
    kda_scan_kernel(const __grid_constant__ KdaScanMaps maps, const KdaScanArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<kda_scan::Shared<STAGES>*>(memory);
  kda_scan::Place place;
  if (!kda_scan::find_place(args, place)) return;
  if (threadIdx.x == 0) Ring(shared.barriers, STAGES).init(kda_scan::kConsumers / 32);
  __syncthreads();
  if (threadIdx.x < kda_scan::kConsumers) {
    kda_scan::Consumer<STAGES> consumer{args, place, shared, 0};
    State* const own = static_cast<State*>(args.states) + place.state +
                       (16 * consumer.warp + consumer.lane / 4) * kda_scan::kHead +
                       2 * (consumer.lane % 4);
    gdn_scan::load_state(consumer.S, own, place.carried);
    consumer.scan();
    gdn_scan::store_state(own, consumer.S);
  } else if (threadIdx.x == kda_scan::kConsumers) {
    kda_scan::produce(maps, args, place, shared);
  }
}

}  // namespace vllm_cuda
