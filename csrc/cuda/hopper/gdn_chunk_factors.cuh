// SPDX-License-Identifier: Apache-2.0
// The factors of one chunk of 64 tokens, of a key head and up to two of its value heads.
//
// `A = tril(k k^T exp(Gi - Gj) diag(beta), -1)`, `T = diag(beta) (I + A)^-1`, `P = tril(q k^T
// exp(Gi - Gj))` and four rows per token. Matrices are 4 x 4 tiles of 16 x 16. Warp w computes row
// w of k k^T and row 3 - w of q k^T: together five tiles at and below the diagonal, whatever w.
// The products serve both value heads; the norms of k and q are on the products' diagonals.
#pragma once

#include "hopper/gdn_chunk_inverse.cuh"
#include "hopper/gdn_chunk_products.cuh"

namespace vllm_cuda {

namespace chunk_factors {

template <int HEADS>
__global__ void __launch_bounds__(THREADS, 5) kernel(const ChunkFactorsArgs args) {
  __shared__ Shared<HEADS> s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Work work = find_work<HEADS>(args);
  // One warp per value head.
  const RawGates raw(args, work, work.head + min(warp, HEADS - 1), warp < HEADS ? work.length : 0);
  load_rows(s.in.k, args.k, args.k_stride, work);
  load_rows(s.in.q, args.q, args.q_stride, work);
  if (warp < HEADS) gates(args, raw, work.length, warp, s);
  wait_for_copies();
  __syncthreads();

  Products p;
  multiply_by(warp, args, work, p, s);
  __syncthreads();
  write_rows(args, work, s);
  normalise(s, warp, p);
#pragma unroll 1
  for (int head = 0; head < HEADS; ++head) apply_decay(args, work, warp, p, head, s);
  __syncwarp();

  float x[16];
  const int h = min(lane / 16, HEADS - 1);
  char* diagonal = s.res.diagonal[h][warp];
  substitute(diagonal, h, x);
  __syncwarp();
  store_split_row(diagonal, x);
  __syncthreads();
  store_scaled_column(s.res.out[h][lower_index(warp, warp)], x, s.beta[h] + 16 * warp);
  // The columns' lengths differ: a warp that has a long one of one head has a short one of the
  // other.
#pragma unroll 1
  for (int head = 0; head < HEADS; ++head) {
    join(s.res, s.beta[head], head, head == 0 ? warp : 3 - warp);
  }
  __syncthreads();
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    write_stripe(s.res.out[head], warp, matrix_of(args.T, work, head));
  }
}

}  // namespace chunk_factors

}  // namespace vllm_cuda
