// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the steps of large sums of two ranks. See pushes.h.
#include <stdexcept>

#include "peer_tensors.h"
#include "pushes.h"

namespace vllm_cuda {

namespace {

using torch::stable::accelerator::DeviceGuard;

void check_run(const Peers& peers, int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset % 16 != 0 || offset + bytes > peers.push_bytes) {
    throw std::runtime_error("vllm_cuda: a run of bytes that peers have no memory for");
  }
}

void check_flag(int64_t flag) {
  if (flag < 0 || flag >= kPushFlags) throw std::runtime_error("vllm_cuda: peers have no such flag");
}

SumType check_rows(const char* name, const Tensor& rows, int64_t device) {
  if (!rows.is_cuda() || !rows.is_contiguous() || !aligned(rows) ||
      rows.get_device_index() != device) {
    reject(name, rows, "be dense, 16-byte aligned and on the peers' device");
  }
  const SumType type = sum_type(name, rows);
  if (bytes_of(rows, type) % 16 != 0) reject(name, rows, "be a multiple of 16 bytes");
  return type;
}

int64_t peers_address(int64_t address) {
  const PeerGroup& group = peers_at(address);
  return reinterpret_cast<int64_t>(group.memory + group.peers.push_offset + kPushFlagBytes);
}

void peers_push(const Tensor& rows, int64_t address, int64_t receiver, int64_t offset) {
  const PeerGroup& group = open_peers_at(address);
  const int64_t bytes = bytes_of(rows, check_rows("rows", rows, group.device));
  check_run(group.peers, offset, bytes);
  if (receiver < 0 || receiver >= group.peers.ranks || receiver == group.peers.rank) {
    throw std::runtime_error("vllm_cuda: rows are pushed to another rank of the group");
  }
  const DeviceGuard guard(group.device);
  throw_if("a push", push_rows(group.peers, static_cast<int>(receiver), offset, rows.data_ptr(),
                               bytes, current_stream(group.device)));
}

void peers_signal(int64_t address, int64_t flag, int64_t value) {
  const PeerGroup& group = open_peers_at(address);
  check_flag(flag);
  const DeviceGuard guard(group.device);
  throw_if("a flag",
           signal_peers(group.peers, static_cast<int>(flag), static_cast<uint32_t>(value),
                        current_stream(group.device)));
}

void peers_await(int64_t address, int64_t flag, int64_t value) {
  const PeerGroup& group = open_peers_at(address);
  check_flag(flag);
  const DeviceGuard guard(group.device);
  throw_if("a wait for peers",
           await_peers(group.peers, static_cast<int>(flag), static_cast<uint32_t>(value),
                       current_stream(group.device)));
}

void pair_norm(const Tensor& own, const Tensor& other, const Tensor& residual,
               const Tensor& norm, double eps, bool one_plus, Tensor out, Tensor total) {
  const int device = own.get_device_index();
  const SumType type = check_rows("own", own, device);
  if (own.dim() != 2 || own.size(1) % 8 != 0) {
    reject("own", own, "have two dims and a multiple of 8 columns");
  }
  const auto check_like = [&](const char* name, const Tensor& tensor) {
    if (check_rows(name, tensor, device) != type || tensor.dim() != 2 ||
        tensor.size(0) != own.size(0) || tensor.size(1) != own.size(1)) {
      reject(name, tensor, "be of own's dtype and shape");
    }
  };
  check_like("other", other);
  check_like("residual", residual);
  check_like("out", out);
  check_like("total", total);
  if (check_rows("norm", norm, device) != type || norm.dim() != 1 ||
      norm.size(0) != own.size(1)) {
    reject("norm", norm, "be of own's dtype, and as long as its rows");
  }
  const PairNormArgs args{own.data_ptr(),   other.data_ptr(), residual.data_ptr(),
                          norm.data_ptr(),  out.data_ptr(),   total.data_ptr(),
                          own.size(0),      own.size(1),      static_cast<float>(eps),
                          one_plus};
  const DeviceGuard guard(device);
  throw_if("a norm of two parts", add_pair_norm(args, type, current_stream(device)));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def("peers_address(int group) -> int");
  m.def("peers_push(Tensor rows, int group, int receiver, int offset) -> ()");
  m.def("peers_signal(int group, int flag, int value) -> ()");
  m.def("peers_await(int group, int flag, int value) -> ()");
  m.def(
      "add_pair_norm(Tensor own, Tensor other, Tensor residual, Tensor norm, float eps,"
      " bool one_plus, Tensor(a!) out, Tensor(b!) total) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CompositeExplicitAutograd, m) {
  m.impl("peers_address", TORCH_BOX(&vllm_cuda::peers_address));
  m.impl("peers_signal", TORCH_BOX(&vllm_cuda::peers_signal));
  m.impl("peers_await", TORCH_BOX(&vllm_cuda::peers_await));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("peers_push", TORCH_BOX(&vllm_cuda::peers_push));
  m.impl("add_pair_norm", TORCH_BOX(&vllm_cuda::pair_norm));
}
