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

#include "skinny_norm.cuh"

namespace vllm_cuda {

// Where things are in a CTA's shared memory. The partial sums of two blocks, so that one is written
// while the other is added up, lie where the norm's were.
template <typename S, int HALVES, bool NORM>
struct SharedParts {
  static constexpr int SUMS = 2 * S::sums(HALVES);
  static constexpr int SQUARES = NORM ? NormShared::floats(8 * HALVES) : 0;
  static constexpr int FLOATS = SUMS > SQUARES ? SUMS : SQUARES;
  static constexpr int INVERSES = NORM ? 16 : 0;
  uint64_t* barriers;
  float *sums, *inverses;
  uint4* norm_weight;
  char* ring;
  __device__ SharedParts(char* bytes, int k) {
    barriers = reinterpret_cast<uint64_t*>(bytes);
    sums = reinterpret_cast<float*>(bytes + S::BARRIER_BYTES);
    inverses = sums + FLOATS;
    norm_weight = reinterpret_cast<uint4*>(inverses + INVERSES);
    ring = reinterpret_cast<char*>(norm_weight) + norm_bytes(k);
  }
  __host__ __device__ static int norm_bytes(int k) { return NORM ? 2 * k : 0; }
  static int bytes(int k, int ring_bytes) {
    return S::BARRIER_BYTES + 4 * (FLOATS + INVERSES) + norm_bytes(k) + ring_bytes;
  }
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

// Which sums of a block a thread adds up and writes: the jth of EACH.
template <typename S, int HALVES, bool GATED>
struct Results {
  static constexpr int TILES = GATED ? S::TILES / 2 : S::TILES;
  static constexpr int WIDTH = 2 * HALVES;
  static constexpr int EACH = (TILES * WIDTH + S::WARPS - 1) / S::WARPS;
  int part, lane, tile, token, output;
  __device__ explicit Results(int j) {
    const int i = threadIdx.x + j * 32 * S::WARPS;
    part = i / 32 % WIDTH, lane = i % 32, tile = i / (32 * WIDTH);
    token = lane / 4 + 8 * (part / 2);
    output = tile * 8 + 2 * (lane % 4) + part % 2;
  }
  __device__ bool inside(const SkinnyArgs& args, int outputs) const {
    return tile < TILES && token < args.m && output < outputs;
  }
};

// What is added to this thread's results of a block, fetched long before they are there.
template <typename T, typename S, int HALVES, bool GATED>
struct Residual {
  using R = Results<S, HALVES, GATED>;
  float values[R::EACH];
  __device__ Residual(const SkinnyArgs& args, int first, int outputs) {
#pragma unroll
    for (int j = 0; j < R::EACH; ++j) {
      const R at(j);
      values[j] = 0;
      if (!GATED && args.residual != nullptr && at.inside(args, outputs)) {
        const T* row = static_cast<const T*>(args.residual) + int64_t(at.token) * args.n;
        values[j] = to_float(row[first + at.output]);
      }
    }
  }
};

// Adds the warps' sums in order and writes the block's outputs.
template <typename T, typename S, int HALVES, bool GATED>
__device__ void finish(const SkinnyArgs& args, const float* sums, int first, int outputs,
                       const Residual<T, S, HALVES, GATED>& residual) {
  using R = Results<S, HALVES, GATED>;
  constexpr int TILES = R::TILES, WIDTH = R::WIDTH;
  const int width = GATED ? args.n / 2 : args.n;
  T* out = static_cast<T*>(args.out);
#pragma unroll
  for (int j = 0; j < R::EACH; ++j) {
    const R at(j);
    if (!at.inside(args, outputs)) continue;
    const int tile = at.tile, part = at.part, lane = at.lane;
    float total = 0, up = 0;
#pragma unroll
    for (int warp = 0; warp < S::WARPS; ++warp) {
      total += sums[((warp * S::TILES + tile) * WIDTH + part) * 32 + lane];
      if (GATED) up += sums[((warp * S::TILES + TILES + tile) * WIDTH + part) * 32 + lane];
    }
    const int row = first + at.output;
    float result = rounded<T>(total, args, row);
    if (GATED) {
      result = silu(result) * rounded<T>(up, args, args.n / 2 + row);
    } else if (args.residual != nullptr) {
      result += residual.values[j];
    }
    out[int64_t(at.token) * width + row] = from_float<T>(result);
  }
}

template <typename T, typename S, int HALVES, bool GATED, bool NORM>
__device__ void consume(const SkinnyArgs& args, const Work<S, GATED>& work,
                        const SharedParts<S, HALVES, NORM>& shared, Ring& barriers) {
  constexpr int WIDTH = 2 * HALVES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = warp * 32 * S::CHUNKS;  // this warp's first column of a stage
  Tokens<S, HALVES> x[S::AHEAD];          // x[i] is for stage i, AHEAD + i, ... of every block
#pragma unroll
  for (int i = 0; i < S::AHEAD; ++i) x[i].load(args, i * S::COLUMNS + own);
  if constexpr (NORM) {
    normalise<T, S, HALVES>(args, x, shared.sums, shared.inverses, shared.norm_weight);
  }
  for (int block = 0; block < work.blocks; ++block) {
    const int first = work.first(block), outputs = work.outputs(block);
    const TileRows<S, GATED> rows(outputs);
    const Residual<T, S, HALVES, GATED> residual(args, first, outputs);
    float sums[S::TILES][4] = {};
    for (int base = 0; base < work.per_block; base += S::AHEAD) {
#pragma unroll
      for (int i = 0; i < S::AHEAD; ++i) {
        if (base + i >= work.per_block) break;
        barriers.wait_full();
        const int chunks = (args.k - (base + i) * S::COLUMNS - own + 31) / 32;
        multiply<T, S, HALVES, GATED>(
            sums, x[i], shared.ring + barriers.index * work.stage_bytes + 2 * own, rows, chunks);
        __syncwarp();
        if (lane == 0) barriers.release();
        barriers.advance();
        if (!NORM && work.per_block > S::AHEAD) {
          const int next = base + i + S::AHEAD < work.per_block ? base + i + S::AHEAD : i;
          x[i].load(args, next * S::COLUMNS + own);
        }
      }
    }
    float* own_sums = shared.sums + block % 2 * S::sums(HALVES);
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        own_sums[((warp * S::TILES + tile) * WIDTH + i) * 32 + lane] = sums[tile][i];
      }
    }
    // Whoever passes has also read the sums of two blocks ago, which come next.
    consumers_sync<32 * S::WARPS>();
    finish<T, S, HALVES, GATED>(args, own_sums, first, outputs, residual);
  }
}

