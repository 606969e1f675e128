// SPDX-License-Identifier: Apache-2.0
// Maps of tensors in device memory, for boxes that the hardware addresses.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace vllm_cuda {

// Matrices of bf16 with rows of 64 elements; rows and matrices lie so many elements apart.
struct Matrices {
  const void* data;
  int64_t rows, count, row_stride, stride;
};

using MapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's function or null, found at run time: nothing links to it.
inline MapEncoder map_encoder() {
  static const MapEncoder encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<MapEncoder>(usable ? found : nullptr);
  }();
  return encoder;
}

// Boxes of `rows` rows in `matrices` matrices, swizzled by 128 bytes; data and strides are multiples
// of 16 bytes. Returns what went wrong, or null.
inline const char* encode_map(CUtensorMap& map, const Matrices& from, int matrices,
                              int rows = 64) {
  const MapEncoder encode = map_encoder();
  if (encode == nullptr) return "the driver has no tensor maps";
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t sizes[] = {64, static_cast<cuuint64_t>(from.rows),
                              static_cast<cuuint64_t>(from.count)};
  const cuuint64_t strides[] = {bytes(from.row_stride), bytes(from.stride)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(matrices)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(from.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver rejects a tensor map";
}

// Boxes of 64 columns of 16 bits, swizzled by 128 bytes, of a tensor whose first dimension is
// dense; e4m3 counts as half as many columns.
template <int RANK>
inline const char* encode_boxes(CUtensorMap& map, const void* data, const cuuint64_t (&sizes)[RANK],
                         const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK]) {
  const MapEncoder encode = map_encoder();
  if (encode == nullptr) return "the driver has no tensor maps";
  cuuint32_t steps[RANK];
  std::fill(steps, steps + RANK, 1);
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, RANK, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver rejects a tensor map";
}

// A matrix of bf16; rows lie so many elements apart.
struct Matrix {
  const void* data;
  int64_t rows, columns, row_stride;
};

// At most 256 rows; swizzled by their length, of 16, 32 or 64 columns, or dense.
struct Box {
  int rows, columns;
  bool swizzled;
};

// Data, strides and rows of boxes are multiples of 16 bytes; what a box has beyond the matrix is
// read as zero and not written. Returns what went wrong, or null.
inline const char* encode_map(CUtensorMap& map, const Matrix& from, const Box& box) {
  const MapEncoder encode = map_encoder();
  if (encode == nullptr) return "the driver has no tensor maps";
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(from.columns),
                              static_cast<cuuint64_t>(from.rows)};
  const cuuint64_t stride = static_cast<cuuint64_t>(from.row_stride) * 2;
  const cuuint32_t extent[] = {static_cast<cuuint32_t>(box.columns),
                               static_cast<cuuint32_t>(box.rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapSwizzle swizzle = box.columns == 16   ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : box.columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result = encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(from.data), sizes, &stride,
      extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box.swizzled ? swizzle : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver rejects a tensor map";
}

}  // namespace vllm_cuda
