// SPDX-License-Identifier: Apache-2.0
// Memory that the GPUs of one host write to each other, and the sums that travel through it.
#pragma once

#include <cstdint>

namespace vllm_cuda {

constexpr int kMaxRanks = 8;
constexpr int kMaxPeerBlocks = 128;
constexpr int kPeerHandleBytes = 64;
// Flags of large sums: words that senders write once what they are for has arrived.
constexpr int kPushFlags = 32;
constexpr int64_t kPushFlagBytes = int64_t{kPushFlags} * kMaxRanks * sizeof(uint32_t);
// Columns of a norm that is part of a sum: more than the first, at most the second.
constexpr int kSumNormColumns[] = {512, 8192};

// What a kernel sees of one rank's group. `inboxes[r]` is rank r's, mapped into this process: two
// slots, in each a part per sender, in each two 8-byte words for 8 bytes of a message of `capacity`
// bytes at most.
struct Peers {
  uint8_t* inboxes[kMaxRanks];
  uint32_t* counts;  // [kMaxPeerBlocks], all the number of the next sum, never 0
  int64_t capacity;
  // Where in each inbox the flags of large sums begin ([kPushFlags][kMaxRanks], by sender); after
  // them `push_bytes` that others write to in runs of rows.
  int64_t push_offset, push_bytes;
  uint64_t timeout_ns;
  int rank, ranks;
};

struct PeerGroup {
  Peers peers;
  uint8_t* memory;  // this rank's inbox, its counts, what large sums push to
  int device;
  bool opened[kMaxRanks];  // inboxes[r] belongs to another process
  bool exported;
};

struct SumArgs {
  const void* x;         // [rows, columns] dense, 16-byte aligned
  const void* residual;  // the same, or null: without a norm
  const void* norm;      // [columns]
  void* out;             // of x's shape: the sum, or its norm
  void* total;           // of x's shape: residual + sum, or null
  int64_t rows, columns;
  float eps;
  bool one_plus;
  bool two_shot;  // rows are added by one rank each, not by every rank
};

enum class SumType { kFloat, kHalf, kBfloat16 };

// The group at an address; throws std::runtime_error for one that has been destroyed.
PeerGroup& peers_at(int64_t address);
// The same, all of whose inboxes can be written to; throws std::runtime_error before.
const PeerGroup& open_peers_at(int64_t address);

// These return what went wrong, or null.
const char* create_peers(PeerGroup& group, int64_t capacity, int64_t push_bytes,
                         uint64_t timeout_ns, uint32_t first);
const char* export_peer(PeerGroup& group, void* handle);
const char* open_peer(PeerGroup& group, int rank, const void* handle);
const char* destroy_peers(PeerGroup& group);
// Queues the sum on the stream. `overlap`: may start before the kernels ahead of it are complete.
const char* launch_sum(const SumArgs& args, const Peers& peers, SumType type, bool overlap,
                       void* stream);

}  // namespace vllm_cuda
