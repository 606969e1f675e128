// SPDX-License-Identifier: Apache-2.0
#include "stable.h"

#include <dlfcn.h>

#include <sstream>
#include <stdexcept>

namespace vllm_cuda {

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

bool is(const Tensor& tensor, ScalarType dtype, std::initializer_list<int64_t> sizes) {
  if (!tensor.is_cuda() || tensor.scalar_type() != dtype) return false;
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t d = 0;
  for (const int64_t size : sizes) {
    if (tensor.size(d++) != size) return false;
  }
  return true;
}

void throw_if(const char* op, const char* error) {
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: ") + op + ": " + error);
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
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

}  // namespace vllm_cuda
