// SPDX-License-Identifier: Apache-2.0
// One decode step of Kimi delta attention: convolution, gates, replay of the journal's pending
// tokens and the new token, in one pass over the states at memory speed.
//
// A CTA has one head of one sequence. All of its state and of its journal is fetched at once, while
// the warps make q, k, v and the decays. Three CTAs share a multiprocessor, so that memory is never
// idle: some wait for it while another computes.
#pragma once

#include "kda_decode_inputs.cuh"
#include "kda_decode_tile.cuh"
#include "tma.cuh"

namespace vllm_cuda::kda_decode {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
static_assert(kThreads == kHeadDim);
constexpr int kTogether = 3;                          // CTAs of a multiprocessor
constexpr int kPasses = kHeadDim / (kWarps * kRows);  // tiles of each warp
constexpr int kFetching = 3;  // the warp that fetches the state; the others convolve q, k and v

// A pending token.
struct Entry {
  float key[kHeadDim], decays[kHeadDim], errors[kHeadDim];
};

// The new one.
struct Vectors {
  float q[kHeadDim], k[kHeadDim], v[kHeadDim], decays[kHeadDim];
};

template <typename State>
struct Shared {
  union {
    State state[kPasses][kWarps][kRows * kHeadDim];
    Vectors vectors;  // once the tiles of the first pass are in registers
  };
  uint64_t landed[kPasses];  // barriers of a pass's tiles
  float beta;
  alignas(16) Entry entries[];
};

template <typename State>
__device__ State* state_of(const KdaDecodeArgs& args, const Item& item) {
  return static_cast<State*>(args.state) + item.index * args.state_stride +
         item.head * kHeadDim * kHeadDim;
}

// Starts fetching a state. By one thread.
template <typename State>
__device__ void fetch_state(const KdaDecodeArgs& args, const Item& item, Shared<State>& shared) {
  constexpr uint32_t bytes = sizeof(shared.state[0]);
  for (uint64_t& barrier : shared.landed) init_barrier(&barrier, 1);
  barriers_fence();
  shared_fence();
  const State* state = state_of<State>(args, item);
  for (int pass = 0; pass < kPasses; ++pass) {
    arrive_expecting(shared.landed + pass, bytes);
    bulk_copy(shared.state[pass], state + pass * (bytes / sizeof(State)), bytes,
              shared.landed + pass);
  }
}

__device__ inline void copy_word(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Starts fetching what is pending.
__device__ inline void fetch_entries(const KdaDecodeArgs& args, const Item& item, Entry* entries) {
  const int warp = threadIdx.x / 32, column = 4 * (threadIdx.x % 32);
  for (int i = warp; i < item.pending; i += kWarps) {
    const int64_t from = item.kept(args, i) + column;
    copy_word(entries[i].key + column, args.keys + from);
    copy_word(entries[i].decays + column, args.decays + from);
    copy_word(entries[i].errors + column, args.errors + from);
  }
}
__device__ inline void await_entries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The new token, on a tile whose first row is `row`.
template <typename State>
__device__ void take_token(const KdaDecodeArgs& args, const Item& item, Tile<State>& tile,
                           const Vectors& with, float beta, int row) {
  float k[C], q[C], decays[C];
  tile.load_columns(decays, with.decays);
  tile.load_columns(k, with.k);
  tile.load_columns(q, with.q);
  float product = 0;
#pragma unroll
  for (int c = 0; c < C; ++c) product = __fmaf_rn(k[c], q[c], product);
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) product += __shfl_xor_sync(~0u, product, mask);
  tile.scale(decays);
  const float sum = tile.multiply(k, q);
  const int own = row + R * tile.half + tile.member % R;
  // Right in the lanes that have the products with k, and then in the others.
  float error = __fmul_rn(beta, __fsub_rn(with.v[own], sum));
  error = __shfl_sync(~0u, error, tile.member % R, 16);
  if (tile.member >= R) {
    auto* out = static_cast<__nv_bfloat16*>(args.out) + item.seq * args.out_stride;
    out[item.head * kHeadDim + own] = __float2bfloat16_rn(__fmaf_rn(product, error, sum));
  }
  if (item.commit) {
    float d[R];
#pragma unroll
    for (int r = 0; r < R; ++r) d[r] = __shfl_sync(~0u, error, r, 16);
    tile.add(d, k);
    tile.store(state_of<State>(args, item) + row * kHeadDim);
  } else if (tile.member < R) {
    args.errors[item.kept(args, item.pending) + own] = error;
  }
}

template <typename State>
__global__ void __launch_bounds__(kThreads, kTogether)
    kda_decode_kernel(const __grid_constant__ KdaDecodeArgs args) {
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<Shared<State>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = threadIdx.x;
  const Item item(args);
  launch_dependents();
  if (item.index < 0) {
    wait_for_predecessors();  // a kernel's end means the end of all before it
    return;
  }
  Convolution convolution(args, item, warp);
  if (warp != kFetching) {
    convolution.load_past();
  } else if (lane == 0) {
    fetch_state(args, item, shared);
  }
  fetch_entries(args, item, shared.entries);
  const float dt_bias = __ldg(args.dt_bias + item.head * kHeadDim + channel);
  const float A_log = __ldg(args.A_log + item.head);
  wait_for_predecessors();
  const auto* a = static_cast<const __nv_bfloat16*>(args.a) + item.seq * args.a_stride;
  const auto* b = static_cast<const __nv_bfloat16*>(args.b) + item.seq * args.b_stride;
  const __nv_bfloat16 own_a = a[item.head * kHeadDim + channel];
  float4 made{};
  if (warp != kFetching) {
    convolution.load_new();
    made = convolution.result();
    convolution.advance();
  } else if (lane == 0) {
    shared.beta = sigmoid(to_float(b[item.head]));
  }
  const float decay = decay_of(to_float(own_a), dt_bias, A_log);
  if (!item.commit) {
    const int64_t kept = item.kept(args, item.pending);
    args.decays[kept + channel] = decay;
    if (warp == 1) reinterpret_cast<float4*>(args.keys + kept)[lane] = made;
  }
  await_entries();
  __syncthreads();  // entries and barriers are there
  Tile<State> tile;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = (pass * kWarps + warp) * kRows;
    wait_parity(shared.landed + pass, 0);
    tile.load(shared.state[pass][warp]);
    if (pass == 0) {
      __syncthreads();
      if (warp != kFetching) reinterpret_cast<float4*>(&shared.vectors)[channel] = made;
      shared.vectors.decays[channel] = decay;
    }
#pragma unroll 2
    for (int i = 0; i < item.pending; ++i) {
      const Entry& entry = shared.entries[i];
      tile.replay(entry.key, entry.decays, entry.errors + row);
    }
    if (pass == 0) __syncthreads();
    take_token(args, item, tile, shared.vectors, shared.beta, row);
  }
}

}  // namespace vllm_cuda::kda_decode
