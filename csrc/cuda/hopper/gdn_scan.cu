// SPDX-License-Identifier: Apache-2.0
#include "hopper/gdn_scan.cuh"

#include "hopper/chunk_scan_launch.cuh"

namespace vllm_cuda {

const char* launch_gdn_scan(const GdnScanArgs& args, const ChunkScanLaunch& launch) {
  GdnScan::Maps maps;
  const char* error = chunk_scan::encode({
      {maps.q, chunk_scan::tokens(args.q, args.key_heads, args.q_stride, args), 2},
      {maps.k, chunk_scan::tokens(args.k, args.key_heads, args.k_stride, args), 2},
      {maps.v, chunk_scan::tokens(args.v, args.heads, args.v_stride, args), 1},
      {maps.T, chunk_scan::squares(args.T, args), 1},
      {maps.P, chunk_scan::squares(args.P, args), 1},
  });
  return error != nullptr ? error : chunk_scan::launch<GdnScan>(maps, args, launch);
}

}  // namespace vllm_cuda
