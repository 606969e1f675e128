// SPDX-License-Identifier: Apache-2.0
// What a preparing warp of the decode step does for an item: before the recurrence the convolution,
// l2 norms, gates and the ring's entries, after it the gated norm.
#pragma once

#include "gdn_decode_items.cuh"

namespace vllm_cuda::gdn_decode {

// A convolution's weights for four channels.
struct Taps {
  uint4 words[2];
  uint2 bias;
};

struct Preparer {
  static constexpr int PARTS = (2 + kMaxGroup + kPreparers - 1) / kPreparers;  // of a warp
  const GdnDecodeArgs& args;
  int warp, lane;
  float4 weight;  // of the norm, this lane's
  Taps taps[PARTS];
  int tapped;  // the key head they are for

  __device__ explicit Preparer(const GdnDecodeArgs& args_)
      : args(args_), warp(threadIdx.x / 32 - kConsumers), lane(threadIdx.x % 32), weight{}, taps{},
        tapped(-1) {
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
  template <typename F>
  __device__ void each_part(F f) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const int part = warp + i * kPreparers;
      if (part < 2 + args.group) f(i, part);
    }
  }

  __device__ void load_taps(int key_head) {
    if (key_head == tapped) return;
    tapped = key_head;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const int part = warp + i * kPreparers;
      if (part >= 2 + args.group) continue;
      const int c = channel(part, key_head);
      const auto* words =
          reinterpret_cast<const uint4*>(static_cast<const uint2*>(args.conv_weight) + c);
      taps[i].words[0] = words[0];
      taps[i].words[1] = words[1];
      if (args.conv_bias == nullptr) continue;
      taps[i].bias = static_cast<const uint2*>(args.conv_bias)[c / 4];
    }
  }

  // The ring's pending entries, for the consumers.
  __device__ void announce(const Header& header, const Buffer& to, uint64_t* barrier) const {
    const int key_head = header.key_head;
    const int heads = args.k_heads * args.group, all = args.group * kHeadDim;
    const int64_t slots = header.slot - header.pending;
    if (lane < header.pending) {
      const float* keys = args.keys + ((slots + lane) * args.k_heads + key_head) * kHeadDim;
      bulk_copy(to.keys + lane * kHeadDim, keys, 4 * kHeadDim, barrier);
      const float* errors = args.errors + (slots + lane) * heads * kHeadDim + key_head * all;
      bulk_copy(to.errors + lane * all, errors, 4 * all, barrier);
    }
    const float* decays = args.decays + slots * heads + key_head * args.group;
    for (int i = lane; i < header.pending * args.group; i += 32) {
      copy_word<4>(to.decays + i, decays + i / args.group * heads + i % args.group);
    }
    arrive_after_copies(barrier);
    if (lane == 0) arrive_expecting(barrier, header.pending * 4 * (kHeadDim + all));
  }

  __device__ __nv_bfloat16* conv_rows(int index, int c) const {
    return static_cast<__nv_bfloat16*>(args.conv_state) + index * args.conv_stride + c;
  }

  // Starts fetching what no kernel ahead writes of an item.
  __device__ void fetch_early(const Header& header, const Buffer& to, uint64_t* ring) const {
    if (warp == 0) announce(header, to, ring);
    if (header.index < 0) return;
    if (gating() && lane < args.group) {
      const int head = header.key_head * args.group + lane;
      copy_word<4>(to.gate_words + 4 * lane, args.A_log + head);
      copy_word<4>(to.gate_words + 4 * lane + 1, args.dt_bias + head);
    }
    each_part([&](int, int part) {
      const auto* rows = conv_rows(header.index, channel(part, header.key_head));
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        copy_word<8>(to.inputs + (part * 4 + i) * 32 + lane, rows + i * channels());
      }
    });
  }
  // And the rest of it.
  __device__ void fetch_late(const Header& header, const Buffer& to) const {
    if (header.index < 0) return;
    const int64_t seq = header.seq;
    const auto* qkv = static_cast<const __nv_bfloat16*>(args.qkv) + seq * args.qkv_stride;
    each_part([&](int, int part) {
      copy_word<8>(to.inputs + (part * 4 + 3) * 32 + lane, qkv + channel(part, header.key_head));
    });
    if (warp < args.group && args.gate != nullptr) {
      const auto* z = static_cast<const __nv_bfloat16*>(args.gate) + seq * args.gate_stride;
      const int head = header.key_head * args.group + warp;
      copy_word<8>(to.z + warp * 32 + lane, z + head * kHeadDim + 4 * lane);
    }
    if (gating() && lane < args.group) {
      uint32_t* words = to.gate_words + 4 * lane;
      copy_word<4>(words + 2, word_of(gate_input(args.a, args.a_stride, header)));
      copy_word<4>(words + 3, word_of(gate_input(args.b, args.b_stride, header)));
    }
  }

  // Whether this warp makes the gates, one value head in a lane.
  __device__ bool gating() const { return warp == kPreparers - 1; }
  __device__ const __nv_bfloat16* gate_input(const void* of, int64_t stride,
                                             const Header& header) const {
    const auto* row = static_cast<const __nv_bfloat16*>(of) + header.seq * stride;
    return row + header.key_head * args.group + lane;
  }
  // The four aligned bytes that an element lies in.
  __device__ static const void* word_of(const __nv_bfloat16* at) {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3});
  }
  __device__ static float element_of(uint32_t word, const __nv_bfloat16* at) {
    return __uint_as_float(reinterpret_cast<uintptr_t>(at) & 2 ? word & 0xffff0000u : word << 16);
  }
  // Of the group's value head `lane`.
  __device__ void make_gates(const Header& header, const Buffer& to) const {
    const uint4 words = *reinterpret_cast<const uint4*>(to.gate_words + 4 * lane);
    const float a = element_of(words.z, gate_input(args.a, args.a_stride, header));
    const float b = element_of(words.w, gate_input(args.b, args.b_stride, header));
    make_gates(header, to, __uint_as_float(words.x), __uint_as_float(words.y), a, b);
  }
  __device__ void make_gates(const Header& header, const Buffer& to, float A_log, float dt_bias,
                             float a, float b) const {
    const float x = a + dt_bias;
    // log(1 + exp(x)), accurate where it is tiny: slow decays live there.
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    const float decay = expf(-expf(A_log) * softplus);
    to.gates[lane] = make_float2(decay, sigmoid(b));
    if (!header.commit) {
      const int head = header.key_head * args.group + lane;
      args.decays[int64_t(header.slot) * args.k_heads * args.group + head] = decay;
    }
  }

  // `words`: the inputs, the newest last.
  __device__ void convolve(int part, const Header& header, const Taps& with,
                           const uint2 (&words)[4], const Buffer& to) const {
    const Four taps[4] = {widen(make_uint2(with.words[0].x, with.words[0].y)),
                          widen(make_uint2(with.words[0].z, with.words[0].w)),
                          widen(make_uint2(with.words[1].x, with.words[1].y)),
                          widen(make_uint2(with.words[1].z, with.words[1].w))};
    const Four inputs[4] = {widen(words[0]), widen(words[1]), widen(words[2]), widen(words[3])};
    Four y = widen(with.bias);
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
      const int64_t slot = int64_t(header.slot) * args.k_heads + header.key_head;
      *reinterpret_cast<float4*>(args.keys + slot * kHeadDim + 4 * lane) = result;
    }
    auto* state = conv_rows(header.index, channel(part, header.key_head));
