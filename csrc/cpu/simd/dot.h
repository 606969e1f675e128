// SPDX-License-Identifier: Apache-2.0
// Dot products of rows with rows, in registers.
//
// Lanes run along the depth, so neither operand is repacked: every product is one vector of
// partial sums in order of k, halved down to a float. Its bits are the same whatever tile made it.
#pragma once

#include <type_traits>

#include "transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kBlockColumns = 24;  // a multiple of every tile's columns
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDotRows = 6;
constexpr int dot_columns(int rows) { return rows > 4 ? 4 : rows > 2 ? 6 : 8; }
#else
constexpr int kDotRows = 4;
constexpr int dot_columns(int rows) { return rows > 2 ? 3 : rows > 1 ? 4 : 8; }
#endif

template <int N>
struct Int {
  static constexpr int value = N;
};

// acc + x . w over kStep elements.
template <typename W>
struct Widen {
  using Left = float;
  using Operand = vf;
  static constexpr int64_t kStep = kLanes;
  static Operand left(const Left* x) { return load(x); }
  static Operand right(const W* w) { return load(w); }
  static vf step(Operand x, Operand w, vf acc) { return fma(x, w, acc); }
  static vf rest(const Left* x, const W* w, int64_t n, vf acc) {
    return fma(load_n(x, n), load_n(w, n), acc);
  }
};

#if defined(__AVX512BF16__)
struct DotBf16 {
  using Left = bf16;
  using Operand = __m512bh;
  static constexpr int64_t kStep = 2 * kLanes;
  static Operand left(const bf16* p) {
    Operand v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static Operand right(const bf16* p) { return left(p); }
  static vf step(Operand x, Operand w, vf acc) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, x, w);
  }
  static vf rest(const bf16* x, const bf16* w, int64_t n, vf acc) {
    bf16 padded_x[kStep] = {}, padded_w[kStep] = {};
    for (int64_t i = 0; i < n; ++i) {
      padded_x[i] = x[i];
      padded_w[i] = w[i];
    }
    return step(left(padded_x), right(padded_w), acc);
  }
};
template <typename T>
using StepOf = std::conditional_t<std::is_same_v<T, bf16>, DotBf16, Widen<T>>;
#else
template <typename T>
using StepOf = Widen<T>;
#endif

// Elements from one row of `depth` to the next where rows are copied: not a power of two, or the
// rows of a tile would share few places of the cache.
template <typename Step>
inline int64_t padded_depth(int64_t depth) {
  return round_up(depth, Step::kStep) + Step::kStep;
}

// A row of T as left operand of its step.
template <typename T, typename Left>
inline void copy_row(const T* source, int64_t n, Left* out) {
  if constexpr (std::is_same_v<T, Left>) {
    __builtin_memcpy(out, source, n * sizeof(T));
  } else {
    for_lanes(n, [&](int64_t i, int64_t lanes) { store(out + i, load_upto(source + i, lanes)); });
  }
}

// One halving of the sums of 2 * Step vectors, in pairs.
template <int Step>
inline void halve_pairs(vf (&v)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < Step; ++i) {
    vf low = v[i], high = v[i + Step];
    exchange<Step>(low, high);
    v[i] = low + high;
  }
}

// Lane i: the `sum` of vector i, with its bits.
template <int Count>
__attribute__((always_inline)) inline vf sums(const float (*vectors)[kLanes]) {
  vf v[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) v[i] = i < Count ? load(vectors[i]) : vf{};
#if defined(__AVX512F__)
  halve_pairs<8>(v);
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
  halve_pairs<4>(v);
#endif
  halve_pairs<2>(v);
  halve_pairs<1>(v);
  return v[0];
}

// Adds the last n < kStep elements to one product's partial sums.
template <typename Step, typename W>
__attribute__((noinline)) void add_rest(
    const typename Step::Left* x, const W* w, int64_t n, float* partial) {
  store(partial, Step::rest(x, w, n, load(partial)));
}

