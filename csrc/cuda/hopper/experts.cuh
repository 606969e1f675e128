// SPDX-License-Identifier: Apache-2.0
// The experts' matrix products: one persistent CTA per multiprocessor (sm_90a).
//
// Rows of a weight are the left operand of the products, places of a block the right one, of which
// as many as are used, in steps of 16 or 32. A producer warpgroup streams tiles through a ring of
// stages, from one tile to the next without a gap; two consumers each multiply their rows with all
// of a stage's places. k is summed in order whatever the tile.
#pragma once

#include "hopper/experts_tiles.cuh"
#include "hopper/matmul.cuh"

namespace vllm_cuda::experts {

using matmul::Pair;
using matmul::warpgroup_sync;

template <typename S>
struct Consumer {
  static constexpr int kRounds = S::TOKENS / kCopiedRows;

  const ExpertsArgs& args;
  Shared<S>& shared;
  const int steps;
  Ring ring;
  const int warpgroup, thread, warp, lane;
  Work work{};
  int pairs[kRounds];  // of the rows that this thread writes
  float sums[S::BLOCKS][S::TOKENS / 2];  // [64 rows of the weight, places]

  __device__ Consumer(const ExpertsArgs& args_, Shared<S>& shared_, int steps_)
      : args(args_), shared(shared_), steps(steps_), ring(shared_.barriers, S::STAGES),
        warpgroup(threadIdx.x / kWarpgroup - 1), thread(threadIdx.x % kWarpgroup),
        warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

  __device__ void release(uint64_t* empty) const {
    if (S::CLUSTER > 1) {
      if (lane < S::CLUSTER) arrive_at(empty, lane);
    } else if (lane == 0) {
      arrive(empty);
    }
  }

  // The first places' sums of a block of rows.
  template <int N>
  __device__ float (&part(int block))[N / 2] {
    return reinterpret_cast<float(&)[N / 2]>(sums[block]);
  }

