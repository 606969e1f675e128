// SPDX-License-Identifier: Apache-2.0
// Shared memory of the gated delta rule's decode step: barriers, what an item's tokens are made of,
// and the states on their way.
#pragma once

#include <cstdint>

#include "gdn_decode.h"
#include "ptx.cuh"

namespace vllm_cuda::gdn_decode {

constexpr int kConsumers = 8, kPreparers = 4;  // warps
constexpr int kThreads = 32 * (kConsumers + kPreparers);
constexpr int kMaxStages = 8;
// Bytes of states on their way to each warp. More would not be faster, and all other loads would
// wait behind them: 64 KB for each multiprocessor take 1.1 us at an H200's memory speed.
constexpr int kAhead = 8192;
constexpr int kBuffers = 3;  // items in work
constexpr int kLag = 1;      // items between fetching the inputs of one and computing on them

struct alignas(16) Header {
  int index;  // the sequence's block, negative: nothing to do
  int seq, number;  // sequence, and which of its items
  int row;          // of the ring
  int first;        // slot of the first pending token
  int pending;      // tokens to replay
  int taken;        // accepted drafts, whose inputs are the newest
  bool commit;      // whether the first token writes the state
  bool more;        // whether the CTA has an item after this one

  // Which slot of its row has the token `i` after the first pending one; which of the ring's.
  __device__ int slot_of_row(const GdnDecodeArgs& args, int i) const {
    const int at = first + i;
    return at < args.slots ? at : at - args.slots;
  }
  __device__ int64_t slot(const GdnDecodeArgs& args, int i) const {
    return int64_t(row) * args.slots + slot_of_row(args, i);
  }
  // Whether the ring keeps token `t` of the step, and after how many since the first pending one.
  __device__ bool keeps(int t) const { return t > 0 || !commit; }
  __device__ int before(int t) const { return pending + t - commit; }
};

// What the tokens of one item (a sequence's key head and value heads of its group) are made of.
struct Buffer {
  float *keys, *errors, *q, *k, *v, *out, *decays;
  float2* gates;      // decay, beta: [token, head]
  uint2* inputs;      // of the convolution before the step's: [part, 3, lane], the newest last
  uint2* z;           // gates of the norm: [token, head, lane]
  uint4* gate_words;  // what decay and beta are made of, A_log, dt_bias, a, b: [token, head]
  Header* headers;    // each preparing warp's own; the first is the consumers', too

  __host__ __device__ static int bytes(const GdnDecodeArgs& args) {
    const int heads = args.heads, pending = args.most_pending, tokens = args.tokens;
    const int rows = pending * (1 + heads) + tokens * (2 + 2 * heads);
    return 4 * rows * kHeadDim + round_up(4 * pending * heads) + round_up(8 * tokens * heads) +
           8 * 32 * (3 * (2 + heads) + tokens * heads) + 16 * tokens * heads +
           sizeof(Header) * kPreparers;
  }
  __host__ __device__ static constexpr int round_up(int bytes) { return (bytes + 15) & ~15; }

  __device__ Buffer(char* base, const GdnDecodeArgs& args) {
    const int heads = args.heads, pending = args.most_pending, tokens = args.tokens;
    keys = reinterpret_cast<float*>(base);
    errors = keys + pending * kHeadDim;
    q = errors + pending * heads * kHeadDim;
    k = q + kHeadDim;
    v = k + kHeadDim;
    out = v + heads * kHeadDim;
    decays = q + tokens * vectors(heads);
    gates = reinterpret_cast<float2*>(decays + round_up(4 * pending * heads) / 4);
    inputs = reinterpret_cast<uint2*>(reinterpret_cast<char*>(gates) +
                                      round_up(8 * tokens * heads));
    z = inputs + 32 * 3 * (2 + heads);
    gate_words = reinterpret_cast<uint4*>(z + 32 * tokens * heads);
    headers = reinterpret_cast<Header*>(gate_words + tokens * heads);
  }
  // Floats of a token's q, k, v and output.
  __host__ __device__ static constexpr int vectors(int heads) { return (2 + 2 * heads) * kHeadDim; }

