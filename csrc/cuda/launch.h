// SPDX-License-Identifier: Apache-2.0
// What the launches share: limits of the device, errors as text.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace vllm_cuda {

constexpr int kMaxDevices = 64;
constexpr int kMaxSharedBytes = 227 * 1024;

inline const char* describe(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline cudaError_t multiprocessors(int device, int& count) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  count = known[device].load(std::memory_order_relaxed);
  if (count != 0) return cudaSuccess;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) known[device].store(count, std::memory_order_relaxed);
  return error;
}

// Lets a kernel have all the shared memory a CTA can have on `device`, once per device.
template <auto KERNEL>
cudaError_t allow_shared_memory(int device) {
  static std::array<std::atomic<bool>, kMaxDevices> allowed{};  // per kernel
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (allowed[device].load(std::memory_order_relaxed)) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error == cudaSuccess) allowed[device].store(true, std::memory_order_relaxed);
  return error;
}

}  // namespace vllm_cuda
