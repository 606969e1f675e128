// SPDX-License-Identifier: Apache-2.0
// The preparing warps of the decode step: what comes before the recurrence (convolution, l2 norms,
// gates, the ring's entries) and after it (the gated norm), one item ahead of the states.
#pragma once

#include "gdn_decode_memory.cuh"

namespace vllm_cuda::gdn_decode {

// A sequence's key head and its group of value heads, and how many of them the CTA has left. They
// follow each other sequence by sequence, so that a CTA's differ in what is pending.
struct Item {
  int seq, key_head, left;

  // All items in `parts` that differ by one at most.
  __device__ Item(const GdnDecodeArgs& args, int part, int parts) {
    const int items = args.n * args.k_heads, size = items / parts, larger = items % parts;
    const int first = part * size + min(part, larger);
    seq = first % args.n;
    key_head = first / args.n;
    left = size + (part < larger);
  }
  __device__ void advance(int n) {
    --left;
    if (++seq == n) {
      seq = 0;
      ++key_head;
    }
  }
};

struct Preparer {
  const GdnDecodeArgs& args;
  const Barriers& barriers;
  int warp, lane;
  float4 weight;  // of the norm, this lane's

  __device__ Preparer(const GdnDecodeArgs& args_, const Barriers& barriers_)
      : args(args_), barriers(barriers_), warp(threadIdx.x / 32 - kConsumers),
        lane(threadIdx.x % 32), weight{} {
    if (args.gate == nullptr) return;
    weight = args.norm_weight_is_float ? static_cast<const float4*>(args.norm_weight)[lane]
                                       : widen(static_cast<const uint2*>(args.norm_weight)[lane]);
  }

  __device__ int channels() const { return (2 + args.group) * args.k_heads * kHeadDim; }

  // First channel of part 0 (q), 1 (k), 2, ... (the group's v).
  __device__ int channel(int part, int key_head) const {
    const int head = part == 0   ? key_head
                     : part == 1 ? args.k_heads + key_head
                                 : 2 * args.k_heads + key_head * args.group + part - 2;
    return head * kHeadDim + 4 * lane;
  }

  // The ring's pending entries, and the header, for the consumers.
  __device__ void announce(int key_head, const Header& header, int64_t slots, const Buffer& to,
                           uint64_t* barrier) const {
    const int heads = args.k_heads * args.group, all = args.group * kHeadDim;
    if (lane < header.pending) {
      const float* keys = args.keys + ((slots + lane) * args.k_heads + key_head) * kHeadDim;
      bulk_copy(to.keys + lane * kHeadDim, keys, 4 * kHeadDim, barrier);
      const float* errors = args.errors + (slots + lane) * heads * kHeadDim + key_head * all;
      bulk_copy(to.errors + lane * all, errors, 4 * all, barrier);
    }
    const float* decays = args.decays + slots * heads + key_head * args.group;
    for (int i = lane; i < header.pending * args.group; i += 32) {
      to.decays[i] = decays[i / args.group * heads + i % args.group];
    }
    if (lane == 0) *to.header = header;
    __syncwarp();
    if (lane == 0) arrive_expecting(barrier, header.pending * 4 * (kHeadDim + all));
  }

  // What a channel's convolution needs but for the new input, and what a head's gates need.
  struct Fetched {
    uint2 rows[3];  // oldest first
    uint4 taps[2];
    uint2 bias;
  };
  __device__ Fetched fetch(int index, int c) const {
    Fetched fetched{};
    const auto* state = conv_rows(index, c);
    const auto* weights = static_cast<const uint2*>(args.conv_weight) + c;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      fetched.rows[i] = *reinterpret_cast<const uint2*>(state + i * channels());
    }
    fetched.taps[0] = *reinterpret_cast<const uint4*>(weights);
    fetched.taps[1] = *reinterpret_cast<const uint4*>(weights + 2);
    if (args.conv_bias != nullptr) fetched.bias = static_cast<const uint2*>(args.conv_bias)[c / 4];
    return fetched;
  }
  __device__ __nv_bfloat16* conv_rows(int index, int c) const {
    return static_cast<__nv_bfloat16*>(args.conv_state) + index * args.conv_stride + c;
  }
  __device__ uint2 input(int seq, int c) const {
    const auto* qkv = static_cast<const __nv_bfloat16*>(args.qkv) + seq * args.qkv_stride + c;
    return *reinterpret_cast<const uint2*>(qkv);
  }

