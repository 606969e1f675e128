// SPDX-License-Identifier: Apache-2.0
#include "hopper/kda_scan.cuh"

#include "hopper/chunk_scan_launch.cuh"

namespace vllm_cuda {

namespace {

template <int WARPGROUPS>
const char* launch_with(const KdaScanArgs& args, const ChunkScanLaunch& launch) {
  using Rule = KdaScan<WARPGROUPS>;
  const auto scaled = [&args](const void* data) {
    const int64_t rows = args.chunks * args.heads * chunk_scan::kChunk;
    return Matrices{data, rows, 2, chunk_scan::kHead, 64};
  };
  typename Rule::Maps maps;
  const char* error = chunk_scan::encode({
      {maps.queries, scaled(args.queries), 2},
      {maps.keys, scaled(args.keys), 2},
      {maps.ends, scaled(args.ends), 2},
      {maps.v, chunk_scan::tokens(args.v, args.heads, args.v_stride, args), WARPGROUPS},
      {maps.T, chunk_scan::squares(args.T, args), 1},
      {maps.P, chunk_scan::squares(args.P, args), 1},
  });
  return error != nullptr ? error : chunk_scan::launch<Rule>(maps, args, launch);
}

}  // namespace

const char* launch_kda_scan(const KdaScanArgs& args, const ChunkScanLaunch& launch) {
  int count = 0;
  const cudaError_t error = multiprocessors(launch.device, count);
  if (error != cudaSuccess) return describe(error);
  // Bits do not depend on it: rows of the state do not meet.
  const int64_t halves = int64_t{chunk_scan::kTiles} * args.heads * args.sequences;
  return halves <= count ? launch_with<1>(args, launch) : launch_with<2>(args, launch);
}

}  // namespace vllm_cuda
