// SPDX-License-Identifier: Apache-2.0
// Kimi delta attention of prompts, token by token: with a decay for each key channel, products of
// a chunk's tokens would need exponents that fp32 has not. Rows of the state stay in the first
// cache for a chunk of tokens.
#include "../runtime.h"
#include "../table.h"
#include "gdn_steps.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int64_t kChunk = 32;

// One thread's buffers, rows padded to whole vectors.
struct Work {
  int64_t k_pad, v_pad, state_floats;
  float *q, *k, *decay;  // [kChunk][k_pad]
  float* v;              // [kChunk][v_pad]
  float *beta, *kq;      // [kChunk]
  float* state;          // [v_dim][k_dim]

  explicit Work(const GdnArgs& args)
      : k_pad(round_up(args.k_dim, kLanes)),
        v_pad(round_up(args.v_dim, kLanes)),
        state_floats(round_up(args.v_dim * args.k_dim, kLanes)) {}
  int64_t floats() const { return kChunk * (3 * k_pad + v_pad + 2) + state_floats; }
  void place(float* memory) {
    q = memory;
    k = q + kChunk * k_pad;
    decay = k + kChunk * k_pad;
    v = decay + kChunk * k_pad;
    state = v + kChunk * v_pad;
    beta = state + state_floats;
    kq = beta + kChunk;
  }
};

// What the steps of tokens [token, token + n) of a head need.
template <typename T>
void prepare(const GdnArgs& args, int64_t token, int64_t n, int64_t head, float rate, Work& w) {
  const float scale = 1.0f / ::sqrtf(static_cast<float>(args.k_dim));
  const int64_t key_width = args.k_heads * args.k_dim;
  const int64_t key_head = head / (args.v_heads / args.k_heads);
  for (int64_t t = 0; t < n; ++t) {
    const T* row = static_cast<const T*>(args.qkv) + (token + t) * args.qkv_stride;
    const T *q = row + key_head * args.k_dim, *k = q + key_width;
    const T* v = row + 2 * key_width + head * args.v_dim;
    float *query = w.q + t * w.k_pad, *key = w.k + t * w.k_pad;
    for_lanes(args.k_dim, [&](int64_t i, int64_t lanes) {
      store(query + i, load_upto(q + i, lanes));
      store(key + i, load_upto(k + i, lanes));
    });
    for_lanes(args.v_dim, [&](int64_t i, int64_t lanes) {
      store(w.v + t * w.v_pad + i, load_upto(v + i, lanes));
    });
    l2_normalise(query, w.k_pad, scale);
    l2_normalise(key, w.k_pad, 1.0f);
    vf products = {};
    for (int64_t i = 0; i < w.k_pad; i += kLanes) {
      products = fma(load(key + i), load(query + i), products);
    }
    w.kq[t] = sum(products);
    w.beta[t] = channel_gates<T>(args, rate, token + t, head, w.decay + t * w.k_pad);
  }
}

template <typename T, int Rows>
void run_rows(const GdnArgs& args, int64_t token, int64_t n, int64_t head, int64_t row, Work& w) {
  T* out = static_cast<T*>(args.out) + token * args.out_strides[0] + head * args.out_strides[1];
  float delta[Rows];
  for (int64_t t = 0; t < n; ++t) {
    step_rows<T, float, Rows>(
        w.state + row * args.k_dim, args.k_dim, ChannelDecays{w.decay + t * w.k_pad}, w.beta[t],
        w.kq[t], w.k + t * w.k_pad, w.q + t * w.k_pad, w.v + t * w.v_pad + row,
        out + t * args.out_strides[0] + row, delta);
  }
}

template <typename T, typename S>
void run_item(const GdnArgs& args, int64_t seq, int64_t head) {
  const int64_t index = args.state_indices[seq];
  const int64_t begin = args.query_start[seq], end = args.query_start[seq + 1];
  if (index < 0 || begin >= end) return;
  Work w(args);
  w.place(scratch(Scratch::kKernel, w.floats()));
  const int64_t size = args.v_dim * args.k_dim;
  S* stored = static_cast<S*>(args.state) + index * args.state_stride + head * size;
  const bool carried = args.has_initial_state[seq];
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    store_upto(w.state + i, carried ? load_upto(stored + i, lanes) : vf{}, lanes);
  });
  const float rate = ::expf(param_at(args.A_log, head));
  for (int64_t token = begin; token < end; token += kChunk) {
    const int64_t n = end - token < kChunk ? end - token : kChunk;
    prepare<T>(args, token, n, head, rate, w);
    for_rows(args.v_dim, [&](int64_t row, auto rows) {
      run_rows<T, decltype(rows)::value>(args, token, n, head, row, w);
    });
  }
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    store_upto(stored + i, load_upto(w.state + i, lanes), lanes);
  });
}

}  // namespace

void kda_prefill(const GdnArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) {
      parallel_items(args.num_seqs * args.v_heads, [&](int64_t i) {
        run_item<decltype(t), decltype(s)>(args, i / args.v_heads, i % args.v_heads);
      });
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
