// SPDX-License-Identifier: Apache-2.0
#include "hopper/kda_scan.cuh"

#include "hopper/chunk_scan_launch.cuh"

namespace vllm_cuda {

const char* launch_kda_scan(const KdaScanArgs& args, const ChunkScanLaunch& launch) {
  const auto scaled = [&args](const void* data) {
    const int64_t rows = args.chunks * args.heads * chunk_scan::kChunk;
    return Matrices{data, rows, 2, chunk_scan::kHead, 64};
  };
  KdaScan::Maps maps;
  const char* error = chunk_scan::encode({
      {maps.queries, scaled(args.queries), 2},
      {maps.keys, scaled(args.keys), 2},
      {maps.ends, scaled(args.ends), 2},
      {maps.v, chunk_scan::tokens(args.v, args.heads, args.v_stride, args), 1},
      {maps.T, chunk_scan::squares(args.T, args), 1},
      {maps.P, chunk_scan::squares(args.P, args), 1},
  });
  return error != nullptr ? error : chunk_scan::launch<KdaScan>(maps, args, launch);
}

}  // namespace vllm_cuda