  // Stages are given back one behind those that are queued.
  template <int N>
  __device__ void multiply() {
    uint64_t* behind = nullptr;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const Stage<S>& stage = shared.stages[ring.index];
      ring.wait_full();
      shared_fence();
      const uint64_t weight = tile_descriptor(stage.weight[warpgroup * 64 * S::BLOCKS]);
      const uint64_t tokens = tile_descriptor(stage.tokens);
      products_fence();
#pragma unroll
      for (int i = 0; i < kTileRowBytes / 32; ++i) {
#pragma unroll
        for (int block = 0; block < S::BLOCKS; ++block) {
          product<0, 0>(part<N>(block), advance(weight, block * 64 * kTileRowBytes + 32 * i),
                        advance(tokens, 32 * i), step + i > 0);
        }
      }
      products_commit();
      products_wait<1>();
      if (step > 0) release(behind);
      behind = ring.empty();
    }
    products_wait<0>();
    release(behind);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) products_wait<0>(part<N>(block));
  }

  // Of e4m3: tensor cores keep too few bits of a long sum, so they add one stage, and its scaled
  // sums are added in fp32.
  template <int N>
  __device__ void multiply_scaled() {
    constexpr int WIDTH = N % 64 == 0 ? 64 : 32;  // places per product
    constexpr int APART = N / WIDTH, PARTS = S::BLOCKS * APART;
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[block][i] = 0;
    }
    float made[2][WIDTH / 2];
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const Stage<S>& stage = shared.stages[ring.index];
      ring.wait_full();
      shared_fence();
      const uint64_t weight = tile_descriptor(stage.weight[warpgroup * 64 * S::BLOCKS]);
      const uint64_t tokens = tile_descriptor(stage.tokens);
      const auto issue = [&](int i) {
        products_fence();
#pragma unroll
        for (int k = 0; k < kTileRowBytes / 32; ++k) {
          product_e4m3(made[i % 2], advance(weight, i / APART * 64 * kTileRowBytes + 32 * k),
                       advance(tokens, i % APART * WIDTH * kTileRowBytes + 32 * k), k > 0);
        }
        products_commit();
      };
      issue(0);
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        if (i + 1 < PARTS) {
          issue(i + 1);
          products_wait<1>(made[i % 2]);
        } else {
          products_wait<0>(made[i % 2]);
        }
        add_scaled<WIDTH>(made[i % 2], i / APART, i % APART * WIDTH);
      }
      __syncwarp();
      release(ring.empty());
    }
  }
  template <int WIDTH>
  __device__ void add_scaled(const float (&made)[WIDTH / 2], int block, int first) {
    const float* of_rows = shared.weight_scale[ring.index] +
                           (warpgroup * S::BLOCKS + block) * 64 + 16 * warp + lane / 4;
    const float low = of_rows[0], high = of_rows[8];
    const float* of_places = shared.token_scale[ring.index] + first + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(of_places + 8 * j);
      float* sum = sums[block] + first / 2 + 4 * j;
      sum[0] = fmaf(made[4 * j], low * scale.x, sum[0]);
      sum[1] = fmaf(made[4 * j + 1], low * scale.y, sum[1]);
      sum[2] = fmaf(made[4 * j + 2], high * scale.x, sum[2]);
      sum[3] = fmaf(made[4 * j + 3], high * scale.y, sum[3]);
    }
  }

  __device__ char* place(int row, int chunk) const {
    return shared.out[warpgroup][row] + (chunk ^ (row & 7)) * kChunk;
  }

  // Rows of the staged outputs, those of places `first` on, so many chunks each, go to memory from
  // column `output` on.
  __device__ void write_rows(int first, int chunks, int output) const {
    const int chunk = thread % kRowChunks, column = output + 8 * chunk;
    auto* out = static_cast<__nv_bfloat16*>(args.out);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = thread / kRowChunks + i * kCopiedRows;
      if (i * kCopiedRows < first || i * kCopiedRows >= first + S::STAGED) continue;
      if (row < work.used && chunk < chunks && column < args.n) {
        *reinterpret_cast<uint4*>(out + int64_t{pairs[i]} * args.n + column) =
            *reinterpret_cast<const uint4*>(place(row - first, chunk));
      }
    }
  }

  template <int N>
  __device__ void write_gated() {
#pragma unroll
    for (int first = 0; first < N; first += S::STAGED) {
      warpgroup_sync(warpgroup);
#pragma unroll
      for (int block = 0; block < S::BLOCKS; ++block) {
#pragma unroll
        for (int j = 0; j < S::STAGED / 8; j += 4) {
          if (first + 8 * j >= N) continue;
          uint32_t word[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* of = sums[block] + first / 2 + 4 * (j + i);
            word[i] = matmul::activated({of[0], of[1]}, {of[2], of[3]}).bits;
          }
          store_transposed(place(8 * j + lane, 4 * block + warp), word[0], word[1], word[2],
                           word[3]);
        }
      }
      warpgroup_sync(warpgroup);
      write_rows(first, 4 * S::BLOCKS, work.output + warpgroup * 32 * S::BLOCKS);
    }
  }

  template <int N>
  __device__ void write_plain() {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; ++block) {
#pragma unroll
      for (int first = 0; first < N; first += S::STAGED) {
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int j = 0; j < S::STAGED / 8; j += 2) {
          if (first + 8 * j >= N) continue;
          const float* of = sums[block] + first / 2 + 4 * j;
          store_transposed(place(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                           Pair(of[0], of[1]).bits, Pair(of[2], of[3]).bits,
                           Pair(of[4], of[5]).bits, Pair(of[6], of[7]).bits);
        }
        warpgroup_sync(warpgroup);
        write_rows(first, kRowChunks, work.output + (warpgroup * S::BLOCKS + block) * 64);
      }
    }
  }

  // From the tile's first stage, before it is given back.
  __device__ void find_pairs() {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = thread / kRowChunks + i * kCopiedRows;
      const int pair = row < work.used ? shared.pairs[ring.index][row] : 0;
      pairs[i] = pair >= 0 && pair < args.num_pairs ? pair : 0;
    }
  }

  template <int N>
  __device__ void run_tile() {
    if constexpr (S::SCALED) {
      multiply_scaled<N>();
    } else {
      multiply<N>();
    }
    if constexpr (S::GATED) {
      write_gated<N>();
    } else {
      write_plain<N>();
    }
  }

  // With the fewest places that are compiled and hold `work.used`.
  template <int N, int... MORE>
  __device__ void run_smallest() {
    if constexpr (sizeof...(MORE) == 0) {
      run_tile<N>();
    } else if (work.used <= N) {
      run_tile<N>();
    } else {
      run_smallest<MORE...>();
    }
  }

  __device__ void run() {
    while (true) {
      ring.wait_full();
      work = shared.work[ring.index];
      if (work.used < 0) return;
      find_pairs();
      if constexpr (S::TOKENS == 64) {
        run_smallest<32, 64>();
      } else if constexpr (S::TOKENS == 128) {
        run_smallest<32, 64, 96, 128>();
      } else {
        run_smallest<32, 64, 96, 112, 128, 144, 160>();
      }
    }
  }
};

}  // namespace vllm_cuda::experts

namespace vllm_cuda {

template <typename S>
__global__ void __launch_bounds__(experts::kThreads, 1)
    experts_kernel(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ ExpertsArgs args, int steps, int columns) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<experts::Shared<S>*>(memory);
  if (threadIdx.x == 0) {
    Ring(shared.barriers, S::STAGES)
        .init(4 * experts::kConsumers * S::CLUSTER, 1 + experts::kWarpgroup);
  }
  if (S::CLUSTER > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < experts::kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    experts::Producer<S>{weights, args, shared, steps, columns}.run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    wait_for_predecessors();
    launch_dependents();
    experts::Consumer<S>(args, shared, steps).run();
  }
  // No CTA leaves while another may still write into it.
  if (S::CLUSTER > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace vllm_cuda
