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
template <typename S>
struct Producer {
  static constexpr int kRounds = S::TOKENS / kCopiedRows;

  const CUtensorMap& weights;
  const ExpertsArgs& args;
  Shared<S>& shared;
  const int steps, columns;  // of k, and of tiles
  const int thread = threadIdx.x;
  Work work{};
  uint32_t rows[kRounds];  // this thread's chunks of x, in chunks
  int64_t scale_rows[2]{};  // whose scales this thread copies
  const int rank = S::CLUSTER > 1 ? cluster_rank() : 0;

  // What a tile is; nothing behind the last block that is used.
  __device__ Work find(int tile) const {
    const int block = tile / columns;
    Work end{};
    end.used = -1;
    if (block >= args.num_blocks) return end;
    const int expert = args.block_experts[block];
    if (expert < 0 || expert >= args.num_experts) return end;
    const int place = block * S::HEIGHT;
    const int used = min(S::HEIGHT, args.ends[expert] - place);
    if (used <= 0) return end;
    const int part = (used + S::CLUSTER - 1) / S::CLUSTER;
    const int own = min(part, max(0, used - rank * part));
    return {place + rank * part, own, tile % columns * S::OUTPUTS, expert};
  }

  __device__ void load_weight(Ring& ring, int step) const {
    auto& to = shared.stages[ring.index].weight;
    shared.work[ring.index] = work;
    ring.expect(sizeof(to));
    const int first = rank * S::FETCHED;
    load_rows<S>(to[first], &weights, step * (kTileRowBytes / 2),
                 (S::GATED ? 2 * work.output : work.output) + first, work.expert, ring.full());
  }

  // The row of x that a place's is.
  __device__ int row_at(int place) const {
    const int pair = args.pairs[work.place + place];
    return pair >= 0 && pair < args.num_pairs ? pair / args.slots : 0;
  }

  // Where this thread's chunks of the tile's rows begin.
  __device__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int place = thread / kRowChunks + i * kCopiedRows;
      rows[i] = 0;
      if (place < work.used) {
        rows[i] = static_cast<uint32_t>(row_at(place)) *
                      static_cast<uint32_t>(args.x_stride / kChunk) +
                  thread % kRowChunks;
      }
    }
    if constexpr (S::SCALED) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = thread + i * kWarpgroup;
        if (place < work.used) scale_rows[i] = row_at(place);
      }
    }
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
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = thread + i * kWarpgroup;
        if (place < work.used) {
          copy_async<4>(
              &shared.token_scale[ring.index][place],
              args.x_scale + scale_rows[i] * args.x_scale_row + step * args.x_scale_group);
        }
      }
    }
  }

  // What is not the weight.
  __device__ void load_tokens(Ring& ring, int step) const {
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
    const int apart = gridDim.x / S::CLUSTER;
    int tile = blockIdx.x / S::CLUSTER, begin = 0;
    if constexpr (S::GATED) {
      begin_dependents();
      work = find(tile);
    } else {
      // Blocks were there before the kernel ahead began, and weights are constant.
      work = find(tile);
      begin = work.used >= 0 ? min(S::STAGES, steps) : 0;
      if (thread == 0) {
        Ring early = ring;
        for (int step = 0; step < begin; ++step, early.advance()) load_weight(early, step);
      }
      find_rows();
      begin_dependents();
      for (int step = 0; step < begin; ++step, ring.advance()) load_tokens(ring, step);
    }
    for (; work.used >= 0; tile += apart, work = find(tile), begin = 0) {
      find_rows();
      for (int step = begin; step < steps; ++step, ring.advance()) {
        ring.wait_empty();
        if (thread == 0) load_weight(ring, step);
        load_tokens(ring, step);
      }
    }
    finish(ring);
  }
};

}  // namespace vllm_cuda::experts
