// SPDX-License-Identifier: Apache-2.0
// out [m, n] = x [m, k] @ weight [n, k]^T for m <= 16: one pass over the weight at memory speed.
//
// A CTA owns a contiguous range of weight rows and all of k. A producer warp streams the rows
// through a ring of shared-memory stages with bulk copies; the other warps each own a fixed part
// of every stage's columns and multiply with mma.m16n8k16: tokens are A's 16 rows, 8 weight rows
// are B's columns. Partial sums meet in shared memory and are added in warp order, so a result's
// bits follow from its own row of x, its own row of weight and k alone: not from m, n or the grid.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "skinny.h"

namespace vllm_cuda {

// Blocks of at most 8 * TILES weight rows; every one of WARPS takes CHUNKS of 32 columns from a
// stage and keeps x for AHEAD stages in registers.
template <int TILES_, int WARPS_, int CHUNKS_, int AHEAD_>
struct Shape {
  static constexpr int TILES = TILES_, WARPS = WARPS_, CHUNKS = CHUNKS_, AHEAD = AHEAD_;
  static constexpr int ROWS = 8 * TILES;
  static constexpr int COLUMNS = 32 * CHUNKS * WARPS;
  // 64 bytes of padding put neighbouring rows into different banks.
  static constexpr int ROW_BYTES = 2 * COLUMNS + 64;
  static constexpr int THREADS = 32 * (WARPS + 1);
  static constexpr int MAX_STAGES = 16;
  static constexpr int BARRIER_BYTES = 2 * 8 * MAX_STAGES;
  // Partial sums of two blocks, so that one is written while the other is added up.
  __host__ __device__ static constexpr int sums(int halves) {
    return WARPS * TILES * 64 * halves;
  }
  static constexpr int shared_bytes(int halves, int ring_bytes) {
    return BARRIER_BYTES + 2 * 4 * sums(halves) + ring_bytes;
  }
};

// `total` in `parts` that differ by one at most.
struct Parts {
  int size, larger;
  __device__ Parts(int total, int parts) : size(total / parts), larger(total % parts) {}
  __device__ int start(int part) const { return part * size + min(part, larger); }
  __device__ int largest() const { return size + (larger > 0); }
};

// This CTA's output columns, cut into blocks, and the stages that make up a block.
template <typename S, bool GATED>
struct Work {
  static_assert(!GATED || S::TILES % 2 == 0);
  int begin, blocks, per_block, stage_bytes, stages;
  Parts parts;
  __device__ explicit Work(const SkinnyArgs& args)
      : parts(GATED ? args.n / 2 : args.n, gridDim.x) {
    constexpr int CAPACITY = GATED ? S::ROWS / 2 : S::ROWS;
    begin = parts.start(blockIdx.x);
    const int count = parts.start(blockIdx.x + 1) - begin;
    blocks = (count + CAPACITY - 1) / CAPACITY;
    parts = Parts(count, blocks);
    per_block = (args.k + S::COLUMNS - 1) / S::COLUMNS;
    stage_bytes = (GATED ? 2 : 1) * parts.largest() * S::ROW_BYTES;
    stages = min(S::MAX_STAGES, args.ring_bytes / stage_bytes);
  }
  __device__ int first(int block) const { return begin + parts.start(block); }
  __device__ int outputs(int block) const { return first(block + 1) - first(block); }
};

// A stage holds a block's rows, `outputs` of the gate before those of the up projection.
template <typename S, bool GATED>
__device__ void produce(const SkinnyArgs& args, const Work<S, GATED>& work, char* ring,
                        Ring& barriers) {
  const int lane = threadIdx.x % 32;
  const uint64_t policy = evict_first_policy();
  const char* weight = static_cast<const char*>(args.weight);
  for (int block = 0; block < work.blocks; ++block) {
    const int first = work.first(block), outputs = work.outputs(block);
    const int rows = GATED ? 2 * outputs : outputs;
    for (int column = 0; column < args.k; column += S::COLUMNS) {
      const uint32_t bytes = 2 * min(S::COLUMNS, args.k - column);
      barriers.wait_empty();
      if (lane == 0) barriers.expect(bytes * rows);
      __syncwarp();
      char* stage = ring + barriers.index * work.stage_bytes;
      for (int row = lane; row < rows; row += 32) {
        const int64_t source = first + (row < outputs ? row : args.n / 2 + row - outputs);
        bulk_copy(stage + row * S::ROW_BYTES, weight + 2 * (source * args.k + column), bytes,
                  barriers.full(), policy);
      }
      barriers.advance();
    }
  }
}

// One stage's columns of x: a thread holds 8 of each chunk, for tokens `lane / 4` and
// `lane / 4 + 8`. An mma pairs the same 16 columns of x and weight, whichever those are, so both
// are loaded 16 bytes at a time.
template <typename S, int HALVES>
struct Tokens {
  uint4 words[S::CHUNKS][HALVES];
  __device__ void load(const SkinnyArgs& args, int column) {
    const int lane = threadIdx.x % 32;
    const char* x = static_cast<const char*>(args.x);
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      const int at = column + 32 * c + 8 * (lane % 4);
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const int token = lane / 4 + 8 * h;
        words[c][h] = make_uint4(0, 0, 0, 0);
        if (token < args.m && at < args.k) {
          words[c][h] = *reinterpret_cast<const uint4*>(x + 2 * (token * args.x_stride + at));
        }
      }
    }
  }
};