  // The same with what belongs to token `t` alone.
  __device__ Buffer of_token(int t, int heads) const {
    Buffer of = *this;
    of.q += t * vectors(heads);
    of.k += t * vectors(heads);
    of.v += t * vectors(heads);
    of.out += t * vectors(heads);
    of.gates += t * heads;
    of.z += t * 32 * heads;
    return of;
  }
};

struct Buffers {
  const GdnDecodeArgs& args;
  char* base;
  int bytes;  // of each
  __device__ Buffer operator[](int i) const {
    return Buffer(base + i * bytes, args);
  }
};

// A place in the buffers' cycle.
struct Place {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kBuffers) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Of every stage: its tile is here. Of every buffer: its header is, its ring's entries are. Of
// every buffer, or every token of the only one: its vectors are, the consumers are done with it.
struct Barriers {
  uint64_t *tiles, *known, *ring, *vectors, *done;
  static constexpr int kTokens = kBuffers > kMaxTokens ? kBuffers : kMaxTokens;
  static constexpr int count = kConsumers * kMaxStages + 2 * kBuffers + 2 * kTokens;
  static constexpr int bytes = 8 * count;

  __device__ explicit Barriers(char* base) {
    tiles = reinterpret_cast<uint64_t*>(base);
    known = tiles + kConsumers * kMaxStages;
    ring = known + kBuffers;
    vectors = ring + kBuffers;
    done = vectors + kTokens;
  }
  // By all threads of the CTA.
  __device__ void init() const {
    const int i = threadIdx.x;
    static_assert(count <= kThreads);
    if (i < count) {
      const int arrivals = tiles + i < ring      ? 1
                           : tiles + i < vectors ? 1 + 32  // the copies of all lanes
                           : tiles + i < done    ? kPreparers
                                                 : kConsumers;
      init_barrier(tiles + i, arrivals);
      barriers_fence();
    }
  }
};

// Barriers, a word for each warp, every consumer's stages, buffers.
struct Layout {
  int words, stages, buffers, buffer_bytes;
  __host__ __device__ Layout(const GdnDecodeArgs& args, int stage_bytes, int count)
      : words(Barriers::bytes),
        stages((words + kThreads / 8 + 127) & ~127),
        buffers(stages + count * kConsumers * stage_bytes),
        buffer_bytes(Buffer::bytes(args)) {}
  __host__ __device__ int bytes(int items) const {
    return buffers + (items < kBuffers ? items : kBuffers) * buffer_bytes;
  }
};

// Asynchronous; `bytes` and both addresses are multiples of 16. States that are about to be written
// stay in L2 until then, which a hint to drop them first would hinder.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Asynchronous; a thread's own, in groups of those since the last `end_group`.
template <int BYTES>
__device__ inline void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(BYTES)
               : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Once this thread's copies so far are complete.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// Four bf16 of 8 bytes.
__device__ inline float4 widen(uint2 words) {
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                     __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}
__device__ inline uint2 narrow(float4 x) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(x.z, x.w);
  uint2 words;
  words.x = *reinterpret_cast<const uint32_t*>(&low);
  words.y = *reinterpret_cast<const uint32_t*>(&high);
  return words;
}
// Indexed by constants alone: it lies in registers.
struct Four {
  float at[4];
  __device__ Four(float4 x) : at{x.x, x.y, x.z, x.w} {}
  __device__ float4 vector() const { return make_float4(at[0], at[1], at[2], at[3]); }
};

__device__ inline float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Without the branch of a division, for which its neighbours would wait. The reciprocal has a
// division's bits below 2^126 and is as good as zero there.
__device__ inline float sigmoid(float x) {
  constexpr float most = 0x1p126f;
  float below = 1.0f + __expf(-x), result;
  if (below > most) below = most;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(below));
  return __fmaf_rn(result, __fmaf_rn(-below, result, 1.0f), result);
}

}  // namespace vllm_cuda::gdn_decode
