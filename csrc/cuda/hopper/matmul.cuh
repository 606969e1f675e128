// SPDX-License-Identifier: Apache-2.0
// Matmuls of many tokens, x @ weight^T (+ residual) or silu(x @ gate^T) * (x @ up^T): one
// persistent CTA per multiprocessor (sm_90a).
//
// A producer thread streams tiles of x and of the weight's rows through a ring of stages; two
// warpgroups each multiply their tokens with all of a stage's rows, so that a thread ends up with
// the gate and the up projection of the same outputs in its registers. k is summed in order
// whatever the tile: a row's bits follow from its own row of x and the weight alone.
#pragma once

#include "hopper/matmul_tiles.cuh"
#include "hopper/tma.cuh"

namespace vllm_cuda::matmul {

// Of a tile's products: by then the last tile's outputs have long left shared memory.
constexpr int kResidualStep = 4;

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

// Four 8 x 8 tiles of 16-bit elements; lanes 8 i to 8 i + 7 name the rows of tile i.
__device__ inline void load_matrices(const void* row, uint32_t (&tiles)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

// Rounded where the separate ops round.
__device__ inline Pair added(const Pair& product, uint32_t residual) {
  return {product.low() + __uint_as_float(residual << 16),
          product.high() + __uint_as_float(residual & 0xFFFF0000)};
}
__device__ inline Pair activated(const Pair& gate, const Pair& up) {
  return {fast_silu(gate.low()) * up.low(), fast_silu(gate.high()) * up.high()};
}

template <typename S>
struct Consumer {
  const Maps& maps;
  Shared<S>& shared;
  const Place<S> own{};
  Ring ring;              // of stages
  Ring fetched, awaited;  // of residuals: what comes next for the leader to fetch, for all to add
  const int warpgroup, warp, lane;
  float sums[S::BLOCKS][S::HALF];  // [64 tokens, rows of the weight]

  __device__ Consumer(const Maps& maps_, Shared<S>& shared_)
      : maps(maps_), shared(shared_), ring(shared_.barriers, S::STAGES),
        fetched(shared_.residual[threadIdx.x / kWarpgroup - 1], S::SLOTS), awaited(fetched),
        warpgroup(threadIdx.x / kWarpgroup - 1), warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ void release(uint64_t* empty) const {
    if (S::CLUSTER == 1) {
      if (lane == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(empty))
                     : "memory");
      }
    } else if (lane < S::WRITERS) {
      arrive_at(empty, own.partner(lane));
    }
  }