// Registers for one CTA per multiprocessor: with room for a CTA of the next kernel beside it, x
// would be spilled.
template <typename T, typename S, int HALVES, bool GATED, bool NORM>
__global__ void __launch_bounds__(S::THREADS, 1) skinny_kernel(const SkinnyArgs args) {
  extern __shared__ __align__(128) char bytes[];
  const SharedParts<S, HALVES, NORM> shared(bytes, args.k);
  const Work<S, GATED> work(args);
  Ring barriers(shared.barriers, work.stages);
  if (threadIdx.x == 0) barriers.init(S::WARPS);
  __syncthreads();
  launch_dependents();
  if (threadIdx.x / 32 == S::WARPS) {
    // The weight is constant, so it is fetched before the kernels that make x have finished.
    produce<S, GATED>(args, work, shared.ring, barriers);
  } else {
    if constexpr (NORM) fetch_norm_weight<S>(args, shared.norm_weight);
    // Every kernel of a chain waits here for its predecessor to be complete, whose completion
    // implies that of its own predecessors: whatever still reads this kernel's output buffer from
    // an earlier use has finished before the first write below.
    wait_for_predecessors();
    consume<T, S, HALVES, GATED, NORM>(args, work, shared, barriers);
  }
}

}  // namespace vllm_cuda
