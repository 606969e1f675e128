// SPDX-License-Identifier: Apache-2.0
// Small dense matrix products in registers.
//
// Every element of the result is one chain of fused multiply-adds in order of k, so it has the
// same bits whatever the shape of the tile that computed it.
#pragma once

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVecs = 3;

enum class Init { kZero, kAdd };

// a[m][k] at a[m * row + k * col].
struct Left {
  const float* data;
  int64_t row;
  int64_t col;
};

template <Init I, int Rows, int Vecs>
inline void gemm_tile(int64_t depth, Left a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  vf acc[Rows][Vecs];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) {
      acc[m][v] = I == Init::kAdd ? load(c + m * ldc + v * kLanes) : vf{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    vf column[Vecs];
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) column[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const vf left = set1(a.data[m * a.row + k * a.col]);
#pragma GCC unroll 4
      for (int v = 0; v < Vecs; ++v) acc[m][v] = fma(left, column[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) store(c + m * ldc + v * kLanes, acc[m][v]);
  }
}

template <Init I, int Vecs>
inline void gemm_panel(
    int64_t rows, int64_t depth, Left a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t m = 0;
  auto left = [&] { return Left{a.data + m * a.row, a.row, a.col}; };
  for (; m + kTileRows <= rows; m += kTileRows) {
    gemm_tile<I, kTileRows, Vecs>(depth, left(), b, ldb, c + m * ldc, ldc);
  }
  if (kTileRows > 4 && m + 4 <= rows) {
    gemm_tile<I, 4, Vecs>(depth, left(), b, ldb, c + m * ldc, ldc);
    m += 4;
  }
  if (m + 2 <= rows) {
    gemm_tile<I, 2, Vecs>(depth, left(), b, ldb, c + m * ldc, ldc);
    m += 2;
  }
  if (m < rows) gemm_tile<I, 1, Vecs>(depth, left(), b, ldb, c + m * ldc, ldc);
}

// c[rows][cols] = (c +) a[rows][depth] b[depth][cols]; cols, ldb and ldc are multiples of kLanes.
template <Init I>
inline void gemm(
    int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
    int64_t ldc) {
  int64_t n = 0;
  for (; n + kTileVecs * kLanes <= cols; n += kTileVecs * kLanes) {
    gemm_panel<I, kTileVecs>(rows, depth, a, b + n, ldb, c + n, ldc);
  }
  if (n + 2 * kLanes <= cols) {
    gemm_panel<I, 2>(rows, depth, a, b + n, ldb, c + n, ldc);
    n += 2 * kLanes;
  }
  if (n < cols) gemm_panel<I, 1>(rows, depth, a, b + n, ldb, c + n, ldc);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
