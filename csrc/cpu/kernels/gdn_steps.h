// SPDX-License-Identifier: Apache-2.0
// One token's step of the gated delta rule, on rows of a transposed state: of its value dims.
#pragma once

#include <type_traits>

#include "gdn.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kStateRows = 4;  // rows taken together

// Calls run(row, rows) over all rows, with as many as are taken together as a constant.
template <typename F>
inline void for_rows(int64_t rows, const F& run) {
  int64_t row = 0;
  for (; row + kStateRows <= rows; row += kStateRows) {
    run(row, std::integral_constant<int, kStateRows>{});
  }
  for (; row < rows; ++row) run(row, std::integral_constant<int, 1>{});
}

// A step's decay: one of the whole state, or one of each key channel.
struct HeadDecay {
  float value;
  static HeadDecay of(const float* p) { return {*p}; }
  static int64_t floats(int64_t) { return 1; }
  vf at(int64_t, int64_t) const { return set1(value); }
};
struct ChannelDecays {
  const float* values;
  static ChannelDecays of(const float* p) { return {p}; }
  static int64_t floats(int64_t k_dim) { return k_dim; }
  vf at(int64_t i, int64_t lanes) const { return load_upto(values + i, lanes); }
};

struct RowSums {
  float k[kStateRows];
  float q[kStateRows];
};

// S k and S q of kStateRows rows of the decayed state.
template <typename S, typename Decay>
inline RowSums project(
    const S* state, int64_t k_dim, Decay decay, const float* k, const float* q) {
  vf sum_k[kStateRows] = {}, sum_q[kStateRows] = {};
  for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
    const vf key = load(k + i), query = load(q + i), shrink = decay.at(i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kStateRows; ++r) {
      const vf s = load_upto(state + r * k_dim + i, lanes) * shrink;
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

// S <- decay S + d k^T, row by row of S^T.
template <typename S, int Rows, typename Decay>
inline void update_rows(
    S* state, int64_t k_dim, Decay decay, const float* k, const float* delta) {
  for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
    // A journal has no room behind its last key.
    const vf key = load_upto(k + i, lanes), shrink = decay.at(i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      S* p = state + r * k_dim + i;
      store_upto(p, fma(key, set1(delta[r]), load_upto(p, lanes) * shrink), lanes);
    }
  });
}

// S <- decay S + d k^T and o = S q = (decay S) q + d (k . q), row by row of S^T; returns d.
template <typename T, typename S, int Rows, typename Decay>
inline void step_rows(
    S* state, int64_t k_dim, Decay decay, float beta, float kq, const float* k, const float* q,
    const float* v, T* out, float* delta) {
  RowSums sums{};
  if (Rows == kStateRows) {
    sums = project(state, k_dim, decay, k, q);
  } else {
    vf sum_k = {}, sum_q = {};
    for_lanes(k_dim, [&](int64_t i, int64_t lanes) {
      const vf s = load_upto(state + i, lanes) * decay.at(i, lanes);
      sum_k = fma(s, load(k + i), sum_k);
      sum_q = fma(s, load(q + i), sum_q);
    });
    sums.k[0] = sum(sum_k);
    sums.q[0] = sum(sum_q);
  }
  float o[Rows];
  for (int r = 0; r < Rows; ++r) {
    delta[r] = beta * (v[r] - sums.k[r]);
    o[r] = sums.q[r] + delta[r] * kq;
  }
  update_rows<S, Rows>(state, k_dim, decay, k, delta);
  for (int r = 0; r < Rows; ++r) store_n(out + r, set1(o[r]), 1);
}

// The updates of `pending` tokens that a journal keeps from place `first` on.
template <typename S, int Rows, typename Decay>
void replay_rows(
    S* state, int64_t k_dim, const float* keys, int64_t key_pitch, const float* errors,
    int64_t error_pitch, const float* decays, int64_t decay_pitch, int64_t pending, int64_t first,
    int64_t places) {
  for (int64_t i = 0; i < pending; ++i) {
    const int64_t at = (first + i) % places;
    update_rows<S, Rows>(
        state, k_dim, Decay::of(decays + at * decay_pitch), keys + at * key_pitch,
        errors + at * error_pitch);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
