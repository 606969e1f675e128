// SPDX-License-Identifier: Apache-2.0
// Shapes of the tiles of the experts' products, and how operands come to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "experts.h"
#include "hopper/boxes.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ptx.cuh"

namespace vllm_cuda::experts {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kChunk = 16;        // bytes that a thread copies
constexpr int kRowChunks = kTileRowBytes / kChunk;
constexpr int kCopiedRows = kWarpgroup / kRowChunks;  // per round of the producer's threads

// A tile is up to TOKENS places by 128 * BLOCKS rows of a weight, 64 * BLOCKS per consumer. With a
// gate these are alternately 8 rows of the gate's and the 8 of the up projection's for the same
// outputs: they end up in one thread. A stage has 128 bytes of every row. The CTAs of a cluster
// have the same rows, of which each fetches a part for all, and equal parts of a block's places.
template <int TOKENS_, int BLOCKS_, int STAGES_, int CLUSTER_, bool GATED_, bool SCALED_>
struct Shape {
  static constexpr int TOKENS = TOKENS_, BLOCKS = BLOCKS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int HEIGHT = TOKENS * CLUSTER;  // of a block
  static constexpr bool GATED = GATED_, SCALED = SCALED_;
  static constexpr int ROWS = 64 * kConsumers * BLOCKS;
  static constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;
  static constexpr int FETCHED = ROWS / CLUSTER;     // rows that a CTA fetches
  static constexpr int STAGED = SCALED ? 32 : 64;    // places whose outputs leave together
  // Of a thread; together what the compiler gives three warpgroups.
  static constexpr int PRODUCER_REGISTERS = TOKENS > 128 ? 72 : 56;
  static constexpr int CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / kConsumers;
  static_assert(TOKENS % 32 == 0);
};

template <typename S>
struct alignas(1024) Stage {
  char weight[S::ROWS][kTileRowBytes];
  char tokens[S::TOKENS][kTileRowBytes];
};

// What a tile is: its first place and output, and how many places this CTA has; -1 ends the work.
struct Work {
  int place, used, output, expert;
};

template <typename S>
struct Shared {
  Stage<S> stages[S::STAGES];
  alignas(1024) char out[kConsumers][S::STAGED][kTileRowBytes];
  alignas(16) float weight_scale[S::SCALED ? S::STAGES : 1][S::SCALED ? S::ROWS : 4];
  alignas(16) float token_scale[S::SCALED ? S::STAGES : 1][S::SCALED ? S::TOKENS : 4];
  int pairs[S::STAGES][S::TOKENS];  // of a tile's places, where its first stage is
  Work work[S::STAGES];
  uint64_t barriers[2 * S::STAGES];
};

// Columns of bytes / 2 from x on, and rows from `row` on of an expert, to all CTAs of a cluster.
// With a gate `row` counts rows of both projections.
template <typename S>
__device__ inline void load_rows(void* to, const CUtensorMap* map, int x, int row, int expert,
                                 uint64_t* barrier) {
  constexpr uint16_t kAll = (1 << S::CLUSTER) - 1;
  if constexpr (S::GATED && S::CLUSTER > 1) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(
            shared_address(to)),
        "l"(map), "r"(x), "r"(0), "r"(row / 16), "r"(expert), "r"(shared_address(barrier)),
        "h"(kAll)
        : "memory");
  } else if constexpr (S::GATED) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(0), "r"(row / 16), "r"(expert), "r"(shared_address(barrier))
        : "memory");
  } else if constexpr (S::CLUSTER > 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(row), "r"(expert), "r"(shared_address(barrier)), "h"(kAll)
        : "memory");
  } else {
    load_tile(to, map, x, row, expert, barrier);
  }
}

// As `load_tile`, but to the L2 cache.
__device__ inline void prefetch_tile(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}

template <int BYTES>
__device__ inline void copy_async(void* to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(BYTES)
                 : "memory");
  }
}

// Arrives when this thread's copies so far have.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// One warpgroup fetches all tiles. Indices from memory are checked: a launch that was noted and
// not made may have left anything there.
//
// Three reads find a tile, each after the one before it: its expert, that one's end, its pairs.
// Behind all the weights under way a read takes microseconds, as long as a short tile's weights.
// So experts and ends are read for a run of 32 tiles at once, by a lane each, and a tile's pairs
// while the one before it is fetched.
template <typename S>
struct Producer {
  static constexpr bool kFew = S::TOKENS == 64;  // bound by reading weights
  static constexpr int kBehind = 8;              // stages, of 16 KB
  static constexpr int kRounds = S::TOKENS / kCopiedRows;
  static constexpr int kRows = kCopiedRows / 4;   // of a warp in a round
  static constexpr int kLaneRounds = 32 / kRows;  // whose rows a warp's lanes name
  static constexpr int kNamed = (kRounds + kLaneRounds - 1) / kLaneRounds;  // by each lane

