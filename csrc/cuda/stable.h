// SPDX-License-Identifier: Apache-2.0
// What the ops of torch.ops.vllm_cuda share: argument errors, the current stream, new tensors. The
// library loads on any build of torch, whether or not it has CUDA, so CUDA's own part of torch is
// looked up when an op first runs.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace vllm_cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

// torch's current stream of the device.
void* current_stream(int32_t device);

// Throws "NAME must REQUIREMENT, got ..." with the tensor's dtype, sizes and strides.
[[noreturn]] void reject(const char* name, const Tensor& tensor, const std::string& requirement);

inline void need(bool good, const char* name, const Tensor& tensor, const char* requirement) {
  if (!good) reject(name, tensor, requirement);
}

// Whether the tensor is on a CUDA device and has this dtype and these sizes.
bool is(const Tensor& tensor, ScalarType dtype, std::initializer_list<int64_t> sizes);

// Throws std::runtime_error "vllm_cuda: OP: ERROR" unless the error is null.
void throw_if(const char* op, const char* error);

// Whether the data begins at a multiple of 16 bytes.
bool aligned(const Tensor& tensor);

// An uninitialised dense [rows, columns] of `like`'s dtype and device.
Tensor empty(int64_t rows, int64_t columns, const Tensor& like);

}  // namespace vllm_cuda
