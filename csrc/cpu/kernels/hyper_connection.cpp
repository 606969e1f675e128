// SPDX-License-Identifier: Apache-2.0
// Hyper-connections: see `vllm.kernels.hyper_connection.naive`. A token is one thread's.
#include <math.h>

#include "../runtime.h"
#include "../simd/dot.h"
#include "../table.h"
#include "norm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// Multiply-adds that are worth a thread.
constexpr int64_t kLeastWork = 65536;

float sigmoid_of(float x) { return 1.0f / (1.0f + ::expf(-x)); }

// Divides each of n runs of n elements, `run` apart and `step` from one to the next, by its sum.
void divide_by_sums(float* mix, int64_t n, int64_t run, int64_t step, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float total = 0;
    for (int64_t j = 0; j < n; ++j) total += mix[i * run + j * step];
    for (int64_t j = 0; j < n; ++j) mix[i * run + j * step] /= total + eps;
  }
}

// The mixing matrix from its logits, in place.
void mix_of(float* mix, int64_t n, float eps, int64_t iterations) {
  for (int64_t row = 0; row < n; ++row) {
    float* logits = mix + row * n;
    float largest = logits[0], total = 0;
    for (int64_t i = 1; i < n; ++i) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < n; ++i) total += logits[i] = ::expf(logits[i] - largest);
    for (int64_t i = 0; i < n; ++i) logits[i] = logits[i] / total + eps;
  }
  divide_by_sums(mix, n, 1, n, eps);
  for (int64_t i = 1; i < iterations; ++i) {
    divide_by_sums(mix, n, n, 1, eps);
    divide_by_sums(mix, n, 1, n, eps);
  }
}

template <typename T>
void read_token(const ReadStreamsArgs& args, int64_t token, float* row, float* products) {
  const int64_t n = args.streams.count, hidden = args.streams.hidden, width = n * hidden;
  const int64_t outputs = args.mix ? (2 + n) * n : n;
  const T* streams = static_cast<const T*>(args.streams.data) + token * width;
  const float inverse = normaliser(streams, width, args.norm_eps, row);
  for (int64_t first = 0; first < outputs; first += kBlockColumns) {
    const int64_t columns = outputs - first < kBlockColumns ? outputs - first : kBlockColumns;
    const float* weight = args.weight + first * width;
    dots<Widen<float>, 1>(row, width, weight, width, width, columns, false, products + first);
  }
  for (int64_t i = 0; i < outputs; ++i) {
    const int64_t part = i < 2 * n ? i / n : 2;
    products[i] = products[i] * inverse * args.scale[part] + args.base[i];
  }
  for (int64_t i = 0; i < n; ++i) products[i] = sigmoid_of(products[i]) + args.eps;
  T* out = static_cast<T*>(args.out) + token * hidden;
  for_lanes(hidden, [&](int64_t i, int64_t lanes) {
    vf total = {};
    for (int64_t s = 0; s < n; ++s) {
      total += products[s] * load_upto(streams + s * hidden + i, lanes);
    }
    store_upto(out + i, total, lanes);
  });
  if (!args.mix) return;
  for (int64_t i = 0; i < n; ++i) args.post[token * n + i] = 2 * sigmoid_of(products[n + i]);
  float* mix = args.mix + token * n * n;
  for (int64_t i = 0; i < n * n; ++i) mix[i] = products[2 * n + i];
  mix_of(mix, n, args.eps, args.iterations);
}

template <typename T>
void join_token(const JoinStreamsArgs& args, int64_t token) {
  const int64_t n = args.streams.count, hidden = args.streams.hidden;
  const T* streams = static_cast<const T*>(args.streams.data) + token * n * hidden;
  const T* branch = static_cast<const T*>(args.branch) + token * args.branch_stride;
  const float* post = args.post + token * n;
  const float* mix = args.mix + token * n * n;
  T* out = static_cast<T*>(args.out) + token * n * hidden;
  for_lanes(hidden, [&](int64_t i, int64_t lanes) {
    const vf result = load_upto(branch + i, lanes);
    for (int64_t k = 0; k < n; ++k) {
      vf total = post[k] * result;
      for (int64_t j = 0; j < n; ++j) {
        total += mix[j * n + k] * load_upto(streams + j * hidden + i, lanes);
      }
      store_upto(out + k * hidden + i, total, lanes);
    }
  });
}

}  // namespace

void read_streams(const ReadStreamsArgs& args) {
  const int64_t n = args.streams.count, outputs = args.mix ? (2 + n) * n : n;
  const int64_t width = n * args.streams.hidden;
  with_dtype(args.streams.dtype, [&](auto t) {
    parallel_ranges(args.streams.tokens, kLeastWork / (outputs * width + 1) + 1,
        [&](int64_t begin, int64_t end) {
          float* row = scratch(Scratch::kKernel, round_up(width, kLanes) + outputs + kProducts);
          float* products = row + round_up(width, kLanes);
          for (int64_t token = begin; token < end; ++token) {
            read_token<decltype(t)>(args, token, row, products);
          }
        });
  });
}

void join_streams(const JoinStreamsArgs& args) {
  const Streams& streams = args.streams;
  const int64_t work = streams.count * (streams.count + 1) * streams.hidden;
  with_dtype(streams.dtype, [&](auto t) {
    parallel_ranges(streams.tokens, kLeastWork / (work + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) join_token<decltype(t)>(args, token);
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