#pragma unroll
    for (int i = 0; i < 3; ++i) *reinterpret_cast<uint2*>(state + i * channels()) = words[i + 1];
  }

  // q, k, v and gates for the consumers, once they are fetched.
  __device__ void make_vectors(const Header& header, const Buffer& to, uint64_t* vectors) const {
    if (header.index >= 0) {
      each_part([&](int i, int part) {
        uint2 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = to.inputs[(part * 4 + j) * 32 + lane];
        convolve(part, header, taps[i], words, to);
      });
      if (gating() && lane < args.group) make_gates(header, to);
    }
    __syncwarp();
    if (lane == 0) arrive(vectors);
  }

  // The gated norm of this warp's head, once the recurrence is `done`.
  __device__ void finish(const Header& header, const Buffer& from, uint64_t* done,
                         uint32_t phase) const {
    wait_parity(done, phase);
    const int seq = header.seq, head = header.key_head * args.group + warp;
    if (warp >= args.group || header.index < 0) return;
    float4 o = *reinterpret_cast<const float4*>(from.out + warp * kHeadDim + 4 * lane);
    if (args.gate != nullptr) {
      const float squares = warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
      const float norm = rsqrtf(squares / kHeadDim + args.eps);
      const float4 z = widen(from.z[warp * 32 + lane]);
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

}  // namespace vllm_cuda::gdn_decode
