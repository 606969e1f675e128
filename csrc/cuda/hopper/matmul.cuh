// SPDX-License-Identifier: Apache-2.0
// The gated matmul of many tokens, silu(x @ gate^T) * (x @ up^T): one persistent CTA per
// multiprocessor (sm_90a).
//
// A producer thread streams tiles of x and of the weight's rows through a ring of stages; two
// warpgroups each multiply their tokens with all of a stage's rows, so that a thread ends up with
// the gate and the up projection of the same outputs in its registers. k is summed in order
// whatever the tile: a row's bits follow from its own row of x and the weight alone.
#pragma once

#include "hopper/matmul_tiles.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::matmul {

__device__ inline void warpgroup_sync(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(kWarpgroup) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(kWarpgroup) : "memory");
  }
}

// `silu` with the same bits wherever it is a normal number, and without its branches: 1 + e^-x is
// kept at a quarter, so that its inverse is never too small for the fast instruction.
__device__ inline float fast_silu(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x * 1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(fmaf(power, 0.25f, 0.25f)));
  return x * (0.25f * inverse);
}

// Two neighbours, as 16 bits each.
struct Pair {
  uint32_t bits;
  __device__ Pair(float low, float high) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&rounded);
  }
  __device__ explicit Pair(uint32_t bits_) : bits(bits_) {}
  __device__ float low() const { return __uint_as_float(bits << 16); }
  __device__ float high() const { return __uint_as_float(bits & 0xFFFF0000); }
};

// Rounded where the separate ops round.
__device__ inline Pair activated(const Pair& gate, const Pair& up) {
  return {fast_silu(gate.low()) * up.low(), fast_silu(gate.high()) * up.high()};
}

template <typename S>
struct Consumer {
  const Maps& maps;
  Shared<S>& shared;
  const Place<S> own{};
  Ring ring;  // of stages
  const int warpgroup, warp, lane;
  float sums[S::BLOCKS][S::OUTPUTS];  // [64 tokens, rows of the weight]

  // A piece of a block of 64 tokens is two groups of 8 outputs. Where registers hold two tiles, the
  // last one's pieces are activated and written while the next is multiplied.
  static constexpr int GROUPS = S::OUTPUTS / 8, PIECES = (GROUPS + 1) / 2;
  static constexpr bool LATE = S::BLOCKS == 1;
  uint32_t rounded[S::BLOCKS][S::OUTPUTS / 2];  // sums, in pairs
  int piece = PIECES;                           // of the last tile, the next to write
  int last_token, last_output;

  __device__ Consumer(const Maps& maps_, Shared<S>& shared_)
      : maps(maps_), shared(shared_), ring(shared_.barriers, S::STAGES),
        warpgroup(threadIdx.x / kWarpgroup - 1), warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ void release(uint64_t* empty) const {
    if (S::CLUSTER == 1) {
      if (lane == 0) arrive(empty);
    } else if (lane < S::WRITERS) {
      arrive_at(empty, own.partner(lane));
    }
  }

