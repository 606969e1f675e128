// SPDX-License-Identifier: Apache-2.0
// What the CTAs of a cluster do together, beside copies: barriers, stores to each other (sm_90).
#pragma once

#include <cstdint>

#include "hopper/boxes.cuh"
#include "ptx.cuh"

namespace vllm_cuda {

// Threads that have exited are not waited for. What a thread did before it arrived is visible to
// those that have waited.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A place of CTA `rank`'s shared memory: the one that `own` is in this CTA's.
__device__ inline uint32_t address_in(int rank, const void* own) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

// Both addresses are of one CTA, whose barrier counts the bytes.
__device__ inline void store_two(uint32_t to, float first, float second, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(first), "f"(second), "r"(barrier)
      : "memory");
}

__device__ inline void store_four(uint32_t to, float4 four, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(barrier)
      : "memory");
}

// Waits for what other CTAs stored.
__device__ inline void wait_for_stored(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace vllm_cuda