  __device__ void convolve(int part, int c, const Fetched& fetched, uint2 x, int key_head,
                           const Header& header, const Buffer& to) const {
    const Four taps[4] = {widen(make_uint2(fetched.taps[0].x, fetched.taps[0].y)),
                          widen(make_uint2(fetched.taps[0].z, fetched.taps[0].w)),
                          widen(make_uint2(fetched.taps[1].x, fetched.taps[1].y)),
                          widen(make_uint2(fetched.taps[1].z, fetched.taps[1].w))};
    const Four inputs[4] = {widen(fetched.rows[0]), widen(fetched.rows[1]), widen(fetched.rows[2]),
                            widen(x)};
    Four y = widen(fetched.bias);
    float squares = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[e] += inputs[i].at[e] * taps[e].at[i];
      y.at[e] = round_bf16(y.at[e] * sigmoid(y.at[e]));
      squares += y.at[e] * y.at[e];
    }
    if (part < 2) {
      const float norm = rsqrtf(warp_sum(squares) + 1e-6f) * (part == 0 ? args.scale : 1.0f);
#pragma unroll
      for (int e = 0; e < 4; ++e) y.at[e] *= norm;
    }
    const float4 result = y.vector();
    *reinterpret_cast<float4*>(to.q + part * kHeadDim + 4 * lane) = result;
    if (part == 1 && !header.commit) {
      float* key = args.keys + (int64_t(header.slot) * args.k_heads + key_head) * kHeadDim;
      *reinterpret_cast<float4*>(key + 4 * lane) = result;
    }
    auto* state = conv_rows(header.index, c);
    const uint2 shifted[3] = {fetched.rows[1], fetched.rows[2], x};
#pragma unroll
    for (int i = 0; i < 3; ++i) *reinterpret_cast<uint2*>(state + i * channels()) = shifted[i];
  }

  // Of value head `head`, the group's `lane`.
  __device__ void gates(int head, float A_log, float x, float b, const Header& header,
                        const Buffer& to) const {
    // log(1 + exp(x)), accurate where it is tiny: slow decays live there.
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    const float decay = expf(-expf(A_log) * softplus);
    to.gates[lane] = make_float2(decay, sigmoid(b));
    if (!header.commit) {
      args.decays[int64_t(header.slot) * args.k_heads * args.group + head] = decay;
    }
  }

  __device__ static void wait_once(bool& waited) {
    if (!waited) wait_for_predecessors();
    waited = true;
  }

  // q, k, v and gates. What no kernel ahead writes is fetched before they are complete.
  __device__ void make_vectors(const Item& item, const Header& header, const Buffer& to,
                               bool& waited) const {
    const int seq = item.seq, head = item.key_head * args.group + lane;
    const bool gating = warp == kPreparers - 1 && lane < args.group;
    float A_log = 0, dt_bias = 0;
    if (gating) A_log = args.A_log[head], dt_bias = args.dt_bias[head];
    int part = warp, c = channel(part, item.key_head);
    Fetched fetched{};
    if (part < 2 + args.group) fetched = fetch(header.index, c);
    wait_once(waited);
    __nv_bfloat16 a{}, b{};
    if (gating) {
      a = static_cast<const __nv_bfloat16*>(args.a)[seq * args.a_stride + head];
      b = static_cast<const __nv_bfloat16*>(args.b)[seq * args.b_stride + head];
    }
    while (part < 2 + args.group) {
      convolve(part, c, fetched, input(seq, c), item.key_head, header, to);
      part += kPreparers;
      c = channel(part, item.key_head);
      if (part < 2 + args.group) fetched = fetch(header.index, c);
    }
    if (gating) gates(head, A_log, to_float(a) + dt_bias, to_float(b), header, to);
  }

  // Fills `to`, for the consumers.
  __device__ void prepare(const Item& item, const Buffer& to, int buffer, bool& waited) const {
    const int seq = item.seq, key_head = item.key_head;
    Header header{args.indices[seq], 0, 1, 0};
    int4 step = make_int4(0, 0, 1, 0);
    if (args.steps != nullptr) step = reinterpret_cast<const int4*>(args.steps)[seq];
    int64_t slots = 0;
    if (args.steps != nullptr && header.index >= 0) {
      slots = int64_t(step.x) * args.slots;
      header.pending = step.y;
      header.commit = step.z;
      header.slot = static_cast<int>(slots) + step.y;
    }
    if (warp == 0) announce(key_head, header, slots, to, barriers.ring + buffer);
    if (header.index >= 0) {
      make_vectors(item, header, to, waited);
    } else {
      wait_once(waited);
    }
    __syncwarp();
    if (lane == 0) arrive(barriers.vectors + buffer);
  }

  // The gated norm of this warp's head, once the recurrence is `done`.
  __device__ void finish(const Item& item, const Buffer& from, uint64_t* done,
                         uint32_t phase) const {
    const int seq = item.seq, head = item.key_head * args.group + warp;
    const bool mine = warp < args.group && args.indices[seq] >= 0;
    uint2 gate = make_uint2(0, 0);
    if (mine && args.gate != nullptr) {
      const auto* z = static_cast<const __nv_bfloat16*>(args.gate) + seq * args.gate_stride;
      gate = *reinterpret_cast<const uint2*>(z + head * kHeadDim + 4 * lane);
    }
    wait_parity(done, phase);
    if (!mine) return;
    float4 o = *reinterpret_cast<const float4*>(from.out + warp * kHeadDim + 4 * lane);
    if (args.gate != nullptr) {
      const float squares = warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
      const float norm = rsqrtf(squares / kHeadDim + args.eps);
      const float4 z = widen(gate);
      o = make_float4(gated(o.x, norm, weight.x, z.x), gated(o.y, norm, weight.y, z.y),
                      gated(o.z, norm, weight.z, z.z), gated(o.w, norm, weight.w, z.w));
    }
    auto* out = static_cast<__nv_bfloat16*>(args.out) + seq * args.out_stride + head * kHeadDim;
    *reinterpret_cast<uint2*>(out + 4 * lane) = narrow(o);
  }

  __device__ float gated(float o, float norm, float weight, float z) const {
    float normed = round_bf16(o * norm) * weight;
    if (!args.norm_weight_is_float) normed = round_bf16(normed);
    return normed * z * sigmoid(z);
  }
};

// Items are prepared while the consumers work on those before them.
__device__ inline void run_preparers(const Preparer& self, Item item, char* buffers,
                                     int buffer_bytes) {
  const GdnDecodeArgs& args = self.args;
  const auto buffer = [&](int i) {
    return Buffer(buffers + i * buffer_bytes, args.group, args.slots);
  };
  bool waited = false;
  Item ahead = item;
  int next = 0;
  const auto prepare = [&] {
    if (ahead.left == 0) return;
    self.prepare(ahead, buffer(next), next, waited);
    ahead.advance(args.n);
    next = next + 1 == kBuffers ? 0 : next + 1;
  };
  for (int i = 0; i < kBuffers - 1; ++i) prepare();
  for (Place place; item.left > 0; item.advance(args.n), place.advance()) {
    // Into the buffer of the item before this one, which is finished.
    prepare();
    self.finish(item, buffer(place.index), self.barriers.done + place.index, place.phase);
  }
}

}  // namespace vllm_cuda::gdn_decode
