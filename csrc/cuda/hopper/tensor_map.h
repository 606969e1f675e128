// SPDX-License-Identifier: Apache-2.0
// Maps of tensors in device memory, for boxes that the hardware addresses.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm_cuda {

// Matrices of bf16 with rows of 64 elements; rows and matrices lie so many elements apart.
struct Matrices {
  const void* data;
  int64_t rows, count, row_stride, stride;
};

// Boxes of 64 rows in `matrices` matrices, swizzled by 128 bytes; data and strides are multiples of
// 16 bytes. Returns what went wrong, or null. The driver's function is found at run time: nothing
// links to it.
inline const char* encode_map(CUtensorMap& map, const Matrices& from, int matrices) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<Encode>(usable ? found : nullptr);
  }();
  if (encode == nullptr) return "the driver has no tensor maps";
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t sizes[] = {64, static_cast<cuuint64_t>(from.rows),
                              static_cast<cuuint64_t>(from.count)};
  const cuuint64_t strides[] = {bytes(from.row_stride), bytes(from.stride)};
  const cuuint32_t box[] = {64, 64, static_cast<cuuint32_t>(matrices)}, steps[] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(from.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver rejects a tensor map";
}

}  // namespace vllm_cuda
