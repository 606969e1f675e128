// SPDX-License-Identifier: Apache-2.0
// One layer's experts for a batch: see `vllm.kernels.moe.naive.run_experts`.
//
// Three passes over all pairs of tokens and experts: the inner products with their activation, the
// outer products, and each token's sum over its slots in order. Threads share the first two by
// blocks of one expert's pairs and by columns of its weight, which is read once per block.
#include "../runtime.h"
#include "../simd/dot.h"
#include "../simd/math.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// Enough for an even share; every part of a block reads the block's tokens again.
constexpr int64_t kPartsPerThread = 8;
// Multiply-adds, and elements summed, that are worth a thread.
constexpr int64_t kLeastWork = 262144, kLeastSum = 65536;

// f(block, first column, last column) for parts of all blocks with `columns` columns each.
template <typename F>
void for_parts(const ExpertsArgs& args, int64_t columns, int64_t depth, const F& f) {
  if (!args.num_blocks) return;
  const int64_t work = args.blocks[args.num_blocks - 1].end * columns * depth;
  const int64_t strips = (columns + kBlockColumns - 1) / kBlockColumns;
  const int64_t wanted = kPartsPerThread * num_threads() / args.num_blocks + 1;
  const int64_t width = (strips + wanted - 1) / wanted * kBlockColumns;
  const int64_t parts = (columns + width - 1) / width;
  auto run = [&](int64_t item) {
    const int64_t first = item % parts * width;
    f(args.blocks[item / parts], first, first + width < columns ? first + width : columns);
  };
  if (work < kLeastWork) {
    for (int64_t item = 0; item < args.num_blocks * parts; ++item) run(item);
  } else {
    parallel_items(args.num_blocks * parts, run);
  }
}

__attribute__((always_inline)) inline vf activate(const ExpertsArgs& args, vf gate, vf up) {
  switch (args.activation) {
    case ExpertActivation::kSwiglu:
      return swiglu(gate, up);
    case ExpertActivation::kClampedSwiglu:
      return clamped_swiglu(gate, up, args.alpha, args.limit, args.offset);
    case ExpertActivation::kReluSquared:
      return relu_squared(gate);
  }
  return vf{};
}

// Columns [first, last) of `active` for a block's pairs.
template <typename T>
void inner_products(
    const ExpertsArgs& args, const ExpertBlock& block, int64_t first, int64_t last) {
  using Step = StepOf<T>;
  using Left = typename Step::Left;
  const int64_t pairs = block.end - block.begin, depth = args.hidden, inner = args.inner;
  const int64_t stride = padded_depth<Step>(depth);
  Left* x = reinterpret_cast<Left*>(scratch(Scratch::kKernel, pairs * stride));
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t token = args.pairs[block.begin + i] / args.slots;
    copy_row(static_cast<const T*>(args.x) + token * args.x_stride, depth, x + i * stride);
  }
  const int64_t halves = args.activation == ExpertActivation::kReluSquared ? 1 : 2;
  const T* weight = static_cast<const T*>(args.gate_up) + block.expert * halves * inner * depth;
  const T* bias = static_cast<const T*>(args.gate_up_bias);
  if (bias) bias += block.expert * halves * inner;
  alignas(64) float products[2][kProducts];
  for (int64_t column = first; column < last; column += kBlockColumns) {
    const int64_t columns = last - column < kBlockColumns ? last - column : kBlockColumns;
    for_row_tiles(pairs, [&](auto tile, int64_t row) {
      constexpr int kRows = decltype(tile)::value;
      for (int64_t half = 0; half < halves; ++half) {
        const T* w = weight + (half * inner + column) * depth;
        dots<Step, kRows>(
            x + row * stride, stride, w, depth, depth, columns, row == 0, products[half]);
      }
      for (int64_t r = 0; r < kRows; ++r) {
        Left* out = static_cast<Left*>(args.active) +
            (block.begin + row + r) * args.active_stride + column;
        for_lanes(columns, [&](int64_t i, int64_t lanes) {
          vf hidden[2] = {};
          for (int64_t half = 0; half < halves; ++half) {
            const T* b = bias ? bias + half * inner + column : nullptr;
            hidden[half] = round_to<T>(
                load_products(products[half] + r * kBlockColumns, b, i, lanes));
          }
          store_upto(out + i, round_to<T>(activate(args, hidden[0], hidden[1])), lanes);
        });
      }
    });
  }
}

// Columns [first, last) of `outputs` for a block's pairs.
template <typename T>
void outer_products(
    const ExpertsArgs& args, const ExpertBlock& block, int64_t first, int64_t last) {
  using Step = StepOf<T>;
  const int64_t pairs = block.end - block.begin, depth = args.inner, stride = args.active_stride;
  const auto* active =
      static_cast<const typename Step::Left*>(args.active) + block.begin * stride;
  const T* weight = static_cast<const T*>(args.down) + block.expert * args.hidden * depth;
  const T* bias = static_cast<const T*>(args.down_bias);
  if (bias) bias += block.expert * args.hidden;
  alignas(64) float products[kProducts];
  for (int64_t column = first; column < last; column += kBlockColumns) {
    const int64_t columns = last - column < kBlockColumns ? last - column : kBlockColumns;
    for_row_tiles(pairs, [&](auto tile, int64_t row) {
      constexpr int kRows = decltype(tile)::value;
      dots<Step, kRows>(
          active + row * stride, stride, weight + column * depth, depth, depth, columns, row == 0,
          products);
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t pair = args.pairs[block.begin + row + r];
        T* out = static_cast<T*>(args.outputs) + pair * args.hidden + column;
        store_products(products + r * kBlockColumns, bias ? bias + column : nullptr, columns, out);
      }
    });
  }
}

template <typename T>
void sum_slots(const ExpertsArgs& args) {
  const int64_t n = args.hidden;
  const int64_t grain = kLeastSum / (args.slots * n + 1) + 1;
  parallel_ranges(args.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* outputs = static_cast<const T*>(args.outputs) + token * args.slots * n;
      const int32_t* experts = args.experts + token * args.experts_stride;
      const float* weights = args.weights + token * args.weights_stride;
      T* out = static_cast<T*>(args.out) + token * n;
      for_lanes(n, [&](int64_t i, int64_t lanes) {
        vf total = {};
        for (int64_t slot = 0; slot < args.slots; ++slot) {
          if (experts[slot] < 0 || experts[slot] >= args.num_experts) continue;
          total += weights[slot] * load_upto(outputs + slot * n + i, lanes);
        }
        if (args.shared) {
          const T* shared = static_cast<const T*>(args.shared) + token * args.shared_stride;
          total += weights[args.slots] * load_upto(shared + i, lanes);
        }
        store_upto(out + i, total, lanes);
      });
    }
  });
}

}  // namespace

void run_experts(const ExpertsArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    using T = decltype(t);
    for_parts(args, args.inner, args.hidden, [&](const ExpertBlock& block, int64_t a, int64_t b) {
      inner_products<T>(args, block, a, b);
    });
    for_parts(args, args.hidden, args.inner, [&](const ExpertBlock& block, int64_t a, int64_t b) {
      outer_products<T>(args, block, a, b);
    });
    sum_slots<T>(args);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
