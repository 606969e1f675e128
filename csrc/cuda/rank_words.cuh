// SPDX-License-Identifier: Apache-2.0
// How 16 bytes of a message reach another GPU: in words of 8 bytes, of which 4 are the number of
// the sum they are for. A word is stored and loaded whole, so who reads the number has the data:
// nothing waits for a fence or for a flag that follows the data.
//
// Sums are numbered from one to the next, on the device, so that a graph's replays count on. Slots
// take turns. A rank that is in sum s has results of sum s - 1, which every rank is in or past, so
// all have left sum s - 2 and its slot is free: nothing waits at the end of a sum either.
#pragma once

#include "peers.h"

namespace vllm_cuda {

// The numbers have 32 bits and come again. So that no word waits that long, slots are cleaned now
// and then; 0 is the number of a clean word.
constexpr uint32_t kCleanEvery = 1u << 20;
constexpr uint32_t kPollsPerLook = 1024;

__device__ inline uint32_t next_count(uint32_t count) {
  return count == 0xffffffffu ? 2u : count + 1;  // slots go on taking turns
}

// The part of `receiver`'s inbox that `sender` writes in the sum `count`.
__device__ inline uint8_t* inbox_part(const Peers& peers, int receiver, int sender,
                                      uint32_t count) {
  const int64_t bytes = 2 * peers.capacity;
  return peers.inboxes[receiver] + ((count % 2) * peers.ranks + sender) * bytes;
}

// `low` and `high`: where the two halves of the words lie.
__device__ inline void send_words(uint8_t* low, uint8_t* high, const uint4& data, uint32_t count) {
  const uint64_t number = static_cast<uint64_t>(count) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(low), "l"(number | data.x),
               "l"(number | data.y)
               : "memory");
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(high), "l"(number | data.z),
               "l"(number | data.w)
               : "memory");
}

__device__ inline bool take_half(const uint8_t* words, uint32_t count, uint32_t& first,
                                 uint32_t& second) {
  uint64_t a, b;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(words)
               : "memory");
  first = static_cast<uint32_t>(a);
  second = static_cast<uint32_t>(b);
  return static_cast<uint32_t>(a >> 32) == count && static_cast<uint32_t>(b >> 32) == count;
}

__device__ inline bool take_words(const uint8_t* low, const uint8_t* high, uint32_t count,
                                  uint4& data) {
  const bool first = take_half(low, count, data.x, data.y);
  return take_half(high, count, data.z, data.w) && first;
}

// Ends the program, and with it every later call of the device, after `timeout_ns` of waiting.
struct Patience {
  uint64_t timeout_ns, began = 0;
  uint32_t polls = 0;

  __device__ explicit Patience(uint64_t timeout_ns_) : timeout_ns(timeout_ns_) {}
  __device__ void wait() {
    if (++polls % kPollsPerLook != 0) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (began == 0) began = now;
    if (now - began > timeout_ns) __trap();
  }
};

// Before anything is sent in the sum `count`, so that nobody writes to the next slot yet.
__device__ inline void clean_next_slot(const Peers& peers, uint32_t count) {
  const int64_t chunks = 2 * peers.capacity * peers.ranks / 16;
  uint4* slot = reinterpret_cast<uint4*>(inbox_part(peers, peers.rank, 0, count + 1));
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < chunks; i += gridDim.x * blockDim.x) {
    slot[i] = make_uint4(0, 0, 0, 0);
  }
  __threadfence_system();
  __syncthreads();
}

}  // namespace vllm_cuda
