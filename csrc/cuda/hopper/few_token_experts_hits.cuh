// SPDX-License-Identifier: Apache-2.0
// Which experts a few tokens hit, and which tokens hit them.
#pragma once

#include <cstdint>

#include "few_token_experts.h"

namespace vllm_cuda::few_token_experts {

// In shared memory. The experts are in the order of their first pairs of token and slot.
struct Hits {
  struct Hit {
    int expert, first;  // pair
  };
  int count;
  Hit hit[kMostPairs];
  int next[kMostPairs];    // of a pair: the next with the same expert, or -1
  int tokens[kMostPairs];  // of pairs
  alignas(16) int experts[kMostPairs];  // of pairs; -1: not there
  uint32_t firsts[kMostPairs / 32];     // a bit for each pair: the first with its expert

  // The expert of the thread's pair, once it has been chosen.
  __device__ static int fetch(const FewTokenExpertsArgs& args) {
    const int own = threadIdx.x, token = own / args.slots;
    if (own >= args.tokens * args.slots) return -1;
    return __ldcg(args.experts + token * args.experts_stride + own - token * args.slots);
  }

  // All threads of a CTA do, at least one for each pair.
  __device__ void find(const FewTokenExpertsArgs& args, int expert) {
    const int own = threadIdx.x, word = own / 32, pairs = args.tokens * args.slots;
    const bool looks = own < kMostPairs;
    if (expert < 0 || expert >= args.num_experts) expert = -1;
    if (looks) experts[own] = expert;
    __syncthreads();
    bool first = expert >= 0;
    if (looks) {
      int later = kMostPairs;
#pragma unroll 1
      for (int start = 0; start < pairs; start += 4) {
        const int4 four = *reinterpret_cast<const int4*>(experts + start);
        const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          const int other = start + i;
          if (others[i] != expert) continue;
          if (other < own) first = false;
          if (other > own) later = min(later, other);
        }
      }
      next[own] = later < kMostPairs ? later : -1;
      tokens[own] = own / args.slots;
      const uint32_t all = __ballot_sync(~0u, first);
      if (own % 32 == 0) firsts[word] = all;
    }
    __syncthreads();
    if (looks) {
      int at = __popc(firsts[word] & ((1u << own % 32) - 1)), total = 0;
#pragma unroll
      for (int i = 0; i < kMostPairs / 32; ++i) {
        const int here = __popc(firsts[i]);
        if (i < word) at += here;
        total += here;
      }
      if (first) hit[at] = {expert, own};
      if (own == 0) count = total;
    }
    __syncthreads();
  }
  // f(pair) for the pairs of a hit.
  template <typename F>
  __device__ void for_pairs(int index, F f) const {
    for (int pair = hit[index].first; pair >= 0; pair = next[pair]) f(pair);
  }
};

}  // namespace vllm_cuda::few_token_experts