  // Stages are given back one behind those that are queued.
  __device__ void multiply(int steps) {
    uint64_t* behind = nullptr;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const Stage<S>& stage = shared.stages[ring.index];
      ring.wait_full();
      const uint64_t weight = tile_descriptor(stage.weight);
      const uint64_t x = tile_descriptor(stage.x[warpgroup * 64 * S::BLOCKS]);
      products_fence();
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
#pragma unroll
        for (int block = 0; block < S::BLOCKS; ++block) {
          product<0, 0>(sums[block], advance(x, block * 64 * kTileRowBytes + 32 * i),
                        advance(weight, 32 * i), step + i > 0);
        }
      }
      products_commit();
      if (LATE && piece < PIECES) write_piece();
      products_wait<1>();
      if (step > 0) release(behind);
      behind = ring.empty();
    }
    products_wait<0>();
    release(behind);  // before any of the arithmetic below
    wait_for_sums();
  }
  __device__ void wait_for_sums() {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) products_wait<0>(sums[block]);
  }

  // Where the row of 8 outputs that this lane names goes, among the boxes.
  __device__ char* place(int row, int group) const {
    constexpr int GROUPS = S::WIDTH / 8;
    char* box = reinterpret_cast<char*>(shared.out[warpgroup][group / GROUPS]);
    int inside = group % GROUPS;
    if (S::SWIZZLED) inside ^= S::WIDTH == 64 ? row & 7 : row / 2 & 3;
    return box + row * 2 * S::WIDTH + 16 * inside;
  }

  __device__ void round_sums() {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < S::OUTPUTS / 2; ++i) {
        rounded[block][i] = Pair(sums[block][2 * i], sums[block][2 * i + 1]).bits;
      }
    }
  }

  __device__ void stage_piece(int block, int index) const {
    const int row = 16 * warp + lane % 16, group = 2 * index;
    const uint32_t *gate = rounded[block] + 2 * group, *up = gate + S::OUTPUTS / 4;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (group + i / 2 < GROUPS) word[i] = activated(Pair(gate[i]), Pair(up[i])).bits;
    }
    if (group + 1 < GROUPS) {
      store_matrices(place(row, group + lane / 16), word[0], word[1], word[2], word[3]);
    } else {
      store_matrices(place(row, group), word[0], word[1]);
    }
  }

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  // The last stores have read what is written over now.
  __device__ void begin_write() const {
    if (leads()) wait_for_stores<0>();
    __syncwarp();
    warpgroup_sync(warpgroup);
  }
  __device__ void end_write(int block) const {
    shared_fence();
    warpgroup_sync(warpgroup);
    if (leads()) store(last_output, last_token + (warpgroup * S::BLOCKS + block) * 64);
    __syncwarp();
  }

  // The next piece of the last tile.
  template <int INDEX = 0>
  __device__ void write_piece() {
    if constexpr (INDEX < PIECES) {
      if (piece != INDEX) return write_piece<INDEX + 1>();
      if (INDEX == 0) begin_write();
      stage_piece(0, INDEX);
      if (INDEX == PIECES - 1) end_write(0);
      ++piece;
    }
  }

  // The last tile, what of it is not written yet.
  __device__ void write() {
    if constexpr (LATE) {
#pragma unroll 1
      while (piece < PIECES) write_piece();
    } else {
#pragma unroll
      for (int block = 0; block < S::BLOCKS; ++block) {
        begin_write();
#pragma unroll
        for (int i = 0; i < PIECES; ++i) stage_piece(block, i);
        end_write(block);
      }
    }
  }
  __device__ void store(int output, int row) const {
#pragma unroll
    for (int i = 0; i < S::BOXES; ++i) {
      store_box(&maps.out, shared.out[warpgroup][i], output + i * S::WIDTH, row);
    }
    commit_stores();
  }

  __device__ void run(const Grid& grid, int steps) {
    for (int tile = blockIdx.x / S::CLUSTER; tile < grid.rows * grid.columns;
         tile += gridDim.x / S::CLUSTER) {
      int token, output;
      grid.template place<S>(tile, token, output);
      multiply(steps);
      if (LATE) write();
      round_sums();
      last_token = token, last_output = output, piece = 0;
      if (!LATE) write();
    }
    if (LATE) write();
    if (leads()) wait_for_stores<0>();
  }
};

}  // namespace vllm_cuda::matmul

namespace vllm_cuda {

template <typename S>
__global__ void __launch_bounds__(matmul::kThreads, 1)
    matmul_kernel(const __grid_constant__ matmul::Maps maps, const matmul::Grid grid, int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<matmul::Shared<S>*>(memory);
  if (threadIdx.x == 0) {
    Ring(shared.barriers, S::STAGES).init(4 * matmul::kConsumers * S::WRITERS);
  }
  if (S::CLUSTER == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  launch_dependents();
  if (threadIdx.x < matmul::kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) matmul::Producer<S>{maps, grid, shared}.run(steps);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    matmul::Consumer<S>(maps, shared).run(grid, steps);
  }
  // Neither CTA leaves while the other may still write into it.
  if (S::CLUSTER > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace vllm_cuda
