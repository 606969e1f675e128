// SPDX-License-Identifier: Apache-2.0
// The preparing warps of the decode step: items on their way from the CTA's share to the output.
#pragma once

#include "gdn_decode_prepare.cuh"

namespace vllm_cuda::gdn_decode {

// Items go through the buffers: fetched, `kLag` items later made into vectors, finished once the
// consumers are done.
template <bool SEVERAL>
struct Preparation {
  Preparer<SEVERAL> preparer;
  const Barriers& barriers;
  const Buffers& buffers;
  const FirstItems& first;
  Items items;            // warp 0's
  int turn = 0;           // of the next item to fetch
  bool fetching, making;  // whether there are any more
  Place filling, made;

  __device__ Preparation(const GdnDecodeArgs& args, const Barriers& barriers_,
                         const Buffers& buffers_, const FirstItems& first_)
      : preparer(args), barriers(barriers_), buffers(buffers_), first(first_), items(args, first),
        fetching(first.any()), making(first.any()) {}

  __device__ const Header& header_in(int i) const { return buffers[i].headers[preparer.warp]; }

  // The next item. Warp 0 tells the others and the consumers which it is.
  __device__ Header take(const Buffer& to) {
    uint64_t* known = barriers.known + filling.index;
    Header header;
    if (preparer.warp == 0) {
      header = items.take();
    } else if (first.has(turn)) {
      header = first[turn];
    } else {
      wait_parity(known, filling.phase);
      header = *to.headers;
    }
    ++turn;
    __syncwarp();  // all lanes are done with the buffer's last item
    if (preparer.lane == 0) {
      to.headers[preparer.warp] = header;
      if (preparer.warp == 0) arrive(known);
    }
    __syncwarp();
    fetching = header.more;
    return header;
  }
  __device__ void fetch_early() {
    if (!fetching) return;
    const Buffer to = buffers[filling.index];
    preparer.fetch_early(take(to), to, barriers.ring + filling.index);
    filling.advance();
  }
  // A group of copies, empty once there are no items.
  __device__ void fetch_next() {
    if (fetching) {
      const Buffer to = buffers[filling.index];
      fetch_early();
      preparer.fetch_late(to.headers[preparer.warp], to);
    }
    end_group();
  }
  // Items for all buffers but one.
  __device__ void fetch_first() {
    bool more = fetching;
    for (int i = 1; i < kBuffers; ++i) fetch_early();
    if (more) preparer.load_taps(header_in(0).number);
    wait_for_predecessors();
    for (int i = 0; i < kBuffers - 1; ++i) {
      if (more) {
        const Buffer to = buffers[i];
        const Header header = to.headers[preparer.warp];
        preparer.fetch_late(header, to);
        more = header.more;
      }
      end_group();
    }
  }

  __device__ void make_next() {
    if (!making) return;
    wait_groups<kLag>();
    const Buffer to = buffers[made.index];
    const Header header = to.headers[preparer.warp];
    preparer.make_vectors(header, to, barriers.vectors + made.index);
    making = header.more;
    made.advance();
    if (making) preparer.load_taps(header_in(made.index).number);
  }

  __device__ void run() {
    bool more = making;
    fetch_first();
    for (int i = 1; i < kBuffers - kLag; ++i) make_next();
    for (Place place; more; place.advance()) {
      const Header header = header_in(place.index);
      fetch_next();  // into the buffer of the item before this one, which is finished
      make_next();
      wait_parity(barriers.done + place.index, place.phase);
      if (header.index >= 0) {
        preparer.each_head([&](int, int t, int head) {
          preparer.finish(header, buffers[place.index], t, head, [] {});
        });
      }
      more = header.more;
    }
  }
};

}  // namespace vllm_cuda::gdn_decode
