// SPDX-License-Identifier: Apache-2.0
// A vector of floats in the widest registers of the instruction set being compiled for.
//
// Built on the vector extensions of GCC and Clang; intrinsics only where the extensions cannot
// say it (fused multiply-add, half conversion). Contraction is off in the build, so that a
// multiply-add is fused exactly where the source says so and every tile shape of a kernel
// rounds alike.
#pragma once

#include <cstdint>

#include "../types.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef VLLM_ISA
#error "VLLM_ISA names the namespace of this instruction set's kernels"
#endif

namespace vllm_cpu {
namespace VLLM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

inline vf set1(float x) { return x - vf{}; }
inline vi set1(int32_t x) { return x - vi{}; }

inline vi iota() {
  vi v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// a * b + c, rounded once where the hardware can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline vf to_float(vh h, bf16) { return (vf)(__builtin_convertvector(h, vu) << 16); }

inline vh from_float(vf v, bf16) {
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu quiet_nan = (u >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, vh);
}

#if defined(__AVX512F__)
inline vf to_float(vh h, fp16) { return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
inline vh from_float(vf v, fp16) { return (vh)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0); }
#elif defined(__AVX2__)
inline vf to_float(vh h, fp16) { return (vf)_mm256_cvtph_ps((__m128i)h); }
inline vh from_float(vf v, fp16) { return (vh)_mm256_cvtps_ph((__m256)v, 0); }
#else
// Scaling by 2^112 maps the half's exponent onto the float's, subnormals included.
inline vf to_float(vh h, fp16) {
  const vu u = __builtin_convertvector(h, vu);
  const vu magnitude = (u & 0x7fffu) << 13;
  const vf scaled = (vf)magnitude * 0x1p112f;
  const vu special = magnitude | 0x7f800000u;
  const vu value = (u & 0x7c00u) == 0x7c00u ? special : (vu)scaled;
  return (vf)(value | ((u & 0x8000u) << 16));
}
// Adding a power of two whose last place is the half's last place makes the float adder round.
inline vh from_float(vf v, fp16) {
  const vu u = (vu)v;
  const vu sign = u & 0x80000000u;
  const vu abs = u ^ sign;
  const vu subnormal = (vu)((vf)abs + 0.5f) - 0x3f000000u;
  const vu normal = (abs - 0x38000000u + 0xfffu + ((abs >> 13) & 1u)) >> 13;
  const vu finite = abs < 0x38800000u ? subnormal : normal;
  const vu special = abs > 0x7f800000u ? (vu{} + 0x7e00u) : (vu{} + 0x7c00u);
  const vu half = abs >= 0x477ff000u ? special : finite;
  return __builtin_convertvector(half | (sign >> 16), vh);
}
#endif

// Scaling by 2^120 maps the 4-bit exponent onto the float's, subnormals included.
inline vf to_float(vb b, fp8) {
  const vu u = __builtin_convertvector(b, vu);
  const vu magnitude = (u & 0x7fu) << 20;
  const vu scaled = (vu)((vf)magnitude * 0x1p120f);
  const vu value = magnitude == 0x07f00000u ? (vu{} + 0x7fc00000u) : scaled;
  return (vf)(value | ((u & 0x80u) << 24));
}

inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
inline vf load(const T* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return to_float(h, T{});
}
inline vf load(const fp8* p) {
  vb b;
  __builtin_memcpy(&b, p, sizeof b);
  return to_float(b, fp8{});
}
inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
template <typename T>
inline void store(T* p, vf v) {
  const vh h = from_float(v, T{});
  __builtin_memcpy(p, &h, sizeof h);
}

// The first n < kLanes elements; the other lanes are zero.
template <typename T>
inline vf load_n(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <typename T>
inline void store_n(T* p, vf v, int64_t n) {
  T buffer[kLanes];
  store(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

inline float load1(const float* p) { return *p; }
template <typename T>
inline float load1(const T* p) {
  return load_n(p, 1)[0];
}

// v as it reads back after being stored as T.
template <typename T>
inline vf round_to(vf v) {
  return to_float(from_float(v, T{}), T{});
}
template <>
inline vf round_to<float>(vf v) {
  return v;
}

// Calls f(i, lanes) over [0, n) in steps of kLanes; the last step may have fewer lanes.
template <typename F>
inline void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, static_cast<int64_t>(kLanes));
  if (i < n) f(i, n - i);
}
template <typename T>
inline vf load_upto(const T* p, int64_t lanes) {
  return lanes == kLanes ? load(p) : load_n(p, lanes);
}
template <typename T>
inline void store_upto(T* p, vf v, int64_t lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store_n(p, v, lanes);
  }
}

// Reductions halve the vector, so their order is fixed by the lane count alone.
template <int Lanes>
struct Floats {
  typedef float type __attribute__((vector_size(4 * Lanes)));
};
template <int Lanes, typename F>
inline float halve(const float* lane, const F& f) {
  typename Floats<Lanes / 2>::type low, high;
  __builtin_memcpy(&low, lane, sizeof low);
  __builtin_memcpy(&high, lane + Lanes / 2, sizeof high);
  low = f(low, high);
  if constexpr (Lanes > 4) {
    return halve<Lanes / 2>(reinterpret_cast<const float*>(&low), f);
  } else {
    return f(set1(low[0]), set1(low[1]))[0];
  }
}
inline float sum(vf v) {
  return halve<kLanes>(reinterpret_cast<const float*>(&v), [](auto a, auto b) { return a + b; });
}
inline float max(vf v) {
  return halve<kLanes>(
      reinterpret_cast<const float*>(&v), [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
