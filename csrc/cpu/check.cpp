// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <sstream>
#include <vector>

namespace vllm_cpu {

namespace {

using torch::headeronly::ScalarType;

void check_cpu(const Tensor& tensor, Arg arg) {
  if (!tensor.is_cpu()) reject(arg, tensor, "must be on the CPU");
}

void check_scalar(const Tensor& tensor, ScalarType type, const char* requirement, Arg arg) {
  check_cpu(tensor, arg);
  if (tensor.scalar_type() != type) reject(arg, tensor, requirement);
}

}  // namespace

void reject(Arg arg, const Tensor& tensor, const char* requirement) {
  std::ostringstream message;
  message << arg.op << ": " << arg.name << " " << requirement << ", got "
          << torch::headeronly::toString(tensor.scalar_type()) << " [";
  for (int64_t d = 0; d < tensor.dim(); ++d) message << (d ? ", " : "") << tensor.size(d);
  message << "] with strides [";
  for (int64_t d = 0; d < tensor.dim(); ++d) message << (d ? ", " : "") << tensor.stride(d);
  message << "]";
  throw std::runtime_error(message.str());
}

DType float_dtype(const Tensor& tensor, Arg arg) {
  check_cpu(tensor, arg);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    default:
      reject(arg, tensor, "must be float32, bfloat16 or float16");
  }
}

bool is_fp8(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float8_e4m3fn;
}

void check_dtype(const Tensor& tensor, DType dtype, Arg arg) {
  if (float_dtype(tensor, arg) != dtype) reject(arg, tensor, "must have the activations' dtype");
}
void check_int32(const Tensor& tensor, Arg arg) {
  check_scalar(tensor, ScalarType::Int, "must be int32", arg);
}
void check_int64(const Tensor& tensor, Arg arg) {
  check_scalar(tensor, ScalarType::Long, "must be int64", arg);
}
void check_uint8(const Tensor& tensor, Arg arg) {
  check_scalar(tensor, ScalarType::Byte, "must be uint8", arg);
}
void check_bool(const Tensor& tensor, Arg arg) {
  check_scalar(tensor, ScalarType::Bool, "must be bool", arg);
}

void check_shape(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg) {
  const int64_t dims = static_cast<int64_t>(sizes.size());
  bool fits = tensor.dim() == dims;
  int64_t d = 0;
  for (int64_t size : sizes) {
    fits = fits && (size < 0 || tensor.size(d) == size);
    ++d;
  }
  if (!fits) {
    std::ostringstream wanted;
    wanted << "must have shape [";
    d = 0;
    for (int64_t size : sizes) {
      wanted << (d++ ? ", " : "") << (size < 0 ? "any" : std::to_string(size));
    }
    wanted << "]";
    reject(arg, tensor, wanted.str().c_str());
  }
  int64_t dense = 1;
  for (d = dims - 1; d >= dims - inner; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != dense) {
      reject(arg, tensor, "must be dense in its inner dimensions");
    }
    dense *= tensor.size(d);
  }
}

float* floats_of(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg) {
  if (float_dtype(tensor, arg) != DType::kF32) reject(arg, tensor, "must be float32");
  check_shape(tensor, sizes, inner, arg);
  return static_cast<float*>(tensor.data_ptr());
}
int32_t* int32s_of(const Tensor& tensor, Sizes sizes, int64_t inner, Arg arg) {
  check_int32(tensor, arg);
  check_shape(tensor, sizes, inner, arg);
  return static_cast<int32_t*>(tensor.data_ptr());
}

Param param(const Tensor& tensor, int64_t n, Arg arg) {
  check_shape(tensor, {n}, 1, arg);
  return {tensor.data_ptr(), float_dtype(tensor, arg)};
}

Angles angles_of(const Tensor& cos_sin, int64_t width, Arg arg) {
  const float* data = floats_of(cos_sin, {-1, -1}, 1, arg);
  const int64_t rot = cos_sin.size(1);
  if (rot % 2 || rot > width) {
    reject(arg, cos_sin, "must have an even last dimension of at most what is rotated");
  }
  return {data, cos_sin.stride(0), rot};
}

Rows rows_of(const Tensor& tensor, Arg arg) {
  const int64_t dims = tensor.dim();
  if (dims < 1 || dims > 4) reject(arg, tensor, "must have one to four dimensions");
  if (tensor.stride(dims - 1) != 1 && tensor.size(dims - 1) != 1) {
    reject(arg, tensor, "must be contiguous in its last dimension");
  }
  Rows rows{tensor.data_ptr(), {1, 1, 1}, {0, 0, 0}};
  for (int64_t d = 0; d < dims - 1; ++d) {
    rows.sizes[4 - dims + d] = tensor.size(d);
    rows.strides[4 - dims + d] = tensor.stride(d);
  }
  return rows;
}

Tensor empty(Sizes sizes, const Tensor& like) {
  int64_t shape[4], strides[4];
  int64_t dims = 0, dense = 1;
  for (int64_t size : sizes) shape[dims++] = size;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = dense;
    dense *= shape[d];
  }
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor empty_dense(const Tensor& like) {
  switch (like.dim()) {
    case 1:
      return empty({like.size(0)}, like);
    case 2:
      return empty({like.size(0), like.size(1)}, like);
    case 3:
      return empty({like.size(0), like.size(1), like.size(2)}, like);
    default:
      return empty({like.size(0), like.size(1), like.size(2), like.size(3)}, like);
  }
}

const int32_t* int32_vector(const Tensor& tensor, int64_t n, Arg arg) {
  return int32s_of(tensor, {n}, 1, arg);
}
const int64_t* int64_vector(const Tensor& tensor, int64_t n, Arg arg) {
  check_int64(tensor, arg);
  check_shape(tensor, {n}, 1, arg);
  return static_cast<const int64_t*>(tensor.data_ptr());
}
const bool* bool_vector(const Tensor& tensor, int64_t n, Arg arg) {
  check_bool(tensor, arg);
  check_shape(tensor, {n}, 1, arg);
  return static_cast<const bool*>(tensor.data_ptr());
}

KvCache kv_cache_of(const Tensor& cache, DType dtype, Arg arg) {
  check_dtype(cache, dtype, arg);
  check_shape(cache, {-1, 2, -1, -1, -1}, 4, arg);
  return {static_cast<char*>(cache.data_ptr()), cache.size(0), cache.stride(0),
          cache.size(2), cache.size(3), cache.size(4)};
}

}  // namespace vllm_cpu
