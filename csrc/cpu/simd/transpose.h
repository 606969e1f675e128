// SPDX-License-Identifier: Apache-2.0
// Transpose of a square of float vectors, in registers.
#pragma once

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Lane l of the low (high) result of exchanging off-diagonal squares of side `step` between a
// row and the row `step` below it, as an index into the two rows' concatenation.
constexpr int low_lane(int l, int step) { return (l & step) ? kLanes + l - step : l; }
constexpr int high_lane(int l, int step) { return (l & step) ? kLanes + l : l + step; }

#define VLLM_LANES_4(f, s) f(0, s), f(1, s), f(2, s), f(3, s)
#define VLLM_LANES_8(f, s) VLLM_LANES_4(f, s), f(4, s), f(5, s), f(6, s), f(7, s)
#define VLLM_LANES_16(f, s)                                                          \
  VLLM_LANES_8(f, s), f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s),      \
      f(14, s), f(15, s)
#if defined(__AVX512F__)
#define VLLM_LANES(f, s) VLLM_LANES_16(f, s)
#elif defined(__AVX2__)
#define VLLM_LANES(f, s) VLLM_LANES_8(f, s)
#else
#define VLLM_LANES(f, s) VLLM_LANES_4(f, s)
#endif

template <int Step>
inline void exchange(vf& upper, vf& lower) {
  const vf a = upper, b = lower;
#if defined(__clang__)
  upper = __builtin_shufflevector(a, b, VLLM_LANES(low_lane, Step));
  lower = __builtin_shufflevector(a, b, VLLM_LANES(high_lane, Step));
#else
  upper = __builtin_shuffle(a, b, vi{VLLM_LANES(low_lane, Step)});
  lower = __builtin_shuffle(a, b, vi{VLLM_LANES(high_lane, Step)});
#endif
}

template <int Step>
inline void exchange_all(vf (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & Step)) exchange<Step>(rows[i], rows[i + Step]);
  }
}

// rows[i][j] <- rows[j][i].
inline void transpose(vf (&rows)[kLanes]) {
#if defined(__AVX512F__)
  exchange_all<8>(rows);
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
  exchange_all<4>(rows);
#endif
  exchange_all<2>(rows);
  exchange_all<1>(rows);
}

// dst[c][r] = src[r][c] as floats. dst rows are padded to a multiple of kLanes and zero there.
template <typename T>
inline void load_transposed(
    const T* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst, int64_t dst_stride) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for_lanes(cols, [&](int64_t c, int64_t lanes) {
      vf square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = r + i < rows ? load_upto(src + (r + i) * src_stride + c, lanes) : vf{};
      }
      transpose(square);
      for (int64_t i = 0; i < lanes; ++i) store(dst + (c + i) * dst_stride + r, square[i]);
    });
  }
}

// dst[c][r] = src[r][c] for a padded float src and a dense dst of `rows` columns.
template <typename T>
inline void store_transposed(
    const float* src, int64_t src_stride, int64_t rows, int64_t cols, T* dst, int64_t dst_stride) {
  for_lanes(rows, [&](int64_t r, int64_t row_lanes) {
    for_lanes(cols, [&](int64_t c, int64_t lanes) {
      vf square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = i < row_lanes ? load(src + (r + i) * src_stride + c) : vf{};
      }
      transpose(square);
      for (int64_t i = 0; i < lanes; ++i) {
        store_upto(dst + (c + i) * dst_stride + r, square[i], row_lanes);
      }
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