// out[r][c] for a tile of Rows of x and Cols of the weight. The loops over `acc` are unrolled and
// free of calls, so that it stays in registers. Fetch: of the next columns, too.
template <typename Step, int Rows, int Cols, bool Fetch, typename W>
__attribute__((noinline)) void dot_tile(
    const typename Step::Left* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, float* out) {
  vf acc[Rows][Cols];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) acc[r][c] = vf{};
  }
  int64_t k = 0;
  for (; k + Step::kStep <= depth; k += Step::kStep) {
    typename Step::Operand right[Cols];
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) {
      right[c] = Step::right(w + c * ldw + k);
      if constexpr (Fetch) __builtin_prefetch(w + (Cols + c) * ldw + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const typename Step::Operand left = Step::left(x + r * ldx + k);
#pragma GCC unroll 8
      for (int c = 0; c < Cols; ++c) acc[r][c] = Step::step(left, right[c], acc[r][c]);
    }
  }
  constexpr int kCount = Rows * Cols;
  alignas(64) float partial[kCount][kLanes];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) store(partial[r * Cols + c], acc[r][c]);
  }
  if (k < depth) {
    for (int i = 0; i < kCount; ++i) {
      const int64_t r = i / Cols, c = i % Cols;
      add_rest<Step>(x + r * ldx + k, w + c * ldw + k, depth - k, partial[i]);
    }
  }
  constexpr int kWhole = kCount / kLanes * kLanes;
  alignas(64) float products[kWhole + kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < kWhole; i += kLanes) store(products + i, sums<kLanes>(partial + i));
  if constexpr (kWhole < kCount) store(products + kWhole, sums<kCount - kWhole>(partial + kWhole));
  for (int r = 0; r < Rows; ++r) {
    __builtin_memcpy(out + r * kBlockColumns, products + r * Cols, Cols * sizeof(float));
  }
}

// out[r][c] = x[r] . w[c] for Rows rows and up to kBlockColumns columns. `fetch`: the weight is
// not in a cache yet.
template <typename Step, int Rows, typename W>
void dots(
    const typename Step::Left* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth,
    int64_t columns, bool fetch, float* out) {
  constexpr int kCols = dot_columns(Rows);
  const auto tile =
      fetch ? dot_tile<Step, Rows, kCols, true, W> : dot_tile<Step, Rows, kCols, false, W>;
  int64_t c = 0;
  for (; c + kCols <= columns; c += kCols) tile(x, ldx, w + c * ldw, ldw, depth, out + c);
  for (; c < columns; ++c) {
    dot_tile<Step, Rows, 1, true, W>(x, ldx, w + c * ldw, ldw, depth, out + c);
  }
}

template <int Rows, typename F>
inline void last_rows(int64_t rows, int64_t row, const F& f) {
  if constexpr (Rows > 0) {
    if (rows == Rows) return f(Int<Rows>{}, row);
    last_rows<Rows - 1>(rows, row, f);
  }
}

// Calls f(Int<Rows>, first row) for as few tiles as cover `rows`.
template <typename F>
inline void for_row_tiles(int64_t rows, const F& f) {
  int64_t row = 0;
  for (; row + kDotRows <= rows; row += kDotRows) f(Int<kDotRows>{}, row);
  last_rows<kDotRows - 1>(rows - row, row, f);
}

// One row's products plus bias, where there is one.
template <typename T>
inline vf load_products(const float* products, const T* bias, int64_t i, int64_t lanes) {
  const vf y = load(products + i);
  return bias ? y + load_upto(bias + i, lanes) : y;
}
template <typename T>
inline void store_products(const float* products, const T* bias, int64_t columns, T* out) {
  for_lanes(columns, [&](int64_t i, int64_t lanes) {
    store_upto(out + i, load_products(products, bias, i, lanes), lanes);
  });
}

// Floats for the products of a tile of rows, with what the load of a last vector reads behind them.
constexpr int64_t kProducts = kDotRows * kBlockColumns + kLanes;

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
