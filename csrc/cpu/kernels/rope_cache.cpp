// SPDX-License-Identifier: Apache-2.0
// Per-head norm, rotation and the paged cache write: everything before attention.
#include "../runtime.h"
#include "../table.h"
#include "norm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// Rotates the first `rot` floats of x: dim i pairs with i + rot / 2. `angles` holds rot / 2
// cosines, then rot / 2 sines.
void rotate(float* x, const float* angles, int64_t rot) {
  const int64_t half = rot / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf cos = load(angles + i), sin = load(angles + half + i);
    const vf first = load(x + i), second = load(x + half + i);
    store(x + i, fma(first, cos, -(second * sin)));
    store(x + half + i, fma(second, cos, first * sin));
  }
  for (; i < half; ++i) {
    const float cos = angles[i], sin = angles[half + i];
    const float first = x[i], second = x[half + i];
    x[i] = first * cos - second * sin;
    x[half + i] = second * cos + first * sin;
  }
}

// One head: norm with `weight` unless null, rotation, store as T.
template <typename T>
void head(
    const T* x, T* out, const float* weight, const float* angles, const RopeCacheArgs& args,
    float* row) {
  const int64_t n = args.cache.head_dim;
  if (weight) {
    const float inv = normaliser(x, n, args.eps, row);
    for (int64_t i = 0; i < n; i += kLanes) {
      const vf y = scaled<T>(load(row + i) * inv, load(weight + i), args.one_plus);
      store(row + i, round_to<T>(y));
    }
  } else {
    for_lanes(n, [&](int64_t i, int64_t lanes) { store(row + i, load_upto(x + i, lanes)); });
  }
  rotate(row, angles, args.angles.rot);
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_upto(out + i, load(row + i), lanes); });
}

template <typename T>
void tokens_range(const RopeCacheArgs& args, int64_t begin, int64_t end) {
  const KvCache& cache = args.cache;
  const int64_t n = cache.head_dim, padded = round_up(n, kLanes);
  float* row = scratch(Scratch::kKernel, 3 * padded);
  float* q_weight = args.q_weight.data ? row + padded : nullptr;
  float* k_weight = args.k_weight.data ? row + 2 * padded : nullptr;
  if (q_weight) load_norm_weight(args.q_weight, args.one_plus, n, q_weight);
  if (k_weight) load_norm_weight(args.k_weight, args.one_plus, n, k_weight);
  const int64_t q_width = args.gated ? 2 * n : n;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = args.slots[t];
    if (slot < 0) continue;
    const T* q = static_cast<const T*>(args.qkv) + t * args.qkv_stride;
    const T* k = q + args.heads * q_width;
    const T* v = k + cache.heads * n;
    const float* angles = args.angles.of(args.positions[t]);
    T* q_out = static_cast<T*>(args.q_out) + t * args.heads * n;
    for (int64_t h = 0; h < args.heads; ++h) {
      head(q + h * q_width, q_out + h * n, q_weight, angles, args, row);
    }
    T* k_out = reinterpret_cast<T*>(cache.data) + slot / cache.block_size * cache.block_stride +
        slot % cache.block_size * cache.heads * n;
    for (int64_t h = 0; h < cache.heads; ++h) {
      head(k + h * n, k_out + h * n, k_weight, angles, args, row);
    }
    __builtin_memcpy(k_out + cache.value_offset(), v, cache.heads * n * sizeof(T));
  }
}

}  // namespace

void qk_norm_rope_cache(const RopeCacheArgs& args) {
  const int64_t row = (args.heads + 2 * args.cache.heads) * args.cache.head_dim;
  with_dtype(args.dtype, [&](auto t) {
    parallel_ranges(args.tokens, 32768 / row + 1, [&](int64_t begin, int64_t end) {
      tokens_range<decltype(t)>(args, begin, end);
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
