// SPDX-License-Identifier: Apache-2.0
// Element types shared by the op entry points and the kernels.
#pragma once

#include <cstdint>

namespace vllm_cpu {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
// 8-bit float e4m3: no infinities, NaN is 0x7f and 0xff. Weights only; never a kernel's dtype.
struct fp8 {
  uint8_t bits;
};

enum class DType : int32_t { kF32, kBF16, kF16 };

// Calls f with a value of the element type, so that a lambda can be instantiated per dtype.
template <typename F>
inline void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(bf16{});
    case DType::kF16:
      return f(fp16{});
  }
}

}  // namespace vllm_cpu
