// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <atomic>
#include <cstdlib>
#include <new>

#include "stable.h"

namespace vllm_cpu {

namespace {

struct Buffer {
  float* data = nullptr;
  int64_t floats = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];

struct Queue {
  std::atomic<int64_t> next{0};
  int64_t n;
  RangeFn fn;
  void* context;
};

}  // namespace

void run_ranges(int64_t n, int64_t grain, RangeFn fn, void* context) {
  if (n <= grain || n <= 1) {
    if (n > 0) fn(0, n, context);
    return;
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, grain, fn, context));
}

void run_items(int64_t n, RangeFn fn, void* context) {
  const int64_t workers = n < num_threads() ? n : num_threads();
  if (workers <= 1) {
    for (int64_t i = 0; i < n; ++i) fn(i, i + 1, context);
    return;
  }
  Queue queue{{0}, n, fn, context};
  auto drain = [](int64_t, int64_t, void* p) {
    auto& q = *static_cast<Queue*>(p);
    for (int64_t i = q.next++; i < q.n; i = q.next++) q.fn(i, i + 1, q.context);
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, drain, &queue));
}

int num_threads() {
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

float* scratch(Scratch slot, int64_t floats) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
  if (buffer.floats < floats) {
    std::free(buffer.data);
    const int64_t bytes = (floats * 4 + 4095) / 4096 * 4096;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    buffer.floats = buffer.data ? bytes / 4 : 0;
    if (!buffer.data) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace vllm_cpu
