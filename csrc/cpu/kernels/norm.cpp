// SPDX-License-Identifier: Apache-2.0
#include "norm.h"

#include "../runtime.h"
#include "../simd/math.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// Elements one thread should at least be given: some ten microseconds of work, several times the
// cost of waking it.
constexpr int64_t kGrain = 65536;

int64_t row_grain(int64_t n) { return kGrain / n + 1; }

template <typename T>
void rms_norm_rows(const RmsNormArgs& args) {
  const int64_t n = args.n;
  parallel_ranges(args.x.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    float* weight = scratch(Scratch::kKernel, 2 * round_up(n, kLanes));
    float* row = weight + round_up(n, kLanes);
    load_norm_weight(args.weight, args.one_plus, n, weight);
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(args.x.data) + args.x.offset(r);
      if (args.residual) {
        const T* residual = static_cast<const T*>(args.residual) + r * args.residual_stride;
        T* total = static_cast<T*>(args.sum) + r * n;
        for_lanes(n, [&](int64_t i, int64_t lanes) {
          store_upto(total + i, load_upto(x + i, lanes) + load_upto(residual + i, lanes), lanes);
        });
        x = total;
      }
      const float inv = normaliser(x, n, args.eps, row);
      T* out = static_cast<T*>(args.out) + r * n;
      for_lanes(n, [&](int64_t i, int64_t lanes) {
        store_upto(out + i, scaled<T>(load(row + i) * inv, load(weight + i), args.one_plus), lanes);
      });
    }
  });
}

template <typename T>
void gated_rms_norm_rows(const GatedArgs& args) {
  const int64_t n = args.n;
  const bool rounds = args.weight.dtype == args.dtype;
  parallel_ranges(args.x.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    float* weight = scratch(Scratch::kKernel, 2 * round_up(n, kLanes));
    float* row = weight + round_up(n, kLanes);
    load_norm_weight(args.weight, false, n, weight);
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(args.x.data) + args.x.offset(r);
      const T* gate = static_cast<const T*>(args.gate.data) + args.gate.offset(r);
      const float inv = normaliser(x, n, args.eps, row);
      T* out = static_cast<T*>(args.out) + r * n;
      for_lanes(n, [&](int64_t i, int64_t lanes) {
        vf y = round_to<T>(load(row + i) * inv) * load(weight + i);
        if (rounds) y = round_to<T>(y);
        store_upto(out + i, y * silu(load_upto(gate + i, lanes)), lanes);
      });
    }
  });
}

template <typename T>
void mul_sigmoid_rows(const GatedArgs& args) {
  parallel_ranges(args.x.count(), row_grain(args.n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(args.x.data) + args.x.offset(r);
      const T* gate = static_cast<const T*>(args.gate.data) + args.gate.offset(r);
      T* out = static_cast<T*>(args.out) + r * args.n;
      for_lanes(args.n, [&](int64_t i, int64_t lanes) {
        const vf y = load_upto(x + i, lanes) * sigmoid(load_upto(gate + i, lanes));
        store_upto(out + i, y, lanes);
      });
    }
  });
}

// `activation(gate, up)` of vectors.
template <typename T, typename Activation>
void activate_rows(const GateUpArgs& args, Activation activation) {
  parallel_ranges(args.tokens, row_grain(args.n), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* gate = static_cast<const T*>(args.gate_up) + t * args.stride;
      const T* up = gate + args.n;
      T* out = static_cast<T*>(args.out) + t * args.n;
      for_lanes(args.n, [&](int64_t i, int64_t lanes) {
        const vf y = activation(load_upto(gate + i, lanes), load_upto(up + i, lanes));
        store_upto(out + i, y, lanes);
      });
    }
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  with_dtype(args.dtype, [&](auto t) { rms_norm_rows<decltype(t)>(args); });
}

void gated_rms_norm(const GatedArgs& args) {
  with_dtype(args.dtype, [&](auto t) { gated_rms_norm_rows<decltype(t)>(args); });
}

void mul_sigmoid(const GatedArgs& args) {
  with_dtype(args.dtype, [&](auto t) { mul_sigmoid_rows<decltype(t)>(args); });
}

void silu_and_mul(const GateUpArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    activate_rows<decltype(t)>(args, [](vf gate, vf up) { return swiglu(gate, up); });
  });
}

void gelu_tanh_and_mul(const GateUpArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    activate_rows<decltype(t)>(args, [](vf gate, vf up) { return gelu_tanh(gate) * up; });
  });
}

void clamped_swiglu(const GateUpArgs& args) {
  const float alpha = args.alpha, limit = args.limit, offset = args.offset;
  with_dtype(args.dtype, [&](auto t) {
    activate_rows<decltype(t)>(
        args, [=](vf gate, vf up) { return clamped_swiglu(gate, up, alpha, limit, offset); });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
