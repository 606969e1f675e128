// SPDX-License-Identifier: Apache-2.0
// Pairs sorted by expert in one launch: a cluster of CTAs, each with a run of the pairs, each of
// whose warps has a run of those.
//
// Every warp counts its pairs by expert; sums over the warps and CTAs before it say where its
// first pair of each expert goes, and the order within a warp is that of its lanes. So pairs of an
// expert keep their order, whatever the timing.
#include <algorithm>

#include "expert_blocks.h"
#include "hopper/boxes.cuh"
#include "launch.h"
#include "ptx.cuh"

namespace vllm_cuda {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
static_assert(kMostExperts <= kThreads, "a thread per expert");
// CTAs for many pairs, and how many pairs one CTA sorts alone.
constexpr int kCluster = 8, kAlone = 4096;
// Loads of a lane that are under way together, from global and from shared memory.
constexpr int kAhead = 4, kTogether = 8;

struct Shared {
  int totals[kMostExperts];  // of this CTA, by expert
  int bases[kMostExperts];   // the place of this CTA's first pair
  int warp_sums[kWarps];
  int counts[];  // [warps][experts]
};

__device__ inline int load_from(const int* of, int rank) {
  int value;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.s32 %0, [remote];\n}"
      : "=r"(value)
      : "r"(shared_address(of)), "r"(rank)
      : "memory");
  return value;
}

// The sum over the threads before this one, and over all.
__device__ inline int sum_before(Shared& shared, int value, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, sum, apart);
    if (lane >= apart) sum += other;
  }
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int of_warp = shared.warp_sums[i];
    if (i < warp) before += of_warp;
    all += of_warp;
  }
  return before + sum - value;
}

struct Sorter {
  const ExpertBlocksArgs& args;
  Shared& shared;
  const int rank, ctas;
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first = 0, end = 0;  // this warp's pairs
  int warps = 0;           // of this CTA that have any

  __device__ int* counts(int of_warp) const { return shared.counts + of_warp * args.num_experts; }

  __device__ void divide() {
    const int runs = ctas * kWarps;
    const int run = ((args.num_pairs + runs - 1) / runs + 31) / 32 * 32;
    first = min((rank * kWarps + warp) * run, args.num_pairs);
    end = min(first + run, args.num_pairs);
    const int rest = max(0, args.num_pairs - rank * kWarps * run);
    warps = min(kWarps, (rest + run - 1) / run);
  }

  // -1 for pairs that do not exist and for experts that are not here.
  __device__ int expert_of(int pair) const {
    if (pair >= end) return -1;
    const int expert = args.experts[pair / args.slots * args.stride + pair % args.slots];
    return expert < args.num_experts ? max(expert, -1) : -1;
  }

  // Calls `visit(pair, expert, how many of the expert's were before it in this warp)`.
  template <typename Visit>
  __device__ void each_pair(const Visit& visit) {
    int* own = counts(warp);
    for (int begin = first; begin < end; begin += 32 * kAhead) {
      int experts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) experts[i] = expert_of(begin + 32 * i + lane);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + 32 * i >= end) break;
        const int expert = experts[i];
        const unsigned same = __match_any_sync(~0u, expert);
        const int lower = __popc(same & ((1u << lane) - 1));
        if (expert >= 0) visit(begin + 32 * i + lane, expert, own[expert] + lower);
        __syncwarp();
        if (expert >= 0 && lower == 0) own[expert] += __popc(same);
        __syncwarp();
      }
    }
  }

  // A warp's counts become those of the warps before it.
  __device__ void add_warps() {
    if (thread >= args.num_experts) return;
    int total = 0;
    for (int begin = 0; begin < warps; begin += kTogether) {
      int own[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        own[i] = begin + i < warps ? counts(begin + i)[thread] : 0;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i < warps) counts(begin + i)[thread] = total;
        total += own[i];
      }
    }
    shared.totals[thread] = total;
  }

  __device__ void place_blocks() {
    int before = 0, total = 0;
    if (thread < args.num_experts) {
      for (int i = 0; i < ctas; ++i) {
        const int of_cta = ctas == 1 ? shared.totals[thread] : load_from(&shared.totals[thread], i);
        if (i < rank) before += of_cta;
        total += of_cta;
      }
    }
    const int blocks = (total + args.height - 1) / args.height;
    int used;
    const int block = sum_before(shared, blocks, used);
    if (thread < args.num_experts) {
      shared.bases[thread] = block * args.height + before;
      if (rank == 0) args.ends[thread] = block * args.height + total;
    }
    if (rank != ctas - 1) return;
    for (int i = block; i < min(block + blocks, args.num_blocks); ++i) {
      args.block_experts[i] = thread;
    }
    for (int i = used + thread; i < args.num_blocks; i += kThreads) args.block_experts[i] = -1;
  }

  __device__ void run() {
    divide();
    for (int i = thread; i < warps * args.num_experts; i += kThreads) shared.counts[i] = 0;
    __syncthreads();
    wait_for_predecessors();
    each_pair([](int, int, int) {});
    __syncthreads();
    add_warps();
    if (ctas == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
    place_blocks();
    __syncthreads();
    const int places = args.num_blocks * args.height;
    each_pair([&](int pair, int expert, int before) {
      const int place = shared.bases[expert] + before;
      // What is read may change where a launch was noted and not made.
      if (place < places) args.pairs[place] = pair;
    });
    // None leaves while another reads its totals.
    if (ctas > 1) cluster_sync();
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    expert_blocks_kernel(const __grid_constant__ ExpertBlocksArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  launch_dependents();
  const int ctas = gridDim.x;
  Sorter{args, *reinterpret_cast<Shared*>(memory), ctas == 1 ? 0 : cluster_rank(), ctas}.run();
}

}  // namespace

const char* launch_expert_blocks(const ExpertBlocksArgs& args, const ExpertBlocksLaunch& launch) {
  const cudaError_t error = allow_shared_memory<expert_blocks_kernel>(launch.device);
  if (error != cudaSuccess) return describe(error);
  const unsigned ctas = args.num_pairs <= kAlone ? 1 : kCluster;
  const size_t shared = sizeof(Shared) + sizeof(int) * kWarps * args.num_experts;
  const LaunchGrid grid{ctas, kThreads, shared, launch.stream, launch.overlap, ctas};
  return launch_kernel<expert_blocks_kernel>(grid, args);
}

}  // namespace vllm_cuda
