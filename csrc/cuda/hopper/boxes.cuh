// SPDX-License-Identifier: Apache-2.0
// Boxes of matrices that copies bring to one CTA or to several, and back (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx.cuh"

namespace vllm_cuda {

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// All threads of the cluster meet.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// At the same barrier of CTA `rank`.
__device__ inline void arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Columns x on and rows y on of the mapped matrix, counted in bytes by `barrier`.
__device__ inline void load_box(void* to, const CUtensorMap* map, int x, int y,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// Into the same place of several CTAs (bits of ranks), each of which counts at its own barrier.
__device__ inline void load_box_to(void* to, const CUtensorMap* map, int x, int y,
                                   uint64_t* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   map),
               "r"(x), "r"(y), "r"(shared_address(from))
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last PENDING of this thread's groups of stores have read shared memory.
template <int PENDING = 0>
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// This thread's stores have been written.
__device__ inline void wait_for_written_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace vllm_cuda
