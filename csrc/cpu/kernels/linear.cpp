// SPDX-License-Identifier: Apache-2.0
// x W^T with the weight as stored, read once.
#include "../runtime.h"
#include "../simd/dot.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// T: of the output and bias, W: of the weight.
template <typename T, typename W, typename Step>
void columns_range(
    const SkinnyLinearArgs& args, const typename Step::Left* x, int64_t ldx, int64_t begin,
    int64_t end) {
  alignas(64) float products[kProducts];
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t column = begin; column < end; column += kBlockColumns) {
    const int64_t columns = end - column < kBlockColumns ? end - column : kBlockColumns;
    const W* w = static_cast<const W*>(args.weight) + column * args.weight_stride;
    for_row_tiles(args.rows, [&](auto tile, int64_t row) {
      constexpr int kRows = decltype(tile)::value;
      dots<Step, kRows>(
          x + row * ldx, ldx, w, args.weight_stride, args.depth, columns, row == 0, products);
      for (int64_t r = 0; r < kRows; ++r) {
        T* out = static_cast<T*>(args.out) + (row + r) * args.outputs + column;
        store_products(products + r * kBlockColumns, bias ? bias + column : nullptr, columns, out);
      }
    });
  }
}

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
void run_plain(const SkinnyLinearArgs& args) {
  using Step = StepOf<T>;
  using Left = typename Step::Left;
  const T* x = static_cast<const T*>(args.x);
  if constexpr (std::is_same_v<Left, T>) {
    run<T, Step>(args, x, args.x_stride);
  } else {
    const int64_t ldx = padded_depth<Step>(args.depth);
    Left* wide = scratch(Scratch::kPlan, args.rows * ldx);
    for (int64_t r = 0; r < args.rows; ++r) {
      copy_row(x + r * args.x_stride, args.depth, wide + r * ldx);
    }
    run<T, Step>(args, wide, ldx);
  }
}

}  // namespace

void skinny_linear(const SkinnyLinearArgs& args) {
  if (args.fp8_weight) {
    return run<float, Widen<fp8>, fp8>(args, static_cast<const float*>(args.x), args.x_stride);
  }
  with_dtype(args.dtype, [&](auto t) { run_plain<decltype(t)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