  // Stages are given back one behind those that are queued.
  __device__ void multiply(int steps, bool adds, int token, int output) {
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
      products_wait<1>();
      if (step > 0) release(behind);
      if (!S::GATED && adds && step == kResidualStep) fetch_first(token, output);
      behind = ring.empty();
    }
    if (!S::GATED && adds && steps <= kResidualStep) fetch_first(token, output);
    products_wait<0>();
    release(behind);  // before any of the arithmetic below
    wait_for_sums();
  }
  __device__ void wait_for_sums() {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) products_wait<0>(sums[block]);
  }

  // Where the row of 8 outputs that this lane names goes, among the boxes of a slot.
  __device__ char* place(int slot, int row, int group) const {
    constexpr int GROUPS = S::WIDTH / 8;
    char* box = reinterpret_cast<char*>(shared.out[warpgroup][slot * S::ROUND + group / GROUPS]);
    int inside = group % GROUPS;
    if (S::SWIZZLED) inside ^= S::WIDTH == 64 ? row & 7 : row / 2 & 3;
    return box + row * 2 * S::WIDTH + 16 * inside;
  }

  // Two neighbours of the outputs from `at` on of what a thread holds.
  __device__ static Pair finished(const float (&sum)[S::HALF], int at) {
    if constexpr (S::GATED) {
      const float *gate = sum + at, *up = gate + S::OUTPUTS / 2;
      return activated({gate[0], gate[1]}, {up[0], up[1]});
    } else {
      return {sum[at], sum[at + 1]};
    }
  }

  __device__ void stage_outputs(const float (&sum)[S::HALF], int round, bool adds) const {
    constexpr int GROUPS = S::ROUND * S::WIDTH / 8;
    const int row = 16 * warp + lane % 16, slot = round % S::SLOTS;
#pragma unroll
    for (int group = 0; group < GROUPS; group += 2) {
      uint32_t word[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (round * GROUPS + group) + 2 * i;
        if (at < S::OUTPUTS / 2) word[i] = finished(sum, at).bits;
      }
      if (group + 1 < GROUPS) {
        char* to = place(slot, row, group + lane / 16);
        if (!S::GATED && adds) add(to, word);
        store_matrices(to, word[0], word[1], word[2], word[3]);
      } else {
        store_matrices(place(slot, row, group), word[0], word[1]);
      }
    }
  }
  __device__ static void add(const char* from, uint32_t (&word)[4]) {
    uint32_t residual[4];
    load_matrices(from, residual);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair product(word[i]);
      word[i] = added(product, residual[i]).bits;
    }
  }

  // Of round `round` of a block's, into the place where the outputs will be.
  __device__ void fetch_residual(int round, int output, int row) {
    fetched.expect(S::ROUND * 64 * S::WIDTH * 2);
#pragma unroll
    for (int i = 0; i < S::ROUND; ++i) {
      load_box(shared.out[warpgroup][fetched.index * S::ROUND + i], &maps.residual,
               output + (round * S::ROUND + i) * S::WIDTH, row, fetched.full());
    }
    fetched.advance();
  }
  __device__ void fetch_first(int token, int output) {
    if (leads()) {
      wait_for_predecessors();
      wait_for_stores<0>();
      for (int round = 0; round < S::SLOTS; ++round) {
        fetch_residual(round, output, token + warpgroup * S::BLOCKS * 64);
      }
    }
    __syncwarp();
  }
  // Into the slot that the round before this one has left.
  __device__ void fetch_next(int block, int round, int token, int output) {
    const int next = block * S::ROUNDS + round + S::SLOTS - 1;  // of all blocks' rounds
    if (next < S::SLOTS || next >= S::BLOCKS * S::ROUNDS) return;
    wait_for_stores<0>();
    fetch_residual(next % S::ROUNDS, output,
                   token + (warpgroup * S::BLOCKS + next / S::ROUNDS) * 64);
  }

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  __device__ void write(int token, int output, bool adds) {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) {
#pragma unroll
      for (int round = 0; round < S::ROUNDS; ++round) {
        if (!S::GATED && adds) {
          if (leads()) fetch_next(block, round, token, output);
          __syncwarp();
          awaited.wait_full();
          awaited.advance();
        } else {
          if (leads()) wait_for_stores<S::SLOTS - 1>();
          __syncwarp();
          warpgroup_sync(warpgroup);
        }
        stage_outputs(sums[block], round, adds);
        shared_fence();
        warpgroup_sync(warpgroup);
        if (leads()) store(round, output, token + (warpgroup * S::BLOCKS + block) * 64);
        __syncwarp();
      }
    }
  }
  __device__ void store(int round, int output, int row) const {
#pragma unroll
    for (int i = 0; i < S::ROUND; ++i) {
      store_box(&maps.out, shared.out[warpgroup][round % S::SLOTS * S::ROUND + i],
                output + (round * S::ROUND + i) * S::WIDTH, row);
    }
    commit_stores();
  }

  __device__ void run(const Grid& grid, int steps) {
    for (int tile = blockIdx.x / S::CLUSTER; tile < grid.rows * grid.columns;
         tile += gridDim.x / S::CLUSTER) {
      int token, output;
      grid.template place<S>(tile, token, output);
      multiply(steps, grid.adds, token, output);
      write(token, output, grid.adds);
    }
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
    for (auto& residual : shared.residual) Ring(residual, S::SLOTS).init(1);
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