  const CUtensorMap& weights;
  const ExpertsArgs& args;
  Shared<S>& shared;
  const int steps, columns;  // of k, and of tiles
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = S::CLUSTER > 1 ? cluster_rank() : 0;
  const int apart = gridDim.x / S::CLUSTER;  // this CTA's tiles
  int tile = blockIdx.x / S::CLUSTER;
  Work work{};
  uint32_t rows[kRounds];  // this thread's chunks of x, in chunks
  int64_t scale_row = 0;   // whose scales this thread copies
  // Of the tiles to come:
  Work next{};
  int named[kNamed], scale_pair = 0;  // pairs of the next one
  int number = 0;                     // of this one, among the CTA's
  int expert = -1, end = 0;           // of this lane's tile, in the next one's run of 32
  int later_expert = -1, later_end = 0;  // and in the run after that

  // Both are looked at in the branch that reads them. Else the compiler would wait for them, and
  // for pairs, at every tile.
  __device__ int read_expert(int of_tile) const {
    const int block = of_tile / columns;
    return max(block < args.num_blocks ? args.block_experts[block] : -1, -1);
  }
  __device__ int read_end(int of_expert) const {
    return max(of_expert >= 0 && of_expert < args.num_experts ? args.ends[of_expert] : 0, 0);
  }

  // Without an expert of the stack the end is 0, and there is nothing to do.
  __device__ Work work_of(int of_tile, int lane_of) const {
    const int of_expert = __shfl_sync(~0u, expert, lane_of);
    const int place = of_tile / columns * S::HEIGHT;
    const int used = min(S::HEIGHT, __shfl_sync(~0u, end, lane_of) - place);
    if (used <= 0) return {0, -1, 0, 0};
    const int part = (used + S::CLUSTER - 1) / S::CLUSTER;
    const int own = min(part, max(0, used - rank * part));
    return {place + rank * part, own, of_tile % columns * S::OUTPUTS, of_expert};
  }

  // Lane l names the pair of this warp's row l % kRows in round l / kRows.
  __device__ void read_pairs() {
#pragma unroll
    for (int i = 0; i < kNamed; ++i) {
      const int place =
          (i * kLaneRounds + lane / kRows) * kCopiedRows + warp * kRows + lane % kRows;
      named[i] = args.pairs[place < next.used ? next.place + place : 0];
    }
    if constexpr (S::SCALED) {
      scale_pair = args.pairs[thread < next.used ? next.place + thread : 0];
    }
  }

  __device__ void look_first() {
    expert = read_expert(tile + lane * apart);
    end = read_end(expert);
    next = work_of(tile, 0);
  }

  // Finds the next tile, and what the run after its own needs well before that begins.
  __device__ void look_ahead() {
    const int lane_of = (number + 1) % 32;
    if (lane_of == 0) expert = later_expert, end = later_end;
    if (lane_of == 16) later_expert = read_expert(tile + (17 + lane) * apart);
    if (lane_of == 24) later_end = read_end(later_expert);
    next = work_of(tile + apart, lane_of);
    read_pairs();
  }

  // The next tile becomes this one.
  __device__ void take_next() {
    work = next;
    uint32_t chunks[kNamed];
#pragma unroll
    for (int i = 0; i < kNamed; ++i) {
      chunks[i] = static_cast<uint32_t>(row_of(named[i])) *
                  static_cast<uint32_t>(args.x_stride / kChunk);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int from = i % kLaneRounds * kRows + lane / kRowChunks;
      rows[i] = __shfl_sync(~0u, chunks[i / kLaneRounds], from) + thread % kRowChunks;
    }
    if constexpr (S::SCALED) scale_row = row_of(scale_pair);
  }

  __device__ void load_weight(Ring& ring, int step) const {
    auto& to = shared.stages[ring.index].weight;
    shared.work[ring.index] = work;
    ring.expect(sizeof(to));
    const int first = rank * S::FETCHED;
    load_rows<S>(to[first], &weights, step * (kTileRowBytes / 2),
                 (S::GATED ? 2 * work.output : work.output) + first, work.expert, ring.full());
  }

