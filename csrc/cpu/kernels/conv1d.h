// SPDX-License-Identifier: Apache-2.0
// The causal depthwise convolution over a range of channels of one sequence.
#pragma once

#include "../args.h"
#include "../simd/math.h"
#include "../simd/transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kMaxWidth = 8;

// weight[width][lanes] and bias[lanes] of one vector of channels.
struct ConvTaps {
  vf weight[kMaxWidth];
  vf bias;
};

// Lanes 2l and 2l + 1 of the two vectors' concatenation.
inline void deinterleave(vf a, vf b, vf& even, vf& odd) {
  constexpr auto even_lane = [](int l, int) { return 2 * l; };
  constexpr auto odd_lane = [](int l, int) { return 2 * l + 1; };
#if defined(__clang__)
  even = __builtin_shufflevector(a, b, VLLM_LANES(even_lane, 0));
  odd = __builtin_shufflevector(a, b, VLLM_LANES(odd_lane, 0));
#else
  even = __builtin_shuffle(a, b, vi{VLLM_LANES(even_lane, 0)});
  odd = __builtin_shuffle(a, b, vi{VLLM_LANES(odd_lane, 0)});
#endif
}

template <typename W>
inline void load_four_taps(const W* weight, vf* taps) {
  vf even[2], odd[2];
  deinterleave(load(weight), load(weight + kLanes), even[0], odd[0]);
  deinterleave(load(weight + 2 * kLanes), load(weight + 3 * kLanes), even[1], odd[1]);
  deinterleave(even[0], even[1], taps[0], taps[2]);
  deinterleave(odd[0], odd[1], taps[1], taps[3]);
}

inline ConvTaps load_taps(const ConvArgs& args, int64_t channel, int64_t lanes) {
  ConvTaps taps{};
  with_dtype(args.weight.dtype, [&](auto t) {
    using W = decltype(t);
    const W* weight = static_cast<const W*>(args.weight.data) + channel * args.width;
    if (args.width == 4 && lanes == kLanes) return load_four_taps(weight, taps.weight);
    for (int64_t w = 0; w < args.width; ++w) {
      W column[kLanes] = {};
      for (int64_t l = 0; l < lanes; ++l) column[l] = weight[l * args.width + w];
      taps.weight[w] = load(column);
    }
  });
  if (args.bias.data) {
    with_dtype(args.bias.dtype, [&](auto t) {
      const auto* bias = static_cast<const decltype(t)*>(args.bias.data);
      taps.bias = load_upto(bias + channel, lanes);
    });
  }
  return taps;
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
