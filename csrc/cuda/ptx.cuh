// SPDX-License-Identifier: Apache-2.0
// The instructions that CUDA C++ has no plain spelling for and several kernels need (sm_90).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vllm_cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void wait_parity(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ inline float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Barriers that count arrivals and bytes of copies. Whoever has made some says so before others use
// them.
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
__device__ inline void barriers_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// An arrival, after which so many bytes come.
__device__ inline void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// A ring of stages, each with a barrier for "filled" and one for "free"; every thread keeps its
// own place in it.
struct Ring {
  uint64_t* words;
  int stages;
  int index = 0;
  uint32_t phase = 0;

  __device__ Ring(uint64_t* words_, int stages_) : words(words_), stages(stages_) {}
  __device__ uint64_t* full() { return words + index; }
  __device__ uint64_t* empty() { return words + stages + index; }
  __device__ void init(int consumers, int producers = 1) {
    for (int i = 0; i < stages; ++i) {
      init_barrier(words + i, producers);
      init_barrier(words + stages + i, consumers);
    }
    barriers_fence();
  }
  __device__ void wait_full() { wait_parity(full(), phase); }
  // The first round finds every stage free.
  __device__ void wait_empty() { wait_parity(empty(), phase ^ 1); }
  __device__ void expect(uint32_t bytes) { arrive_expecting(full(), bytes); }
  __device__ void release() { arrive(empty()); }
  __device__ void advance() {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
};

__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Asynchronous; `bytes` and both addresses are multiples of 16.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_predecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int THREADS>
__device__ inline void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }
template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float(float value) {
  return __float2half_rn(value);
}

// d [16, 8] += a [16, 16] @ b [16, 8] in fp32.
template <typename T>
__device__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1);
#define VLLM_MMA(T, NAME)                                                                          \
  template <>                                                                                      \
  __device__ inline void mma<T>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                uint32_t b0, uint32_t b1) {                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                          \
  }
VLLM_MMA(__nv_bfloat16, "bf16")
VLLM_MMA(__half, "f16")
#undef VLLM_MMA

// x * sigmoid(x) with the same approximations as the Triton kernel of `silu_and_mul`.
__device__ inline float silu(float x) {
  float power, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-x * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(1.0f + power));
  return x * quotient;
}

}  // namespace vllm_cuda
