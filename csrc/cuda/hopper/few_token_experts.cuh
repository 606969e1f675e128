// SPDX-License-Identifier: Apache-2.0
// Experts of a few tokens: nothing is sorted in memory, and all that counts is that memory never
// waits (sm_90a).
//
// A CTA per multiprocessor makes its share of the gate and up projections, waits for all others,
// and makes its share of the down projections. A warp streams pieces of the weights of the experts
// that are hit, some rows each, through a ring of stages, those of both products without a gap;
// teams of warps multiply a piece each by what hits its expert.
#pragma once

#include "hopper/few_token_experts_bf16.cuh"
#include "hopper/few_token_experts_float8.cuh"

namespace vllm_cuda::few_token_experts {

template <typename P>
struct OperandOf {
  using Type = Bf16Operand<P>;
};
template <bool GATED>
struct OperandOf<Product<GATED, Float8>> {
  using Type = Float8Operand<Product<GATED, Float8>>;
};

// What the kernel is given: all that follows from sizes alone. T: of the weights.
template <typename T>
struct Task {
  typename OperandOf<Product<true, T>>::Type first;
  typename OperandOf<Product<false, T>>::Type second;
  int stages = 0;
  int at[2]{};  // of the operands: bytes from the ring's begin

  Task(const FewTokenExpertsArgs& args, int ctas)
      : first(Product<true, T>(args, ctas)), second(Product<false, T>(args, ctas)) {}
};

struct Shared {
  uint64_t barriers[2 * MOST_STAGES];
  Hits hits;
  alignas(128) char ring[];  // then the operands
};

// The upper bit turns each time that all CTAs have come. One such kernel runs on a device at a
// time: two of them on two streams would wait for each other's multiprocessors.
__device__ uint32_t meeting;
constexpr uint32_t ALL_CAME = 1u << 31;

__device__ inline uint32_t look_at_meeting() {
  uint32_t seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(&meeting) : "memory");
  return seen;
}
// A thread does, once its CTA has written all that others are to see. `before`: what has been seen
// in this launch, after all kernels ahead.
__device__ inline void meet(uint32_t before) {
  const uint32_t step = blockIdx.x == 0 ? ALL_CAME - (gridDim.x - 1) : 1;
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&meeting), "r"(step) : "memory");
  while (((look_at_meeting() ^ before) & ALL_CAME) == 0) {
  }
}

// A warp; its first lane copies.
template <typename P>
__device__ inline void produce(const P& product, Shared& shared, Ring& ring) {
  const uint64_t policy = evict_first_policy();
#pragma unroll 1
  for (Turns turns(product, 0); turns.more(shared.hits);
       turns.advance(product, 1), ring.advance()) {
    if (threadIdx.x % 32 == 0) {
      const Piece piece = turns.get(product);
      ring.wait_empty();
      product.copy(shared.hits.hit[piece.hit].expert, piece,
                   shared.ring + ring.index * STAGE_BYTES, ring, policy);
    }
    __syncwarp();
  }
}

template <typename Operand>
__device__ inline void request(const Operand& operand, Shared& shared, char* memory,
                               const Turns& turns) {
  if (turns.more(shared.hits)) {
    operand.request(memory, shared.hits, turns.get(operand.product));
  }
}

// A team's pieces of one of the products: every TEAMSth of its CTA's.
template <typename Operand>
__device__ inline void multiply(const Operand& operand, Shared& shared, char* memory, Turns& turns,
                                Ring& ring) {
#pragma unroll 1
  while (turns.more(shared.hits)) {
    ring.wait_full();
    const char* const weight = shared.ring + ring.index * STAGE_BYTES;
    operand.multiply(memory, reinterpret_cast<const uint4*>(weight), shared.hits,
                     turns.get(operand.product));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release();
    for (int i = 0; i < TEAMS; ++i) ring.advance();
    turns.advance(operand.product, TEAMS);
    request(operand, shared, memory, turns);
  }
}

template <typename T, typename Early>
__device__ inline void consume(const Task<T>& task, Shared& shared, const Early& early) {
  char *const of_first = shared.ring + task.at[0], *const of_second = shared.ring + task.at[1];
  const uint32_t before = threadIdx.x == 0 ? look_at_meeting() : 0;
  const int team = threadIdx.x / 32 / TEAM;
  Ring ring(shared.barriers, task.stages);
  for (int i = 0; i < team; ++i) ring.advance();
  Turns turns(task.first.product, team);
  request(task.first, shared, of_first, turns);
  task.first.input.finish(of_first, early);
  multiply(task.first, shared, of_first, turns, ring);

  const int done = Turns::of(task.first.product, shared.hits);
  turns = Turns(task.second.product, (team + TEAMS - done % TEAMS) % TEAMS);
  request(task.second, shared, of_second, turns);
  consumers_sync<32 * CONSUMERS>();
  if (threadIdx.x == 0) meet(before);
  consumers_sync<32 * CONSUMERS>();
  task.second.input.load(of_second);
  multiply(task.second, shared, of_second, turns, ring);
}

// Grid (CTAs), one per multiprocessor: all are there at once, for kernels ahead end and those
// behind begin when all have begun.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    kernel(const __grid_constant__ Task<T> task) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) Ring(shared.barriers, task.stages).init(TEAM);
  task.first.input.prepare(shared.ring + task.at[0]);
  task.second.input.prepare(shared.ring + task.at[1]);
  __syncthreads();
  wait_for_predecessors();
  const auto& args = task.first.product.args;
  const int expert = Hits::fetch(args);
  const auto early = task.first.input.begin(shared.ring + task.at[0]);
  shared.hits.find(args, expert);
  if (threadIdx.x / 32 == CONSUMERS) {
    Ring ring(shared.barriers, task.stages);
    produce(task.first.product, shared, ring);
    produce(task.second.product, shared, ring);
    launch_dependents();
  } else {
    consume(task, shared, early);
  }
}

}  // namespace vllm_cuda::few_token_experts
