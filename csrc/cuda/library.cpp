// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda over torch's stable ABI. The library loads on any build of torch, whether or
// not it has CUDA, so CUDA's own part of torch is looked up when an op first runs.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "skinny.h"

namespace vllm_cuda {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

void* current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    // torch loads its libraries privately: the symbol is found through the library only.
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (symbol == nullptr) throw std::runtime_error("vllm_cuda: this torch is built without CUDA");
    return reinterpret_cast<Getter>(symbol);
  }();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

[[noreturn]] void reject(const char* name, const Tensor& tensor, const std::string& requirement) {
  std::ostringstream message;
  message << "vllm_cuda: " << name << " must " << requirement << ", got "
          << torch::headeronly::toString(tensor.scalar_type()) << " [";
  for (int64_t d = 0; d < tensor.dim(); ++d) message << (d ? ", " : "") << tensor.size(d);
  message << "] with strides [";
  for (int64_t d = 0; d < tensor.dim(); ++d) message << (d ? ", " : "") << tensor.stride(d);
  message << "]" << (tensor.is_cuda() ? "" : ", not on a CUDA device");
  throw std::runtime_error(message.str());
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

void check_arguments(const Tensor& x, const Tensor& weight, const OptTensor& bias, bool gated) {
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    reject("x", x, "be bfloat16 or float16");
  }
  if (!x.is_cuda() || x.dim() != 2 || x.size(0) > kMaxTokens || x.stride(1) != 1 ||
      x.stride(0) % 8 != 0 || !aligned(x)) {
    reject("x", x, "be at most 16 rows of 16-byte aligned elements");
  }
  if (!weight.is_cuda() || weight.dim() != 2 || weight.scalar_type() != dtype ||
      !weight.is_contiguous() || !aligned(weight) || weight.size(1) != x.size(1) ||
      weight.size(1) % 32 != 0 || weight.size(1) == 0 || weight.size(0) >= 1 << 30) {
    reject("weight", weight, "be dense [n, k] of x's dtype with k a multiple of 32");
  }
  if (gated && weight.size(0) % 2 != 0) reject("weight", weight, "have an even number of rows");
  if (bias && (!bias->is_cuda() || bias->dim() != 1 || bias->scalar_type() != dtype ||
               bias->size(0) != weight.size(0) || bias->stride(0) != 1)) {
    reject("bias", *bias, "be dense [n] of x's dtype");
  }
}

Tensor empty(int64_t rows, int64_t columns, const Tensor& like) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      2, sizes, strides, dtype, aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

struct Choice {
  bool gated, overlap;
  int64_t variant, ring_bytes, ctas_per_sm;
};

Tensor run(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Choice& choice) {
  check_arguments(x, weight, bias, choice.gated);
  if (choice.ring_bytes < 0 || choice.ring_bytes > 1 << 20 || choice.ctas_per_sm < 1 ||
      choice.ctas_per_sm > 32) {
    throw std::runtime_error("vllm_cuda: skinny matmul: an impossible ring or grid");
  }
  const int64_t n = weight.size(0);
  Tensor out = empty(x.size(0), choice.gated ? n / 2 : n, x);
  if (x.size(0) == 0 || n == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  SkinnyArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.x_stride = x.stride(0);
  args.m = static_cast<int>(x.size(0));
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(weight.size(1));
  args.ring_bytes = static_cast<int>(choice.ring_bytes);
  SkinnyLaunch launch{};
  launch.half = x.scalar_type() == ScalarType::Half;
  launch.gated = choice.gated;
  launch.overlap = choice.overlap;
  launch.variant = static_cast<int>(choice.variant);
  launch.ctas_per_sm = static_cast<int>(choice.ctas_per_sm);
  launch.device = device;
  launch.stream = current_stream(device);
  const char* error = launch_skinny(args, launch);
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: skinny matmul: ") + error);
  return out;
}

Tensor skinny_linear(
    const Tensor& x, const Tensor& weight, OptTensor bias, bool overlap, int64_t variant,
    int64_t ring_bytes, int64_t ctas_per_sm) {
  return run(x, weight, bias, {false, overlap, variant, ring_bytes, ctas_per_sm});
}

Tensor skinny_linear_silu_and_mul(
    const Tensor& x, const Tensor& weight, OptTensor bias, bool overlap, int64_t variant,
    int64_t ring_bytes, int64_t ctas_per_sm) {
  return run(x, weight, bias, {true, overlap, variant, ring_bytes, ctas_per_sm});
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY(vllm_cuda, m) {
  m.def(
      "skinny_linear(Tensor x, Tensor weight, Tensor? bias, bool overlap, int variant,"
      " int ring_bytes, int ctas_per_sm) -> Tensor");
  m.def(
      "skinny_linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias, bool overlap, int variant,"
      " int ring_bytes, int ctas_per_sm) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("skinny_linear", TORCH_BOX(&vllm_cuda::skinny_linear));
  m.impl("skinny_linear_silu_and_mul", TORCH_BOX(&vllm_cuda::skinny_linear_silu_and_mul));
}
