// SPDX-License-Identifier: Apache-2.0
// Host interface of the scan of the chunked gated delta rule.
#pragma once

#include "chunk_scan.h"

namespace vllm_cuda {

// `rows` has 4 rows of 64 per chunk.
struct GdnScanArgs : ChunkScanArgs {
  const void *q, *k;  // [tokens, key_heads, 128], as v
  int64_t q_stride, k_stride;
  int key_heads;
};

// Queues the kernel on the stream; returns what went wrong, or null.
const char* launch_gdn_scan(const GdnScanArgs& args, const ChunkScanLaunch& launch);

}  // namespace vllm_cuda