  // Stages of a tile's weights come to the L2 cache.
  __device__ void prefetch_weight(const Work& of, int first, int count) const {
    for (int step = first; step < min(first + count, steps); ++step) {
      prefetch_tile(&weights, step * (kTileRowBytes / 2), of.output, of.expert);
    }
  }

  // Where others are still busy with the kernel ahead, stages behind the first `begin` come, too.
  __device__ void prefetch_behind(int begin) const {
    if (!kFew || thread != 0 || work.used < 0) return;
    const int own = min(kBehind, steps - begin);
    prefetch_weight(work, begin, own);
    if (next.used >= 0) prefetch_weight(next, 0, kBehind - own);
  }

  // The row of x that is a pair's.
  __device__ int row_of(int pair) const {
    return pair >= 0 && pair < args.num_pairs ? pair / args.slots : 0;
  }

  // Places that are not used keep what is there: they are columns of the product of their own.
  __device__ void copy_tokens(Ring& ring, int step) const {
    auto& tokens = shared.stages[ring.index].tokens;
    const char* x = static_cast<const char*>(args.x) + step * kTileRowBytes;
    const int chunk = thread % kRowChunks;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int place = thread / kRowChunks + i * kCopiedRows;
      if (place < work.used) {
        copy_async<16>(tokens[place] + (chunk ^ (place & 7)) * kChunk,
                       x + uint64_t{rows[i]} * kChunk);
      }
    }
  }

  __device__ void copy_scales(Ring& ring, int step) const {
    if constexpr (S::SCALED) {
      const float* from = args.weight_scale + work.expert * args.weight_scale_expert +
                          step * args.weight_scale_group;
#pragma unroll
      for (int i = 0; i < S::ROWS; i += 4 * kWarpgroup) {
        const int row = i + 4 * thread;
        if (row < S::ROWS) {
          int at = work.output + row;
          if (S::GATED) at = work.output + row / 16 * 8 + row % 8 + (row / 8 % 2) * args.n;
          const int last = S::GATED ? 2 * args.n : args.n;
          if (at < last) copy_async<16>(&shared.weight_scale[ring.index][row], from + at);
        }
      }
      static_assert(S::TOKENS <= kWarpgroup, "a thread per place");
      if (thread < work.used) {
        copy_async<4>(&shared.token_scale[ring.index][thread],
                      args.x_scale + scale_row * args.x_scale_row + step * args.x_scale_group);
      }
    }
  }

  // For the consumers, which would wait for a read of their own.
  __device__ void copy_pairs(Ring& ring) const {
#pragma unroll
    for (int i = 0; i < S::TOKENS; i += kWarpgroup) {
      const int place = i + thread;
      if (place < work.used) {
        copy_async<4>(&shared.pairs[ring.index][place], args.pairs + work.place + place);
      }
    }
  }

  // What is not the weight.
  __device__ void load_tokens(Ring& ring, int step) const {
    if (step == 0) copy_pairs(ring);
    copy_tokens(ring, step);
    copy_scales(ring, step);
    arrive_after_copies(ring.full());
  }

  __device__ void finish(Ring& ring) const {
    ring.wait_empty();
    if (thread == 0) {
      shared.work[ring.index] = work;
      ring.expect(0);
    }
    arrive_after_copies(ring.full());
  }

  // Kernels that start now may count on everything before this one.
  __device__ void begin_dependents() const {
    wait_for_predecessors();
    launch_dependents();
  }

  __device__ void run() {
    Ring ring(shared.barriers, S::STAGES);
    // Without a gate blocks were there before the kernel ahead began. Weights are constant.
    if constexpr (S::GATED) begin_dependents();
    look_first();
    work = next;
    int begin = work.used >= 0 ? min(S::STAGES, steps) : 0;
    if (thread == 0) {
      Ring early = ring;
      for (int step = 0; step < begin; ++step, early.advance()) load_weight(early, step);
    }
    read_pairs();
    take_next();
    look_ahead();
    if constexpr (!S::GATED) {
      prefetch_behind(begin);
      begin_dependents();
    }
    for (int step = 0; step < begin; ++step, ring.advance()) load_tokens(ring, step);
    while (work.used >= 0) {
      for (int step = begin; step < steps; ++step, ring.advance()) {
        ring.wait_empty();
        if (thread == 0) load_weight(ring, step);
        load_tokens(ring, step);
      }
      begin = 0;
      tile += apart;
      ++number;
      take_next();
      look_ahead();
    }
    finish(ring);
  }
};

}  // namespace vllm_cuda::experts
