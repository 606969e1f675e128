// SPDX-License-Identifier: Apache-2.0
// Validation of op arguments, and the plain views the kernels take.
#pragma once

#include <initializer_list>
#include <optional>

#include "args.h"
#include "stable.h"

namespace vllm_cpu {

using torch::stable::Tensor;
using Sizes = std::initializer_list<int64_t>;

// A named argument of a named op, for messages.
struct Arg {
  const char* op;
  const char* name;
};

// Throws "op: name must ..., got dtype[sizes] strides[...]".
[[noreturn]] void reject(Arg arg, const Tensor& tensor, const char* requirement);

DType float_dtype(const Tensor& tensor, Arg arg);
bool is_fp8(const Tensor& tensor);
void check_dtype(const Tensor& tensor, DType dtype, Arg arg);
void check_int32(const Tensor& tensor, Arg arg);
void check_int64(const Tensor& tensor, Arg arg);
void check_bool(const Tensor& tensor, Arg arg);
void check_uint8(const Tensor& tensor, Arg arg);

// Exact sizes, -1 for any; with `inner` the last `inner` dimensions must be dense.
void check_shape(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg);

// Elements of exact sizes, as `check_shape` has them.
float* floats_of(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg);
int32_t* int32s_of(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg);

// A dense 1-d parameter of `n` elements in fp32 or the model's dtype.
Param param(const Tensor& tensor, int64_t n, Arg arg);

// cos_sin [positions, rot], for rows of at least as many elements.
Angles angles_of(const Tensor& cos_sin, int64_t width, Arg arg);

// The leading dimensions of x as rows; the last dimension must be contiguous.
Rows rows_of(const Tensor& tensor, Arg arg);

Tensor empty(Sizes sizes, const Tensor& like);
Tensor empty_dense(const Tensor& like);

const int32_t* int32_vector(const Tensor& tensor, int64_t n, Arg arg);
const int64_t* int64_vector(const Tensor& tensor, int64_t n, Arg arg);
const bool* bool_vector(const Tensor& tensor, int64_t n, Arg arg);

KvCache kv_cache_of(const Tensor& cache, DType dtype, Arg arg);

}  // namespace vllm_cpu
