// SPDX-License-Identifier: Apache-2.0
// x W^T with the weight as stored, read once.
//
// Lanes run along the depth, so neither operand is repacked: every element of the result is one
// vector of partial sums in order of k, halved down to a float. Its bits are the same whatever
// else is in the batch.
#include "../runtime.h"
#include "../simd/vec.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int64_t kBlockColumns = 24;  // a multiple of every tile's columns
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWideRows = 8;
#else
constexpr int kWideRows = 4;
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
#endif

// Adds the last n < kStep elements to one element's partial sums.
template <typename Step, typename W>
__attribute__((noinline)) void add_rest(
    const typename Step::Left* x, const W* w, int64_t n, float* partial) {
  store(partial, Step::rest(x, w, n, load(partial)));
}

// out[r][c] for a tile of Rows of x and Cols of the weight. The loops over `acc` are unrolled and
// free of calls, so that it stays in registers.
template <typename Step, int Rows, int Cols, typename W>
__attribute__((noinline)) void tile(
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
      __builtin_prefetch(w + (Cols + c) * ldw + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const typename Step::Operand left = Step::left(x + r * ldx + k);
#pragma GCC unroll 8
      for (int c = 0; c < Cols; ++c) acc[r][c] = Step::step(left, right[c], acc[r][c]);
    }
  }
  alignas(64) float partial[Rows][Cols][kLanes];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) store(partial[r][c], acc[r][c]);
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Cols; ++c) {
      if (k < depth) {
        add_rest<Step>(x + r * ldx + k, w + c * ldw + k, depth - k, partial[r][c]);
      }
      out[r * kBlockColumns + c] = sum(load(partial[r][c]));
    }
  }
}

template <typename Step, int Rows, int Cols, typename W>
void row_of_tiles(
    const typename Step::Left* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth,
    int64_t columns, float* out) {
  int64_t c = 0;
  for (; c + Cols <= columns; c += Cols) {
    tile<Step, Rows, Cols>(x, ldx, w + c * ldw, ldw, depth, out + c);
  }
  for (; c < columns; ++c) tile<Step, Rows, 1>(x, ldx, w + c * ldw, ldw, depth, out + c);
}

template <typename T>
void store_rows(
    const SkinnyLinearArgs& args, const float* block, int64_t first_row, int64_t rows,
    int64_t column, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(args.out) + (first_row + r) * args.outputs + column;
    for_lanes(columns, [&](int64_t i, int64_t lanes) {
      vf y = load(block + r * kBlockColumns + i);
      if (args.bias) y += load_upto(static_cast<const T*>(args.bias) + column + i, lanes);
      store_upto(out + i, y, lanes);
    });
  }
}

template <typename T, typename W, typename Step>
void columns_range(
    const SkinnyLinearArgs& args, const typename Step::Left* x, int64_t ldx, int64_t begin,
    int64_t end) {
  alignas(64) float block[8 * kBlockColumns + kLanes];
  for (int64_t column = begin; column < end; column += kBlockColumns) {
    const int64_t columns = end - column < kBlockColumns ? end - column : kBlockColumns;
    const W* w = static_cast<const W*>(args.weight) + column * args.weight_stride;
    int64_t row = 0;
    auto step = [&](auto rows, auto cols) {
      constexpr int kRows = decltype(rows)::value, kCols = decltype(cols)::value;
      for (; row + kRows <= args.rows; row += kRows) {
        row_of_tiles<Step, kRows, kCols>(
            x + row * ldx, ldx, w, args.weight_stride, args.depth, columns, block);
        store_rows<T>(args, block, row, kRows, column, columns);
      }
    };
    step(Int<kWideRows>{}, Int<3>{});
    step(Int<4>{}, Int<kWideRows == 8 ? 6 : 3>{});
    step(Int<2>{}, Int<4>{});
    step(Int<1>{}, Int<8>{});
  }
}

// T: of the output and bias, W: of the weight.
template <typename T, typename Step, typename W = T>
void run(const SkinnyLinearArgs& args, const typename Step::Left* x, int64_t ldx) {
  const int64_t blocks = (args.outputs + kBlockColumns - 1) / kBlockColumns;
  const int64_t block_cost = kBlockColumns * args.depth * (args.rows + 3) / 4;
  const int64_t grain = 262144 / (block_cost + 1) + 1;
  parallel_ranges(blocks, grain, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kBlockColumns < args.outputs ? end * kBlockColumns : args.outputs;
    columns_range<T, W, Step>(args, x, ldx, begin * kBlockColumns, last);
  });
}

template <typename T>
void run_widened(const SkinnyLinearArgs& args) {
  const int64_t ldx = round_up(args.depth, kLanes);
  float* x = scratch(Scratch::kPlan, args.rows * ldx);
  for (int64_t r = 0; r < args.rows; ++r) {
    const T* source = static_cast<const T*>(args.x) + r * args.x_stride;
    for_lanes(args.depth, [&](int64_t i, int64_t lanes) {
      store(x + r * ldx + i, load_upto(source + i, lanes));
    });
  }
  run<T, Widen<T>>(args, x, ldx);
}

}  // namespace

void skinny_linear(const SkinnyLinearArgs& args) {
  if (args.fp8_weight) {
    return run<float, Widen<fp8>, fp8>(args, static_cast<const float*>(args.x), args.x_stride);
  }
  switch (args.dtype) {
    case DType::kF32:
      return run<float, Widen<float>>(args, static_cast<const float*>(args.x), args.x_stride);
    case DType::kBF16:
#if defined(__AVX512BF16__)
      return run<bf16, DotBf16>(args, static_cast<const bf16*>(args.x), args.x_stride);
#else
      return run_widened<bf16>(args);
#endif
    case DType::kF16:
      return run_widened<fp16>(args);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
