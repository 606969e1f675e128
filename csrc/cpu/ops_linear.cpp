// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

Tensor skinny_linear(const Tensor& x, const Tensor& weight, OptTensor bias) {
  constexpr const char* op = "skinny_linear";
  check_shape(x, {-1, -1}, 1, {op, "x"});
  SkinnyLinearArgs args;
  args.dtype = float_dtype(x, {op, "x"});
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  args.rows = x.size(0);
  args.depth = x.size(1);
  args.fp8_weight = is_fp8(weight);
  if (!args.fp8_weight) check_dtype(weight, args.dtype, {op, "weight"});
  if (args.fp8_weight && args.dtype != DType::kF32) {
    reject({op, "x"}, x, "must be float32 with a float8 weight");
  }
  check_shape(weight, {-1, args.depth}, 1, {op, "weight"});
  args.weight = weight.data_ptr();
  args.weight_stride = weight.stride(0);
  args.outputs = weight.size(0);
  args.bias = nullptr;
  if (bias) {
    check_dtype(*bias, args.dtype, {op, "bias"});
    args.bias = param(*bias, args.outputs, {op, "bias"}).data;
  }
  Tensor out = empty({args.rows, args.outputs}, x);
  args.out = out.data_ptr();
  kernels().skinny_linear(args);
  return out;
}

}  // namespace vllm_cpu
