// SPDX-License-Identifier: Apache-2.0
// Host interface of the scan of chunked Kimi delta attention.
#pragma once

#include "chunk_scan.h"

namespace vllm_cuda {

// `rows` has one row of 128 per chunk, the channels' decays.
struct KdaScanArgs : ChunkScanArgs {
  const void *queries, *keys, *ends;  // [chunks, heads, 64, 128] bf16
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_kda_scan(const KdaScanArgs& args, const ChunkScanLaunch& launch);

}  // namespace vllm_cuda
