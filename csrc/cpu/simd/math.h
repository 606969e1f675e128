// SPDX-License-Identifier: Apache-2.0
// Elementary functions of float vectors, within about one unit in the last place.
#pragma once

#include <initializer_list>

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// e^x: x = n ln2 + r with |r| <= ln2 / 2, a degree-6 polynomial for e^r, and 2^n applied in two
// factors so that subnormal results and overflow come out right. NaN passes through.
inline vf exp(vf x) {
  const vf low = set1(-104.0f), high = set1(89.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const vf shift = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf shifted = fma(x, set1(1.44269504088896341f), shift);
  const vf n = shifted - shift;
  vf r = fma(n, set1(-0.693145751953125f), x);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const vi exponent = (vi)shifted - (vi)shift;
  const vi half = exponent >> 1;
  const vf scale_a = (vf)((half + 127) << 23);
  const vf scale_b = (vf)((exponent - half + 127) << 23);
  return p * scale_a * scale_b;
}

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|; log(1 + y) = 2 atanh(z) with
// z = y / (2 + y) <= 1/3, whose series ends below the last place after eight terms.
inline vf softplus(vf x) {
  const vf magnitude = x < 0.0f ? -x : x;
  const vf y = exp(-magnitude);
  const vf z = y / (y + 2.0f), square = z * z;
  vf p = set1(1.0f / 15.0f);
  for (const float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) {
    p = fma(p, square, set1(1.0f / odd));
  }
  return fma(z + z, p, max(x, vf{}));
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
// x / 2 (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): (1 + tanh(u)) / 2 = sigmoid(2u).
inline vf gelu_tanh(vf x) {
  const vf u = x * fma(x * x, set1(0.0713548162726f), set1(1.59576912160573f));
  return x / (1.0f + exp(-u));
}

inline vf swiglu(vf gate, vf up) { return silu(gate) * up; }
// `Kernels.clamped_swiglu`.
inline vf clamped_swiglu(vf gate, vf up, float alpha, float limit, float offset) {
  const vf high = set1(limit), low = set1(-limit);
  gate = gate > high ? high : gate;
  up = up > high ? high : up;
  up = up < low ? low : up;
  return gate * sigmoid(gate * alpha) * (up + offset);
}
// max(x, 0)^2. NaN passes through.
inline vf relu_squared(vf x) {
  x = x < 0.0f ? vf{} : x;
  return x * x;
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
