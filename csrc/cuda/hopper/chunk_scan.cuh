// SPDX-License-Identifier: Apache-2.0
// The sequential part of chunked delta rules for bf16 and heads of 128 (sm_90a). A rule says what
// it keeps per chunk (`Stage`, `Rows`), how that is fetched and what a step makes of it.
//
// A warpgroup, one of a CTA's one or two, holds 64 rows of S^T [dv, dk] in fp32 and goes through
// the chunks of its sequence, everything transposed: each product's left operand is the result
// before it, in registers. A further warp fetches the chunks ahead. Products run in the order in
// which they are queued: what the next state does not wait for (T v, q S, P V') is queued behind
// what it does wait for, and so covers the arithmetic between the two.
#pragma once

#include "hopper/chunk_scan_registers.cuh"

namespace vllm_cuda::chunk_scan {

template <typename Rule>
struct Consumer {
  using Stage = typename Rule::Stage;

  const ChunkScanArgs& args;
  const Place& place;
  Shared<Rule>& shared;
  uint32_t phase;  // of the ring of stages
  const int group = Rule::kWarpgroups > 1 ? threadIdx.x / kWarpgroup : 0;
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
    const uint64_t v = transposed_descriptor(stage.v[group], 0), T = tile_descriptor(stage.T);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<1, 0>(fresh, advance(v, i * 2 * kTileGroupBytes), advance(T, i * 32), i > 0);
    }
  }
  // o (+)= S queries^T over half of dk
  template <int HALF>
  __device__ void queue_queries(const Stage& stage) {
    const uint64_t queries = tile_descriptor(stage.queries[HALF]);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<0>(o, rounded[4 * HALF + i], advance(queries, i * 32), HALF + i > 0);
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
  // S += operand @ keys
  __device__ void queue_state(const uint32_t (&operand)[4][4], const Tile (&keys)[2]) {
    const uint64_t k = transposed_descriptor(keys, sizeof(Tile));
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product<1>(S, operand[i], advance(k, i * 2 * kTileGroupBytes), 1);
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
    Ring ring(shared.barriers, Rule::kStages);
    ring.index = AT;
    ring.phase = phase;
    return ring;
  }
  // Waits for the stage of the chunk that starts there.
  template <int AT>
  __device__ void wait_stage(int done) {
    ring<AT>().wait_full();
    const int left = place.length - done;
    if (left < kChunk) clear_rows<Rule>(shared.stages[AT], left, threadIdx.x);
  }

  // Ends the step of the chunk in stage AT, whose state and O are queued: waits for the next chunk
  // and queues `seen` for it; after the last one that product runs on what lies there, for nothing.
  // O is staged here and copied beside the next chunk's products.
  template <int AT>
  __device__ void end_step(int done) {
    if (done > 0) copy_output<true>(kChunk);
    constexpr int NEXT = (AT + 1) % Rule::kStages;
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
    static_assert(Rule::kStages == 2 || Rule::kStages == 3);
    wait_stage<0>(0);
    queue_seen(shared.stages[0]);
    products_wait<0>(seen);
    for (int done = 0; done < place.length; done += Rule::kStages * kChunk) {
      Rule::template step<0>(*this, done);
      if (done + kChunk >= place.length) {
        products_wait<0>(seen);
        break;
      }
      Rule::template step<1>(*this, done + kChunk);
      if constexpr (Rule::kStages > 2) {
        if (done + 2 * kChunk >= place.length) {
          products_wait<0>(seen);
          break;
        }
        Rule::template step<2>(*this, done + 2 * kChunk);
      }
      products_wait<0>(seen);
    }
    copy_output<false>((place.length - 1) % kChunk + 1);
  }
};

// Two warpgroups and a third, of which a warp fetches, share the registers unevenly.
template <typename Rule>
constexpr int kThreads = kConsumers<Rule> + (Rule::kWarpgroups > 1 ? kWarpgroup : 32);

// Grid (dv tiles / warpgroups, value heads, sequences).
template <typename Rule, typename State>
__global__ void __launch_bounds__(kThreads<Rule>, 1)
    chunk_scan_kernel(const __grid_constant__ typename Rule::Maps maps,
                      const typename Rule::Args args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Rule>*>(memory);
  Place place;
  if (!find_place<Rule>(args, place)) return;
  if (threadIdx.x == 0) Ring(shared.barriers, Rule::kStages).init(kConsumers<Rule> / 32);
  __syncthreads();
  if (threadIdx.x < kConsumers<Rule>) {
    if constexpr (Rule::kWarpgroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    Consumer<Rule> consumer{args, place, shared, 0};
    State* const own = static_cast<State*>(args.states) + place.state +
                       (16 * consumer.warp + consumer.lane / 4) * kHead + 2 * (consumer.lane % 4);
    load_state(consumer.S, own, place.carried);
    consumer.scan();
    store_state(own, consumer.S);
  } else {
    if constexpr (Rule::kWarpgroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kConsumers<Rule>) produce<Rule>(maps, args, place, shared);
  }
}

}  // namespace vllm_cuda::chunk_scan
