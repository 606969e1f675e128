// SPDX-License-Identifier: Apache-2.0
#include "conv1d.h"

#include "../runtime.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int64_t kChannels = 8 * kLanes;  // channels of one work item
constexpr int64_t kTokens = 32;            // rows kept in cache while its channels are walked

// One vector of channels over a few tokens. `history[w]` holds the last Width - 1 inputs, oldest
// first, between calls.
template <typename T, int Width>
void convolve(
    const ConvArgs& args, const ConvTaps& taps, const T* x, T* out, int64_t tokens, int64_t lanes,
    vf* history) {
  vf past[Width - 1];
#pragma GCC unroll 8
  for (int w = 0; w < Width - 1; ++w) past[w] = history[w];
  for (int64_t t = 0; t < tokens; ++t) {
    const vf input = load_upto(x + t * args.x_stride, lanes);
    vf y = taps.bias;
#pragma GCC unroll 8
    for (int w = 0; w < Width - 1; ++w) y = fma(past[w], taps.weight[w], y);
    y = fma(input, taps.weight[Width - 1], y);
#pragma GCC unroll 8
    for (int w = 0; w < Width - 2; ++w) past[w] = past[w + 1];
    past[Width - 2] = input;
    store_upto(out + t * args.out_stride, silu(y), lanes);
  }
#pragma GCC unroll 8
  for (int w = 0; w < Width - 1; ++w) history[w] = past[w];
}

// At most kChannels channels of one sequence.
template <typename T, int Width>
void convolve_sequence(
    const ConvArgs& args, const T* x, T* out, T* state, bool carried, int64_t tokens,
    int64_t channel, int64_t channels) {
  ConvTaps taps[kChannels / kLanes];
  vf history[kChannels / kLanes][Width - 1] = {};
  for_lanes(channels, [&](int64_t c, int64_t lanes) {
    taps[c / kLanes] = load_taps(args, channel + c, lanes);
    for (int w = 0; carried && w < Width - 1; ++w) {
      history[c / kLanes][w] = load_upto(state + w * args.channels + c, lanes);
    }
  });
  for (int64_t t = 0; t < tokens; t += kTokens) {
    const int64_t count = tokens - t < kTokens ? tokens - t : kTokens;
    for_lanes(channels, [&](int64_t c, int64_t lanes) {
      convolve<T, Width>(
          args, taps[c / kLanes], x + t * args.x_stride + c, out + t * args.out_stride + c, count,
          lanes, history[c / kLanes]);
    });
  }
  for_lanes(channels, [&](int64_t c, int64_t lanes) {
    for (int w = 0; w < Width - 1; ++w) {
      store_upto(state + w * args.channels + c, history[c / kLanes][w], lanes);
    }
  });
}

template <typename T, int Width>
void run(const ConvArgs& args) {
  const int64_t groups = (args.channels + kChannels - 1) / kChannels;
  const int64_t tokens = args.num_seqs ? args.query_start[args.num_seqs] : 0;
  auto item = [&](int64_t i) {
    const int64_t seq = i / groups;
    const int64_t index = args.state_indices[seq];
    const int64_t start = args.query_start[seq];
    const int64_t count = args.query_start[seq + 1] - start;
    if (index < 0 || count <= 0) return;
    const int64_t first = i % groups * kChannels;
    const int64_t last = first + kChannels < args.channels ? first + kChannels : args.channels;
    convolve_sequence<T, Width>(
        args, static_cast<const T*>(args.x) + start * args.x_stride + first,
        static_cast<T*>(args.out) + start * args.out_stride + first,
        static_cast<T*>(args.state) + index * args.state_stride + first,
        args.has_initial_state[seq], count, first, last - first);
  };
  const int64_t items = args.num_seqs * groups;
  if (tokens * args.channels < 65536) {
    for (int64_t i = 0; i < items; ++i) item(i);
  } else {
    parallel_items(items, item);
  }
}

}  // namespace

void causal_conv1d(const ConvArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    using T = decltype(t);
    switch (args.width) {
      case 2:
        return run<T, 2>(args);
      case 3:
        return run<T, 3>(args);
      case 4:
        return run<T, 4>(args);
      case 5:
        return run<T, 5>(args);
      default:
        return;
    }
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
