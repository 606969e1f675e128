// SPDX-License-Identifier: Apache-2.0
// Pieces of RMS normalisation shared by the norms and the attention prologue.
#pragma once

#include <math.h>

#include "../args.h"
#include "../simd/vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// out[0, n) = the parameter as floats; zero up to the next multiple of kLanes.
inline void load_param(const Param& param, int64_t n, float* out) {
  with_dtype(param.dtype, [&](auto t) {
    const auto* data = static_cast<const decltype(t)*>(param.data);
    for_lanes(n, [&](int64_t i, int64_t lanes) { store(out + i, load_upto(data + i, lanes)); });
  });
}

inline void load_norm_weight(const Param& weight, bool one_plus, int64_t n, float* out) {
  load_param(weight, n, out);
  if (!one_plus) return;
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(out + i) + 1.0f);
}

// Copies x to row as floats (zero up to the next multiple of kLanes) and returns
// rsqrt(mean(x^2) + eps).
template <typename T>
inline float normaliser(const T* x, int64_t n, float eps, float* row) {
  vf partial[4] = {};
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    const vf v = load_upto(x + i, lanes);
    store(row + i, v);
    vf& p = partial[i / kLanes % 4];
    p = fma(v, v, p);
  });
  const float square = sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
  return 1.0f / ::sqrtf(square / static_cast<float>(n) + eps);
}

// The two roundings of the norm: see `Kernels.rms_norm`.
template <typename T>
inline vf scaled(vf normalised, vf weight, bool one_plus) {
  return (one_plus ? normalised : round_to<T>(normalised)) * weight;
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
