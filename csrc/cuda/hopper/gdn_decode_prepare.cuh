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

// SEVERAL: tokens of each sequence.
template <bool SEVERAL>
struct Preparer {
  static constexpr int PARTS = (2 + kMaxGroup + kPreparers - 1) / kPreparers;  // of a warp
  const GdnDecodeArgs& args;
  int warp, lane;
  float4 weight;  // of the norm, this lane's
  Taps taps[PARTS];
  int tapped;  // the item they are for

  __device__ explicit Preparer(const GdnDecodeArgs& args_)
      : args(args_), warp(threadIdx.x / 32 - kConsumers), lane(threadIdx.x % 32), weight{}, taps{},
        tapped(-1) {
    if (args.gate == nullptr) return;
    weight = args.norm_weight_is_float ? static_cast<const float4*>(args.norm_weight)[lane]
                                       : widen(static_cast<const uint2*>(args.norm_weight)[lane]);
  }

  __device__ int tokens() const { return SEVERAL ? args.tokens : 1; }  // of each sequence
  __device__ int k_heads() const { return args.items >> args.sharing; }
  __device__ int channels() const { return (2 * k_heads() + args.items * args.heads) * kHeadDim; }

  // First channel of part 0 (q), 1 (k), 2, ... (v of the item's heads).
  __device__ int channel(int part, int number) const {
    const int head = part < 2 ? part * k_heads() + (number >> args.sharing)
                              : 2 * k_heads() + number * args.heads + part - 2;
    return head * kHeadDim + 4 * lane;
  }
  template <typename F>
  __device__ void each_part(F f) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const int part = warp + i * kPreparers;
      if (part < 2 + args.heads) f(i, part);
    }
  }

  __device__ void load_taps(int number) {
    if (number == tapped) return;
    tapped = number;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const int part = warp + i * kPreparers;
      if (part >= 2 + args.heads) continue;
      const int c = channel(part, number);
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
    const int number = header.number, key_head = number >> args.sharing;
    const int heads = args.items * args.heads, all = args.heads * kHeadDim;
    static_assert(kMaxPending <= 32);
    if (lane < header.pending) {
      const int64_t slot = header.slot(args, lane);
      const float* keys = args.keys + (slot * k_heads() + key_head) * kHeadDim;
      bulk_copy(to.keys + lane * kHeadDim, keys, 4 * kHeadDim, barrier);
      const float* errors = args.errors + slot * heads * kHeadDim + number * all;
      bulk_copy(to.errors + lane * all, errors, 4 * all, barrier);
    }
    const float* decays = args.decays + number * args.heads;
    for (int i = lane; i < header.pending * args.heads; i += 32) {
      const int64_t slot = header.slot(args, i / args.heads);
      copy_word<4>(to.decays + i, decays + slot * heads + i % args.heads);
    }
    arrive_after_copies(barrier);
    if (lane == 0) arrive_expecting(barrier, header.pending * 4 * (kHeadDim + all));
  }

  __device__ __nv_bfloat16* conv_rows(int index, int c) const {
    return static_cast<__nv_bfloat16*>(args.conv_state) + index * args.conv_stride + c;
  }
  __device__ __nv_bfloat16* draft_rows(int row, int c) const {
    return static_cast<__nv_bfloat16*>(args.inputs) + int64_t(row) * args.drafts * channels() + c;
  }
  // The three inputs before the step's, the oldest first: the state's and the accepted drafts'.
  __device__ const __nv_bfloat16* past_input(const Header& header, int i, int c) const {
    const int at = i + header.taken;
    return at < kConvWidth - 1
               ? conv_rows(header.index, c) + at * channels()
               : draft_rows(header.row, c) + (at - (kConvWidth - 1)) * channels();
  }
  __device__ const __nv_bfloat16* new_input(const Header& header, int t, int c) const {
    return static_cast<const __nv_bfloat16*>(args.qkv) + token(header, t) * args.qkv_stride + c;
  }
  // Number of a sequence's token `t` in the step.
  __device__ int64_t token(const Header& header, int t) const {
    return int64_t(header.seq) * tokens() + t;
  }

  // Starts fetching what no kernel ahead writes of an item.
  __device__ void fetch_early(const Header& header, const Buffer& to, uint64_t* ring) const {
    if (warp == 0) announce(header, to, ring);
    if (header.index < 0) return;
    each_gate([&](int i, int, int head) {
      uint32_t* words = &to.gate_words[i].x;
      copy_word<4>(words, args.A_log + header.number * args.heads + head);
      copy_word<4>(words + 1, args.dt_bias + header.number * args.heads + head);
    });
    each_part([&](int, int part) {
      const int c = channel(part, header.number);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        copy_word<8>(to.inputs + (part * 3 + i) * 32 + lane, past_input(header, i, c));
      }
    });
  }
  // And the rest of it.
  __device__ void fetch_late(const Header& header, const Buffer& to) const {
    if (header.index < 0) return;
    each_part([&](int, int part) {
      for (int t = 0; t < tokens(); ++t) {
        copy_word<8>(waiting(to, t, part), new_input(header, t, channel(part, header.number)));
      }
    });
    if (args.gate != nullptr) {
      each_head([&](int i, int t, int head) {
        copy_word<8>(to.z + i * 32 + lane, norm_gate(header, t, head));
      });
    }
    each_gate([&](int i, int t, int head) {
      uint32_t* words = &to.gate_words[i].x;
      copy_word<4>(words + 2, word_of(gate_input(args.a, args.a_stride, header, t, head)));
      copy_word<4>(words + 3, word_of(gate_input(args.b, args.b_stride, header, t, head)));
    });
  }
  // Where a token's input waits: where what is made of it goes.
  __device__ uint2* waiting(const Buffer& of, int t, int part) const {
    float* vectors = of.of_token(t, args.heads).q;
    return reinterpret_cast<uint2*>(vectors + part * kHeadDim + 4 * lane);
  }
  // This lane's of the item's value head `head`.
  __device__ const __nv_bfloat16* norm_gate(const Header& header, int t, int head) const {
    const auto* row =
        static_cast<const __nv_bfloat16*>(args.gate) + token(header, t) * args.gate_stride;
    return row + (header.number * args.heads + head) * kHeadDim + 4 * lane;
  }

  // This warp's among the tokens' value heads.
  template <typename F>
  __device__ void each_head(F f) const {
    for (int i = warp; i < tokens() * args.heads; i += kPreparers) {
      f(i, i / args.heads, i % args.heads);
    }
  }
  // Of these, the one whose gates this lane makes: the first ones' in the last warp.
  template <typename F>
  __device__ void each_gate(F f) const {
    static_assert(kMaxTokens * kMaxGroup <= 32 * kPreparers);
    const int i = 32 * (kPreparers - 1 - warp) + lane;
    if (i < tokens() * args.heads) f(i, i / args.heads, i % args.heads);
  }
  __device__ const __nv_bfloat16* gate_input(const void* of, int64_t stride, const Header& header,
                                             int t, int head) const {
    const auto* row = static_cast<const __nv_bfloat16*>(of) + token(header, t) * stride;
    return row + header.number * args.heads + head;
  }
  // The four aligned bytes that an element lies in.
  __device__ static const void* word_of(const __nv_bfloat16* at) {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3});
  }
  __device__ static float element_of(uint32_t word, const __nv_bfloat16* at) {
    return __uint_as_float(reinterpret_cast<uintptr_t>(at) & 2 ? word & 0xffff0000u : word << 16);
  }
  __device__ void make_gates(const Header& header, const Buffer& to) const {
    each_gate([&](int i, int t, int head) {
      const uint4 words = to.gate_words[i];
      const float a = element_of(words.z, gate_input(args.a, args.a_stride, header, t, head));
      const float b = element_of(words.w, gate_input(args.b, args.b_stride, header, t, head));
      make_gates(header, to, t, head, __uint_as_float(words.x), __uint_as_float(words.y), a, b);
    });
  }
  __device__ void make_gates(const Header& header, const Buffer& to, int t, int head, float A_log,
                             float dt_bias, float a, float b) const {
    const float x = a + dt_bias;
    // log(1 + exp(x)), accurate where it is tiny: slow decays live there.
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    const float decay = expf(-expf(A_log) * softplus);
    to.gates[t * args.heads + head] = make_float2(decay, sigmoid(b));
    if (header.keeps(t)) {
      float* decays = args.decays + header.slot(args, header.before(t)) * args.items * args.heads;
      decays[header.number * args.heads + head] = decay;
    }
  }

  // `words`: the inputs up to token `t`'s, the newest last; `to`: of that token.
  __device__ void convolve(int part, const Header& header, int t, const Taps& with,
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
    // What items share one of them writes.
    const int key_head = header.number >> args.sharing;
    if (part < 2 && header.number != key_head << args.sharing) return;
    if (part == 1 && header.keeps(t)) {
      const int64_t key = header.slot(args, header.before(t)) * k_heads() + key_head;
      *reinterpret_cast<float4*>(args.keys + key * kHeadDim + 4 * lane) = result;
    }
    const int c = channel(part, header.number);
    if (t > 0) {
      *reinterpret_cast<uint2*>(draft_rows(header.row, c) + (t - 1) * channels()) = words[3];
      return;
    }
    auto* state = conv_rows(header.index, c);
#pragma unroll
    for (int i = 0; i < 3; ++i) *reinterpret_cast<uint2*>(state + i * channels()) = words[i + 1];
  }

  // Token `t`, whose input waits; `words`: the inputs before it, then before the next.
  __device__ void convolve_next(int part, const Header& header, int t, const Taps& with,
                                uint2 (&words)[4], const Buffer& to) const {
    words[3] = *waiting(to, t, part);
    convolve(part, header, t, with, words, to.of_token(t, args.heads));
#pragma unroll
    for (int j = 0; j < 3; ++j) words[j] = words[j + 1];
  }

  // q, k, v and gates for the consumers, once they are fetched.
  __device__ void make_vectors(const Header& header, const Buffer& to, uint64_t* vectors) const {
    if (header.index >= 0) {
      each_part([&](int i, int part) {
        uint2 words[4];
#pragma unroll
        for (int j = 0; j < 3; ++j) words[j] = to.inputs[(part * 3 + j) * 32 + lane];
        for (int t = 0; t < tokens(); ++t) convolve_next(part, header, t, taps[i], words, to);
      });
      make_gates(header, to);
    }
    __syncwarp();
    if (lane == 0) arrive(vectors);
  }

  // The gated norm of the item's value head `head`, token `t`, once `wait()` has seen its output.
  template <typename Wait>
  __device__ void finish(const Header& header, const Buffer& with, int t, int head,
                         Wait wait) const {
    const Buffer from = with.of_token(t, args.heads);
    float4 z{}, open{};  // how far the gates are
    if (args.gate != nullptr) {
      z = widen(from.z[head * 32 + lane]);
      open = make_float4(sigmoid(z.x), sigmoid(z.y), sigmoid(z.z), sigmoid(z.w));
    }
    wait();
    float4 o = *reinterpret_cast<const float4*>(from.out + head * kHeadDim + 4 * lane);
    if (args.gate != nullptr) {
      const float squares = warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
      const float norm = rsqrtf(squares / kHeadDim + args.eps);
      o = make_float4(normed(o.x, norm, weight.x) * z.x * open.x,
                      normed(o.y, norm, weight.y) * z.y * open.y,
                      normed(o.z, norm, weight.z) * z.z * open.z,
                      normed(o.w, norm, weight.w) * z.w * open.w);
    }
    auto* out = static_cast<__nv_bfloat16*>(args.out) + token(header, t) * args.out_stride;
    out += (header.number * args.heads + head) * kHeadDim + 4 * lane;
    *reinterpret_cast<uint2*>(out) = narrow(o);
  }

  __device__ float normed(float o, float norm, float weight) const {
    const float result = round_bf16(o * norm) * weight;
    return args.norm_weight_is_float ? result : round_bf16(result);
  }
};

}  // namespace vllm_cuda::gdn_decode
