// SPDX-License-Identifier: Apache-2.0
// Pushes, their flags, and the norm that adds what was pushed.
#include "pushes.h"

#include "launch.h"
#include "rank_words.cuh"
#include "sum_chunk.cuh"

namespace vllm_cuda {

namespace {

__device__ uint32_t* flag_word(const Peers& peers, int receiver, int flag, int sender) {
  uint8_t* flags = peers.inboxes[receiver] + peers.push_offset;
  return reinterpret_cast<uint32_t*>(flags) + flag * kMaxRanks + sender;
}

// A thread per rank.
__global__ void signal_kernel(const __grid_constant__ Peers peers, int flag, uint32_t value) {
  uint32_t* word = flag_word(peers, threadIdx.x, flag, peers.rank);
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__global__ void await_kernel(const __grid_constant__ Peers peers, int flag, uint32_t value) {
  const uint32_t* word = flag_word(peers, peers.rank, flag, threadIdx.x);
  Patience patience(peers.timeout_ns);
  uint32_t seen;
  do {
    patience.wait();
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  } while (static_cast<int32_t>(seen - value) < 0);
}

constexpr int kNormGroups = 2;

// A block per row, whose threads have chunks threadIdx.x, threadIdx.x + blockDim.x, ... of it.
template <typename T>
__global__ void __launch_bounds__(512) add_pair_norm_kernel(
    const __grid_constant__ PairNormArgs args) {
  __shared__ float shared[32];
  const int width = static_cast<int>(args.columns / Chunk<T>::kElements);
  const int64_t row = blockIdx.x * int64_t{width};
  uint4 data[kNormGroups];
  float squares = 0;
#pragma unroll
  for (int g = 0; g < kNormGroups; ++g) {
    const int chunk = g * blockDim.x + threadIdx.x;
    if (chunk >= width) continue;
    const int64_t place = row + chunk;
    Chunk<T> branch(static_cast<const uint4*>(args.own)[place]);
    branch += static_cast<const uint4*>(args.other)[place];
    Chunk<T> total(branch.rounded());
    total += static_cast<const uint4*>(args.residual)[place];
    data[g] = total.rounded();
    static_cast<uint4*>(args.total)[place] = data[g];
    squares = add_squares<T>(squares, data[g]);
  }
  const float inverse = block_inverse(squares, static_cast<int>(args.columns), args.eps, shared);
#pragma unroll
  for (int g = 0; g < kNormGroups; ++g) {
    const int chunk = g * blockDim.x + threadIdx.x;
    if (chunk >= width) continue;
    static_cast<uint4*>(args.out)[row + chunk] = scale_chunk<T>(
        data[g], static_cast<const uint4*>(args.norm)[chunk], inverse, args.one_plus);
  }
}

template <typename T>
const char* launch_pair_norm(const PairNormArgs& args, void* stream) {
  unsigned threads = 128;  // as many as of the Triton kernel, whose order of addition is this one's
  while (threads * kNormGroups < args.columns / Chunk<T>::kElements) threads *= 2;
  const LaunchGrid grid{static_cast<unsigned>(args.rows), threads, 0, stream};
  return launch_kernel<add_pair_norm_kernel<T>>(grid, args);
}

LaunchGrid thread_per_rank(const Peers& peers, void* stream) {
  return {1, static_cast<unsigned>(peers.ranks), 0, stream};
}

}  // namespace

const char* push_rows(const Peers& peers, int receiver, int64_t offset, const void* rows,
                      int64_t bytes, void* stream) {
  uint8_t* target = peers.inboxes[receiver] + peers.push_offset + kPushFlagBytes + offset;
  return describe(cudaMemcpyAsync(target, rows, bytes, cudaMemcpyDeviceToDevice,
                                  static_cast<cudaStream_t>(stream)));
}

const char* signal_peers(const Peers& peers, int flag, uint32_t value, void* stream) {
  return launch_kernel<signal_kernel>(thread_per_rank(peers, stream), peers, flag, value);
}

const char* await_peers(const Peers& peers, int flag, uint32_t value, void* stream) {
  return launch_kernel<await_kernel>(thread_per_rank(peers, stream), peers, flag, value);
}

const char* add_pair_norm(const PairNormArgs& args, SumType type, void* stream) {
  if (args.rows == 0) return nullptr;
  if (args.columns <= kSumNormColumns[0] || args.columns > kSumNormColumns[1]) {
    return "a norm of fewer or more columns than it is made for";
  }
  switch (type) {
    case SumType::kHalf:
      return launch_pair_norm<__half>(args, stream);
    case SumType::kBfloat16:
      return launch_pair_norm<__nv_bfloat16>(args, stream);
    case SumType::kFloat:
      break;
  }
  return "a norm of a wider type than it is made for";
}

}  // namespace vllm_cuda
