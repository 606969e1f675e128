// SPDX-License-Identifier: Apache-2.0
// What the launches share: limits of the device, errors as text, the launch itself.
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

// Of a launch. `cluster`: CTAs per cluster, 0: there are none; `overlap`: it may begin before the
// kernel before it in the stream has ended.
struct LaunchGrid {
  dim3 ctas;
  unsigned threads;
  size_t shared_bytes;
  void* stream;
  bool overlap = false;
  unsigned cluster = 0;
};

// Returns what went wrong, or null.
template <auto KERNEL, typename... Args>
const char* launch_kernel(const LaunchGrid& grid, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (grid.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 0) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  config.gridDim = grid.ctas;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(grid.stream);
  return describe(cudaLaunchKernelEx(&config, KERNEL, args...));
}

}  // namespace vllm_cuda
