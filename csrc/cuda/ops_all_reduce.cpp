// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: memory that ranks share, and sums through it. A group is known by the
// address of its `PeerGroup`.
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "peer_tensors.h"

namespace vllm_cuda {

PeerGroup& peers_at(int64_t address) {
  if (address == 0) throw std::runtime_error("vllm_cuda: a group of peers that has been destroyed");
  return *reinterpret_cast<PeerGroup*>(address);
}

const PeerGroup& open_peers_at(int64_t address) {
  const PeerGroup& group = peers_at(address);
  for (int rank = 0; rank < group.peers.ranks; ++rank) {
    if (group.peers.inboxes[rank] == nullptr) {
      throw std::runtime_error("vllm_cuda: a sum before all peers are open");
    }
  }
  return group;
}

SumType sum_type(const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return SumType::kFloat;
    case ScalarType::Half:
      return SumType::kHalf;
    case ScalarType::BFloat16:
      return SumType::kBfloat16;
    default:
      reject(name, x, "be float32, float16 or bfloat16");
  }
}

int64_t bytes_of(const Tensor& x, SumType type) {
  return x.numel() * (type == SumType::kFloat ? 4 : 2);
}

namespace {

void check_rank(int64_t rank, int64_t ranks) {
  if (ranks < 2 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    throw std::runtime_error("vllm_cuda: peers are 2 to 8 ranks, each below their number");
  }
}

int64_t peers_create(int64_t device, int64_t rank, int64_t ranks, int64_t capacity,
                     int64_t push_bytes, int64_t timeout_ms, int64_t first) {
  check_rank(rank, ranks);
  if (capacity <= 0 || capacity % 16 != 0 || push_bytes < 0 || timeout_ms <= 0 || first <= 0 ||
      first > 0xffffffffll) {
    throw std::runtime_error("vllm_cuda: peers: an impossible capacity, timeout or first number");
  }
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  auto group = std::make_unique<PeerGroup>();
  std::memset(group.get(), 0, sizeof(PeerGroup));
  group->device = static_cast<int>(device);
  group->peers.rank = static_cast<int>(rank);
  group->peers.ranks = static_cast<int>(ranks);
  throw_if("memory for peers",
           create_peers(*group, capacity, push_bytes, static_cast<uint64_t>(timeout_ms) * 1000000,
                        static_cast<uint32_t>(first)));
  return reinterpret_cast<int64_t>(group.release());
}

void peers_export(int64_t address, Tensor handle) {
  PeerGroup& group = peers_at(address);
  if (handle.scalar_type() != ScalarType::Byte || handle.numel() != kPeerHandleBytes ||
      !handle.is_contiguous() || handle.is_cuda()) {
    reject("handle", handle, "be 64 bytes of the host");
  }
  const torch::stable::accelerator::DeviceGuard guard(group.device);
  throw_if("a handle of this rank's memory", export_peer(group, handle.data_ptr()));
}

void peers_open(int64_t address, int64_t rank, const Tensor& handle) {
  PeerGroup& group = peers_at(address);
  check_rank(rank, group.peers.ranks);
  const torch::stable::accelerator::DeviceGuard guard(group.device);
  throw_if("the memory of a peer", open_peer(group, static_cast<int>(rank), handle.data_ptr()));
}

// Ranks of one process share without handles.
void peers_join(int64_t address, int64_t rank, int64_t other) {
  PeerGroup& group = peers_at(address);
  check_rank(rank, group.peers.ranks);
  group.peers.inboxes[rank] = peers_at(other).memory;
}

void peers_destroy(int64_t address) {
  std::unique_ptr<PeerGroup> group(&peers_at(address));
  const torch::stable::accelerator::DeviceGuard guard(group->device);
  throw_if("giving back the memory of peers", destroy_peers(*group));
}

void check_message(const char* name, const Tensor& x, const Tensor& like) {
  if (!x.is_cuda() || x.dim() != 2 || !x.is_contiguous() || !aligned(x) ||
      x.scalar_type() != like.scalar_type() || x.size(0) != like.size(0) ||
      x.size(1) != like.size(1)) {
    reject(name, x, "be dense, 16-byte aligned, and of x's dtype and shape");
  }
}

void run(SumArgs args, const Tensor& x, int64_t address, bool overlap) {
  const PeerGroup& group = open_peers_at(address);
  const SumType type = sum_type("x", x);
  const int64_t bytes = bytes_of(x, type);
  if (bytes % 16 != 0 || bytes > group.peers.capacity || x.get_device_index() != group.device) {
    reject("x", x, "be of the peers' device and a multiple of 16 bytes within their capacity");
  }
  if (bytes == 0) return;
  args.x = x.data_ptr();
  args.rows = x.size(0);
  args.columns = x.size(1);
  const torch::stable::accelerator::DeviceGuard guard(group.device);
  throw_if("all-reduce",
           launch_sum(args, group.peers, type, overlap, current_stream(group.device)));
}

Tensor peers_sum(const Tensor& x, int64_t address, bool two_shot, bool overlap) {
  check_message("x", x, x);
  Tensor out = empty(x.size(0), x.size(1), x);
  SumArgs args{};
  args.out = out.data_ptr();
  args.two_shot = two_shot;
  run(args, x, address, overlap);
  return out;
}

std::tuple<Tensor, Tensor> peers_sum_add_norm(const Tensor& x, const Tensor& residual,
                                              const Tensor& norm, double eps, bool one_plus,
                                              int64_t address, bool two_shot, bool overlap) {
  check_message("x", x, x);
  check_message("residual", residual, x);
  if (!norm.is_cuda() || norm.dim() != 1 || norm.size(0) != x.size(1) || !norm.is_contiguous() ||
      !aligned(norm) || norm.scalar_type() != x.scalar_type()) {
    reject("norm", norm, "be dense, 16-byte aligned, of x's dtype, and as long as its rows");
  }
  if (x.size(1) % 8 != 0) reject("x", x, "have a multiple of 8 columns");
  Tensor out = empty(x.size(0), x.size(1), x), total = empty(x.size(0), x.size(1), x);
  SumArgs args{};
  args.residual = residual.data_ptr();
  args.norm = norm.data_ptr();
  args.out = out.data_ptr();
  args.total = total.data_ptr();
  args.eps = static_cast<float>(eps);
  args.one_plus = one_plus;
  args.two_shot = two_shot;
  run(args, x, address, overlap);
  return {out, total};
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "peers_create(int device, int rank, int ranks, int capacity, int push_bytes, int timeout_ms,"
      " int first) -> int");
  m.def("peers_export(int group, Tensor(a!) handle) -> ()");
  m.def("peers_open(int group, int rank, Tensor handle) -> ()");
  m.def("peers_join(int group, int rank, int other) -> ()");
  m.def("peers_destroy(int group) -> ()");
  m.def("peers_sum(Tensor x, int group, bool two_shot, bool overlap) -> Tensor");
  m.def(
      "peers_sum_add_norm(Tensor x, Tensor residual, Tensor norm, float eps, bool one_plus,"
      " int group, bool two_shot, bool overlap) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CompositeExplicitAutograd, m) {
  m.impl("peers_create", TORCH_BOX(&vllm_cuda::peers_create));
  m.impl("peers_export", TORCH_BOX(&vllm_cuda::peers_export));
  m.impl("peers_open", TORCH_BOX(&vllm_cuda::peers_open));
  m.impl("peers_join", TORCH_BOX(&vllm_cuda::peers_join));
  m.impl("peers_destroy", TORCH_BOX(&vllm_cuda::peers_destroy));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("peers_sum", TORCH_BOX(&vllm_cuda::peers_sum));
  m.impl("peers_sum_add_norm", TORCH_BOX(&vllm_cuda::peers_sum_add_norm));
}
