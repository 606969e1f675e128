// SPDX-License-Identifier: Apache-2.0
// Pieces of the gated delta rule (arXiv 2412.06464) shared by prefill and decode.
#pragma once

#include <math.h>

#include "../args.h"
#include "../simd/math.h"

namespace vllm_cpu {
namespace VLLM_ISA {

struct Gates {
  float g;  // log decay, <= 0
  float beta;
};

inline float param_at(const Param& param, int64_t i) {
  float value = 0;
  with_dtype(param.dtype, [&](auto t) {
    value = load1(static_cast<const decltype(t)*>(param.data) + i);
  });
  return value;
}

// Rate and offset of a value head's decay: g = -rate softplus(a + offset).
struct DecayParams {
  float rate;
  float offset;
};

inline DecayParams decay_params(const GdnArgs& args, int64_t head) {
  return {::expf(param_at(args.A_log, head)), param_at(args.dt_bias, head)};
}

inline float beta_of(const GdnArgs& args, float b) {
  return args.beta_scale / (1.0f + ::expf(-b));
}

template <typename T>
inline Gates gates(const GdnArgs& args, const DecayParams& decay, int64_t token, int64_t head) {
  const float a = load1(static_cast<const T*>(args.a) + token * args.a_stride + head);
  const float b = load1(static_cast<const T*>(args.b) + token * args.b_stride + head);
  const float x = a + decay.offset;
  const float softplus = x > 20.0f ? x : ::log1pf(::expf(x));
  return {-decay.rate * softplus, beta_of(args, b)};
}

// exp(g) of a head's key channels into `out`, `rate` as in `DecayParams`; returns beta.
template <typename T>
inline float channel_gates(
    const GdnArgs& args, float rate, int64_t token, int64_t head, float* out) {
  const T* a = static_cast<const T*>(args.a) + token * args.a_stride + head * args.k_dim;
  with_dtype(args.dt_bias.dtype, [&](auto t) {
    const auto* offset = static_cast<const decltype(t)*>(args.dt_bias.data) + head * args.k_dim;
    for_lanes(args.k_dim, [&](int64_t i, int64_t lanes) {
      const vf x = load_upto(a + i, lanes) + load_upto(offset + i, lanes);
      store(out + i, exp(softplus(x) * -rate));
    });
  });
  return beta_of(args, load1(static_cast<const T*>(args.b) + token * args.b_stride + head));
}

// x[0, padded) *= rsqrt(sum(x^2) + 1e-6) * scale; the padding is zero.
inline void l2_normalise(float* x, int64_t padded, float scale) {
  vf partial[4] = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vf v = load(x + i);
    vf& p = partial[i / kLanes % 4];
    p = fma(v, v, p);
  }
  const float square = sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
  const float inv = 1.0f / ::sqrtf(square + 1e-6f) * scale;
  for (int64_t i = 0; i < padded; i += kLanes) store(x + i, load(x + i) * inv);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
