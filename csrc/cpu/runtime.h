// SPDX-License-Identifier: Apache-2.0
// Threads and scratch memory for the kernels.
//
// Work is spread over torch's own intra-op pool, so torch.set_num_threads is honoured and no
// second OpenMP runtime appears. Kernels never let a result depend on which thread or how many
// threads ran an item.
#pragma once

#include <cstdint>

namespace vllm_cpu {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

// Runs fn over [0, n) in contiguous ranges of at least `grain` items.
void run_ranges(int64_t n, int64_t grain, RangeFn fn, void* context);

// Runs fn once per item; threads take the next item from a shared counter, which balances items
// of unequal cost.
void run_items(int64_t n, RangeFn fn, void* context);

int num_threads();

// Uninitialised, 64-byte aligned memory of the calling thread, valid until its next call with
// the same slot on the same thread.
enum class Scratch : int { kKernel, kPlan, kPartials, kCount };
float* scratch(Scratch slot, int64_t floats);

template <typename F>
inline void parallel_ranges(int64_t n, int64_t grain, const F& f) {
  run_ranges(
      n, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const F*>(context))(begin, end);
      },
      const_cast<F*>(&f));
}

template <typename F>
inline void parallel_items(int64_t n, const F& f) {
  run_items(
      n,
      [](int64_t begin, int64_t, void* context) { (*static_cast<const F*>(context))(begin); },
      const_cast<F*>(&f));
}

}  // namespace vllm_cpu
