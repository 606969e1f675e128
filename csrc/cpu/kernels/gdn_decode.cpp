// SPDX-License-Identifier: Apache-2.0
// One token per sequence: convolution, gates and the recurrent step, in one pass over the state.
#include "../runtime.h"
#include "../table.h"
#include "conv1d.h"
#include "gdn.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int kStateRows = 4;  // rows of the state (value dims) taken together

// Convolves channels [first, first + count) of one token, shifts their state, and returns the
// result as T would hold it: prefill passes it through a tensor of T.
template <typename T>
void conv_step(
    const ConvArgs& conv, const T* x, T* state, int64_t first, int64_t count, float* out) {
  for_lanes(count, [&](int64_t c, int64_t lanes) {
    const int64_t channel = first + c;
    const ConvTaps taps = load_taps(conv, channel, lanes);
    const vf input = load_upto(x + channel, lanes);
    vf y = taps.bias;
    T* row = state + channel;
    for (int64_t w = 0; w + 1 < conv.width; ++w, row += conv.channels) {
      y = fma(load_upto(row, lanes), taps.weight[w], y);
      const bool newest = w + 2 == conv.width;
      store_upto(row, newest ? input : load_upto(row + conv.channels, lanes), lanes);
    }
    y = fma(input, taps.weight[conv.width - 1], y);
    store(out + c, round_to<T>(silu(y)));
  });
}

struct RowSums {
  float k[kStateRows];
  float q[kStateRows];
};

// S k and S q of kStateRows rows of the decayed state.
template <typename S>
RowSums project(const S* state, int64_t k_dim, float decay, const float* k, const float* q) {
  vf sum_k[kStateRows] = {}, sum_q[kStateRows] = {};
  for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
    const vf key = load(k + i), query = load(q + i);
#pragma GCC unroll 4
    for (int r = 0; r < kStateRows; ++r) {
      const vf s = load_upto(state + r * k_dim + i, lanes) * decay;
      sum_k[r] = fma(s, key, sum_k[r]);
      sum_q[r] = fma(s, query, sum_q[r]);
    }
  });
  RowSums sums;
  for (int r = 0; r < kStateRows; ++r) {
    sums.k[r] = sum(sum_k[r]);
    sums.q[r] = sum(sum_q[r]);
  }
  return sums;
}

// S <- decay S + d k^T and o = S q = (decay S) q + d (k . q), row by row of S^T.
template <typename T, typename S, int Rows>
void step_rows(
    S* state, int64_t k_dim, float decay, float beta, float kq, const float* k, const float* q,
    const float* v, T* out) {
  RowSums sums{};
  if (Rows == kStateRows) {
    sums = project(state, k_dim, decay, k, q);
  } else {
    vf sum_k = {}, sum_q = {};
    for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
      const vf s = load_upto(state + i, lanes) * decay;
      sum_k = fma(s, load(k + i), sum_k);
      sum_q = fma(s, load(q + i), sum_q);
    });
    sums.k[0] = sum(sum_k);
    sums.q[0] = sum(sum_q);
  }
  float delta[Rows], o[Rows];
  for (int r = 0; r < Rows; ++r) {
    delta[r] = beta * (v[r] - sums.k[r]);
    o[r] = sums.q[r] + delta[r] * kq;
  }
  for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
    const vf key = load(k + i);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      S* p = state + r * k_dim + i;
      store_upto(p, fma(key, set1(delta[r]), load_upto(p, lanes) * decay), lanes);
    }
  });
  for (int r = 0; r < Rows; ++r) store_n(out + r, set1(o[r]), 1);
}

template <typename T, typename S>
void step_head(const GdnArgs& args, int64_t seq, int64_t key_head, float* work) {
  const int64_t group = args.v_heads / args.k_heads;
  const int64_t k_pad = round_up(args.k_dim, kLanes);
  const int64_t index = args.state_indices[seq];
  float* q = work;
  float* k = q + k_pad;
  float* v = k + k_pad;
  const T* x = static_cast<const T*>(args.qkv) + seq * args.qkv_stride;
  T* conv_state = static_cast<T*>(args.conv.state) + index * args.conv.state_stride;
  const int64_t key_width = args.k_heads * args.k_dim;
  conv_step(args.conv, x, conv_state, key_head * args.k_dim, args.k_dim, q);
  conv_step(args.conv, x, conv_state, key_width + key_head * args.k_dim, args.k_dim, k);
  l2_normalise(q, k_pad, 1.0f / ::sqrtf(static_cast<float>(args.k_dim)));
  l2_normalise(k, k_pad, 1.0f);
  vf kq_sum = {};
  for (int64_t i = 0; i < k_pad; i += kLanes) kq_sum = fma(load(k + i), load(q + i), kq_sum);
  const float kq = sum(kq_sum);
  for (int64_t j = key_head * group; j < (key_head + 1) * group; ++j) {
    conv_step(args.conv, x, conv_state, 2 * key_width + j * args.v_dim, args.v_dim, v);
    const Gates gate = gates<T>(args, decay_params(args, j), seq, j);
    const float decay = ::expf(gate.g);
    S* state = static_cast<S*>(args.state) + index * args.state_stride +
        j * args.v_dim * args.k_dim;
    T* out = static_cast<T*>(args.out) + seq * args.out_strides[0] + j * args.out_strides[1];
    int64_t row = 0;
    for (; row + kStateRows <= args.v_dim; row += kStateRows) {
      step_rows<T, S, kStateRows>(
          state + row * args.k_dim, args.k_dim, decay, gate.beta, kq, k, q, v + row, out + row);
    }
    for (; row < args.v_dim; ++row) {
      step_rows<T, S, 1>(
          state + row * args.k_dim, args.k_dim, decay, gate.beta, kq, k, q, v + row, out + row);
    }
  }
}

template <typename T, typename S>
void run(const GdnArgs& args) {
  const int64_t floats = 2 * round_up(args.k_dim, kLanes) + round_up(args.v_dim, kLanes);
  const int64_t item_cost = args.v_heads / args.k_heads * args.v_dim * args.k_dim;
  parallel_ranges(
      args.num_seqs * args.k_heads, 65536 / item_cost + 1, [&](int64_t begin, int64_t end) {
        float* work = scratch(Scratch::kKernel, floats);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t seq = i / args.k_heads;
          if (args.state_indices[seq] >= 0) step_head<T, S>(args, seq, i % args.k_heads, work);
        }
      });
}

}  // namespace

void gdn_decode(const GdnArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) { run<decltype(t), decltype(s)>(args); });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
