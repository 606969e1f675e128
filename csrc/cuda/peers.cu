// SPDX-License-Identifier: Apache-2.0
// Allocation and mapping of the memory that ranks share.
#include "peers.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "launch.h"

namespace vllm_cuda {

static_assert(sizeof(cudaIpcMemHandle_t) == kPeerHandleBytes);

const char* create_peers(PeerGroup& group, int64_t capacity, int64_t push_bytes,
                         uint64_t timeout_ns, uint32_t first) {
  Peers& peers = group.peers;
  peers.capacity = capacity;
  peers.push_bytes = push_bytes;
  peers.timeout_ns = timeout_ns;
  const size_t inbox = static_cast<size_t>(capacity) * 2 * 2 * peers.ranks;
  const std::vector<uint32_t> counts(kMaxPeerBlocks, first);
  const size_t bytes = counts.size() * sizeof(uint32_t);
  static_assert(kMaxPeerBlocks * sizeof(uint32_t) % 256 == 0 && kPushFlagBytes % 256 == 0);
  peers.push_offset = static_cast<int64_t>((inbox + 255) / 256 * 256 + bytes);
  const size_t pushed = kPushFlagBytes + static_cast<size_t>(push_bytes);
  cudaError_t error =
      cudaMalloc(reinterpret_cast<void**>(&group.memory), peers.push_offset + pushed);
  if (error != cudaSuccess) return describe(error);
  peers.inboxes[peers.rank] = group.memory;
  peers.counts = reinterpret_cast<uint32_t*>(group.memory + peers.push_offset - bytes);
  error = cudaMemset(group.memory, 0, peers.push_offset + kPushFlagBytes);
  if (error == cudaSuccess) {
    error = cudaMemcpy(peers.counts, counts.data(), bytes, cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return describe(error);
}

const char* export_peer(PeerGroup& group, void* handle) {
  cudaIpcMemHandle_t made;
  const cudaError_t error = cudaIpcGetMemHandle(&made, group.memory);
  if (error != cudaSuccess) return describe(error);
  std::memcpy(handle, &made, sizeof made);
  group.exported = true;
  return nullptr;
}

const char* open_peer(PeerGroup& group, int rank, const void* handle) {
  cudaIpcMemHandle_t theirs;
  std::memcpy(&theirs, handle, sizeof theirs);
  void* address = nullptr;
  const cudaError_t error =
      cudaIpcOpenMemHandle(&address, theirs, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is reported here, not by the next launch
    return describe(error);
  }
  group.peers.inboxes[rank] = static_cast<uint8_t*>(address);
  group.opened[rank] = true;
  return nullptr;
}

const char* destroy_peers(PeerGroup& group) {
  cudaError_t first = cudaSuccess;
  for (int rank = 0; rank < group.peers.ranks; ++rank) {
    if (!group.opened[rank]) continue;
    const cudaError_t error = cudaIpcCloseMemHandle(group.peers.inboxes[rank]);
    if (first == cudaSuccess) first = error;
  }
  // Memory that others have mapped must outlive their mappings: it goes with the process.
  if (!group.exported && group.memory != nullptr) {
    const cudaError_t error = cudaFree(group.memory);
    if (first == cudaSuccess) first = error;
  }
  return describe(first);
}

}  // namespace vllm_cuda