// Where in a stage this thread's rows of a block are: one in each tile, in the last tile the last
// row again where there are fewer than 8.
template <typename S, bool GATED>
struct TileRows {
  int offsets[S::TILES], tiles;
  __device__ explicit TileRows(int outputs) : tiles((outputs + 7) / 8) {
    constexpr int TILES = GATED ? S::TILES / 2 : S::TILES;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) {
      const int row = min(tile % TILES * 8 + lane / 4, outputs - 1) + (tile < TILES ? 0 : outputs);
      offsets[tile] = row * S::ROW_BYTES + 16 * (lane % 4);
    }
  }
  __device__ bool has(int tile) const { return tile % (GATED ? S::TILES / 2 : S::TILES) < tiles; }
};

template <typename T, typename S, int HALVES, bool GATED>
__device__ void multiply(float (&sums)[S::TILES][4], const Tokens<S, HALVES>& x, const char* stage,
                         const TileRows<S, GATED>& rows, int chunks) {
#pragma unroll
  for (int c = 0; c < S::CHUNKS; ++c) {
    if (c >= chunks) return;
    const uint4 low = x.words[c][0];
    const uint4 high = HALVES == 2 ? x.words[c][HALVES - 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) {
      if (!rows.has(tile)) continue;
      const uint4 w = *reinterpret_cast<const uint4*>(stage + rows.offsets[tile] + 64 * c);
      mma<T>(sums[tile], low.x, high.x, low.y, high.y, w.x, w.y);
      mma<T>(sums[tile], low.z, high.z, low.w, high.w, w.z, w.w);
    }
  }
}

template <typename T>
__device__ float rounded(float sum, const SkinnyArgs& args, int row) {
  if (args.bias != nullptr) sum += to_float(static_cast<const T*>(args.bias)[row]);
  return to_float(from_float<T>(sum));
}

// Adds the warps' sums in order and writes the block's outputs.
template <typename T, typename S, int HALVES, bool GATED>
__device__ void finish(const SkinnyArgs& args, const float* sums, int first, int outputs) {
  constexpr int TILES = GATED ? S::TILES / 2 : S::TILES;
  constexpr int WIDTH = 2 * HALVES;
  const int width = GATED ? args.n / 2 : args.n;
  T* out = static_cast<T*>(args.out);
  for (int i = threadIdx.x; i < TILES * 32 * WIDTH; i += 32 * S::WARPS) {
    const int part = i / 32 % WIDTH, lane = i % 32, tile = i / (32 * WIDTH);
    const int token = lane / 4 + 8 * (part / 2);
    const int output = tile * 8 + 2 * (lane % 4) + part % 2;
    if (token >= args.m || output >= outputs) continue;
    float total = 0, up = 0;
#pragma unroll
    for (int warp = 0; warp < S::WARPS; ++warp) {
      total += sums[((warp * S::TILES + tile) * WIDTH + part) * 32 + lane];
      if (GATED) up += sums[((warp * S::TILES + TILES + tile) * WIDTH + part) * 32 + lane];
    }
    const int row = first + output;
    float result = rounded<T>(total, args, row);
    if (GATED) result = silu(result) * rounded<T>(up, args, args.n / 2 + row);
    out[int64_t(token) * width + row] = from_float<T>(result);
  }
}

