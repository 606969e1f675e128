// SPDX-License-Identifier: Apache-2.0
// Joins the two shares of a tile of rows, which the two CTAs of a cluster have, once.
//
// The warpgroups of scores tell each other the peak and the sum of each row. Those of values then
// send each other the sums of one of a thread's two rows, and make means of the other's. What is
// sent lands where the query was: who tells of its rows has multiplied it.
#pragma once

#include "cluster.cuh"
#include "latent_attention_memory.cuh"

namespace vllm_cuda::latent_attention {

template <int ROWS>
struct Pair {
  using Mem = Memory<ROWS>;
  static constexpr int kSenders = 4 * ROWS;      // threads that have rows
  static constexpr int kFours = kLatentDims / 32;  // of a thread's row
  static_assert(16 * kFours * kSenders <= kChunks * Mem::kQueryChunk);

  char* shared;
  Ring told, sent;  // one stage, filled once

  __device__ explicit Pair(char* shared_)
      : shared(shared_), told(reinterpret_cast<uint64_t*>(shared + Mem::kPairBarriers), 1),
        sent(told.words + 2, 1) {}

  // By one thread, before the CTAs meet.
  __device__ void init() {
    told.init(1);
    sent.init(1);
    told.expect(8 * ROWS);
    sent.expect(16 * kFours * kSenders);
  }

  __device__ float2* peak_and_sum(int share, int row) const {
    return reinterpret_cast<float2*>(shared + Mem::kTold) + share * ROWS + row;
  }

  // After the CTAs have met.
  __device__ void tell(int share, int row, float peak, float sum) {
    float2* place = peak_and_sum(share, row);
    *place = make_float2(peak, sum);
    const int other = 1 - share;
    store_two(address_in(other, place), peak, sum, barrier_in(other, told));
  }

  // What the sums of either share are to be multiplied by to add up to the mean.
  __device__ float2 factors(int row) const {
    const float2 first = *peak_and_sum(0, row), second = *peak_and_sum(1, row);
    // Of the first share every row sees a key.
    const float peak = fmaxf(first.x, second.x);
    const float by_first = exp2f(first.x - peak), by_second = exp2f(second.x - peak);
    const float factor = 1.0f / fmaf(second.y, by_second, first.y * by_first);
    return make_float2(by_first * factor, by_second * factor);
  }

  __device__ void wait_told() { wait_for_stored(told.full(), 0); }
  __device__ void wait_sent() { wait_for_stored(sent.full(), 0); }

  // The i-th four of the row that the thread of this number has in the other CTA.
  __device__ float4* received(int half, int i) const {
    return reinterpret_cast<float4*>(shared + Mem::kQuery) + i * kSenders + half * 2 * ROWS +
           threadIdx.x % kWarpgroup;
  }
  __device__ void send(int other, int half, int i, float4 four) {
    store_four(address_in(other, received(half, i)), four, barrier_in(other, sent));
  }

 private:
  __device__ static uint32_t barrier_in(int cta, Ring& ring) {
    return address_in(cta, ring.full());
  }
};

}  // namespace vllm_cuda::latent_attention
