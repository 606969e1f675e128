// SPDX-License-Identifier: Apache-2.0
// Copies whose addresses and swizzle the hardware makes, and what goes with them (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx.cuh"

namespace vllm_cuda {

// A box of the mapped tensor into the CTA's shared memory, counted in bytes by `barrier`.
__device__ inline void load_tile(void* to, const CUtensorMap* map, int x, int y, int z,
                                 uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void load_tile(void* to, const CUtensorMap* map, int x, int y, int z, int w,
                                 uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}

// Squares of 8 rows of 128 bytes from a block of a cache: groups of rows, chunks of columns, rows.
__device__ inline void load_squares(void* to, const CUtensorMap* map, int chunk, int group,
                                    int block, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(chunk), "r"(group), "r"(block), "r"(shared_address(barrier))
      : "memory");
}

// Dense; `bytes` and both addresses are multiples of 16.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// As above, out of shared memory: part of the thread's group of stores.
__device__ inline void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// What plain instructions wrote to shared memory is visible to products and copies of tiles.
__device__ inline void shared_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8 x 8 tiles of 16-bit elements, transposed; lanes 8 i to 8 i + 7 name the rows of tile i.
__device__ inline void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Two or four 8 x 8 tiles of 16-bit elements; lanes 8 i to 8 i + 7 name the rows of tile i.
__device__ inline void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void store_matrices(void* row, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b)
               : "memory");
}

}  // namespace vllm_cuda