template <typename T, typename S, int HALVES, bool GATED>
__device__ void consume(const SkinnyArgs& args, const Work<S, GATED>& work, char* ring,
                        Ring& barriers, float* shared_sums) {
  constexpr int WIDTH = 2 * HALVES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = warp * 32 * S::CHUNKS;  // this warp's first column of a stage
  Tokens<S, HALVES> x[S::AHEAD];          // x[i] is for stage i, AHEAD + i, ... of every block
#pragma unroll
  for (int i = 0; i < S::AHEAD; ++i) x[i].load(args, i * S::COLUMNS + own);
  for (int block = 0; block < work.blocks; ++block) {
    const int first = work.first(block), outputs = work.outputs(block);
    const TileRows<S, GATED> rows(outputs);
    float sums[S::TILES][4] = {};
    for (int base = 0; base < work.per_block; base += S::AHEAD) {
#pragma unroll
      for (int i = 0; i < S::AHEAD; ++i) {
        if (base + i >= work.per_block) break;
        barriers.wait_full();
        const int chunks = (args.k - (base + i) * S::COLUMNS - own + 31) / 32;
        multiply<T, S, HALVES, GATED>(
            sums, x[i], ring + barriers.index * work.stage_bytes + 2 * own, rows, chunks);
        __syncwarp();
        if (lane == 0) barriers.release();
        barriers.advance();
        if (work.per_block > S::AHEAD) {
          const int next = base + i + S::AHEAD < work.per_block ? base + i + S::AHEAD : i;
          x[i].load(args, next * S::COLUMNS + own);
        }
      }
    }
    float* own_sums = shared_sums + block % 2 * S::sums(HALVES);
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        own_sums[((warp * S::TILES + tile) * WIDTH + i) * 32 + lane] = sums[tile][i];
      }
    }
    // Whoever passes has also read the sums of two blocks ago, which come next.
    consumers_sync<32 * S::WARPS>();
    finish<T, S, HALVES, GATED>(args, own_sums, first, outputs);
  }
}

template <typename T, typename S, int HALVES, bool GATED>
__global__ void __launch_bounds__(S::THREADS, HALVES == 1 ? 2 : 1) skinny_kernel(const SkinnyArgs args) {
  extern __shared__ __align__(128) char shared[];
  uint64_t* words = reinterpret_cast<uint64_t*>(shared);
  float* sums = reinterpret_cast<float*>(shared + S::BARRIER_BYTES);
  char* ring = shared + S::BARRIER_BYTES + 2 * 4 * S::sums(HALVES);
  const Work<S, GATED> work(args);
  Ring barriers(words, work.stages);
  if (threadIdx.x == 0) barriers.init(S::WARPS);
  __syncthreads();
  launch_dependents();
  if (threadIdx.x / 32 == S::WARPS) {
    // The weight is constant, so it is fetched before the kernels that make x have finished.
    produce<S, GATED>(args, work, ring, barriers);
  } else {
    // Every kernel of a chain waits here for its predecessor to be complete, whose completion
    // implies that of its own predecessors: whatever still reads this kernel's output buffer from
    // an earlier use has finished before the first write below.
    wait_for_predecessors();
    consume<T, S, HALVES, GATED>(args, work, ring, barriers, sums);
  }
}

}  // namespace vllm_cuda
