// SPDX-License-Identifier: Apache-2.0
// Few tokens per sequence: convolution, gates and the recurrent steps, in one pass over the state.
#include <string.h>

#include "../runtime.h"
#include "../table.h"
#include "conv_steps.h"
#include "gdn_steps.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// What the steps of one value head's rows read and write.
template <typename T, typename S, typename Decay>
struct HeadSteps {
  int64_t k_dim, tokens;
  S* state;  // [v_dim, k_dim]
  const float *q, *k, *v;  // one after the other, of each token; pitches below
  int64_t k_pitch, v_pitch;
  const float *beta, *kq;  // [tokens]
  const float* decay;      // of each token, decay_floats apart
  int64_t decay_floats;
  T* out;
  int64_t out_pitch;
  // The journal, at this row and head.
  Kept kept;
  const float* keys = nullptr;    // [places] rows, key_pitch apart
  float* errors = nullptr;        // [places] rows, error_pitch apart
  const float* decays = nullptr;  // [places] rows, decay_pitch apart
  int64_t key_pitch = 0, error_pitch = 0, decay_pitch = 0;
};

template <typename T, typename S, typename Decay, int Rows>
void run_rows(const HeadSteps<T, S, Decay>& head, int64_t row, S* rows) {
  const int64_t size = Rows * head.k_dim;
  S* stored = head.state + row * head.k_dim;
  float delta[Rows];
  if (!head.errors) {
    step_rows<T, S, Rows>(
        stored, head.k_dim, Decay::of(head.decay), *head.beta, *head.kq, head.k, head.q,
        head.v + row, head.out + row, delta);
    return;
  }
  ::memcpy(rows, stored, size * sizeof(S));
  replay_rows<S, Rows, Decay>(
      rows, head.k_dim, head.keys, head.key_pitch, head.errors + row, head.error_pitch, head.decays,
      head.decay_pitch, head.kept.pending, head.kept.first, head.kept.places);
  for (int64_t t = 0; t < head.tokens; ++t) {
    step_rows<T, S, Rows>(
        rows, head.k_dim, Decay::of(head.decay + t * head.decay_floats), head.beta[t], head.kq[t],
        head.k + t * head.k_pitch, head.q + t * head.k_pitch, head.v + t * head.v_pitch + row,
        head.out + t * head.out_pitch + row, delta);
    if (!head.kept.keeps(t)) {
      ::memcpy(stored, rows, size * sizeof(S));
    } else {
      ::memcpy(head.errors + head.kept.slot(t) * head.error_pitch + row, delta, sizeof(delta));
    }
  }
}

// The parts of a thread's scratch memory, in floats.
struct Work {
  int64_t k_pad, v_pad, tokens, rows, decays;
  explicit Work(const GdnArgs& args)
      : k_pad(round_up(args.k_dim, kLanes)),
        v_pad(round_up(args.v_dim, kLanes)),
        tokens(args.tokens_per_seq),
        rows(round_up(kStateRows * args.k_dim, kLanes)),
        decays(args.channel_decays ? k_pad : 1) {}
  int64_t floats() const { return tokens * (2 * k_pad + v_pad + 2 + decays) + rows; }
};

// The decays and strengths of the tokens of a value head.
template <typename T>
void gates_of_tokens(
    const GdnArgs& args, int64_t first, int64_t head, const Work& sizes, float* decay,
    float* beta) {
  const DecayParams params = args.channel_decays
      ? DecayParams{::expf(param_at(args.A_log, head)), 0}
      : decay_params(args, head);
  for (int64_t t = 0; t < sizes.tokens; ++t) {
    if (args.channel_decays) {
      beta[t] = channel_gates<T>(args, params.rate, first + t, head, decay + t * sizes.decays);
    } else {
      const Gates gate = gates<T>(args, params, first + t, head);
      decay[t] = ::expf(gate.g);
      beta[t] = gate.beta;
    }
  }
}

template <typename T, typename S, typename Decay>
void step_head(const GdnArgs& args, int64_t seq, int64_t key_head, float* work) {
  const int64_t group = args.v_heads / args.k_heads;
  const int64_t index = args.state_indices[seq];
  const int64_t tokens = args.tokens_per_seq;
  const Work sizes(args);
  S* rows = reinterpret_cast<S*>(work);
  float* q = work + sizes.rows;
  float* k = q + tokens * sizes.k_pad;
  float* v = k + tokens * sizes.k_pad;
  float* kq = v + tokens * sizes.v_pad;
  float *beta = kq + tokens, *decay = beta + tokens;
  const JournalArgs& journal = args.journal;
  const Kept kept(journal, seq);
  const int64_t base = kept.row * journal.places;
  const Sequence<T> tokens_of = sequence_of<T>(args, kept, seq, args.qkv, args.qkv_stride);
  const int64_t key_width = args.k_heads * args.k_dim;
  conv_steps(args.conv, tokens_of, key_head * args.k_dim, args.k_dim, q, sizes.k_pad);
  conv_steps(args.conv, tokens_of, key_width + key_head * args.k_dim, args.k_dim, k, sizes.k_pad);
  HeadSteps<T, S, Decay> head{args.k_dim, tokens, nullptr, q, k, v, sizes.k_pad, sizes.v_pad,
                              beta, kq, decay, sizes.decays, nullptr, args.out_strides[0],
                              kept};
  const int64_t decay_floats = Decay::floats(args.k_dim);
  if (journal.steps) {
    head.key_pitch = key_width;
    head.error_pitch = args.v_heads * args.v_dim;
    head.decay_pitch = args.v_heads * decay_floats;
    head.keys = journal.keys + base * key_width + key_head * args.k_dim;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    float *query = q + t * sizes.k_pad, *key = k + t * sizes.k_pad;
    l2_normalise(query, sizes.k_pad, 1.0f / ::sqrtf(static_cast<float>(args.k_dim)));
    l2_normalise(key, sizes.k_pad, 1.0f);
    vf kq_sum = {};
    for (int64_t i = 0; i < sizes.k_pad; i += kLanes) {
      kq_sum = fma(load(key + i), load(query + i), kq_sum);
    }
    kq[t] = sum(kq_sum);
    if (journal.steps && kept.keeps(t)) {
      float* keys = journal.keys + kept.place(t) * key_width;
      ::memcpy(keys + key_head * args.k_dim, key, args.k_dim * sizeof(float));
    }
  }
  for (int64_t j = key_head * group; j < (key_head + 1) * group; ++j) {
    conv_steps(args.conv, tokens_of, 2 * key_width + j * args.v_dim, args.v_dim, v, sizes.v_pad);
    gates_of_tokens<T>(args, seq * tokens, j, sizes, decay, beta);
    if (journal.steps) {
      const int64_t heads = base * args.v_heads + j;
      head.errors = journal.errors + heads * args.v_dim;
      head.decays = journal.decays + heads * decay_floats;
    }
    for (int64_t t = 0; journal.steps && t < tokens; ++t) {
      if (!kept.keeps(t)) continue;
      const int64_t at = kept.place(t) * args.v_heads + j;
      ::memcpy(
          journal.decays + at * decay_floats, decay + t * sizes.decays,
          decay_floats * sizeof(float));
    }
    head.state = static_cast<S*>(args.state) + index * args.state_stride +
        j * args.v_dim * args.k_dim;
    head.out = static_cast<T*>(args.out) + seq * tokens * args.out_strides[0] +
        j * args.out_strides[1];
    for_rows(args.v_dim, [&](int64_t first, auto together) {
      run_rows<T, S, Decay, decltype(together)::value>(head, first, rows);
    });
  }
}

template <typename T, typename S, typename Decay>
void run(const GdnArgs& args) {
  const int64_t floats = Work(args).floats();
  const int64_t item_cost = args.v_heads / args.k_heads * args.v_dim * args.k_dim;
  parallel_ranges(
      args.num_seqs * args.k_heads, 65536 / item_cost + 1, [&](int64_t begin, int64_t end) {
        float* work = scratch(Scratch::kKernel, floats);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t seq = i / args.k_heads;
          if (args.state_indices[seq] < 0) continue;
          step_head<T, S, Decay>(args, seq, i % args.k_heads, work);
        }
      });
}

// Makes a row's pending updates, rounded after each as a write is, to its block; then the
// convolution's state takes in the inputs of its accepted drafts.
template <typename T, typename S, typename Decay>
void commit_row(const GdnCommitArgs& args, const int32_t* entry) {
  const GdnArgs& gdn = args.gdn;
  const JournalArgs& journal = gdn.journal;
  const int64_t row = entry[0], index = entry[1], group = gdn.v_heads / gdn.k_heads;
  const int64_t key_width = gdn.k_heads * gdn.k_dim;
  const int64_t at = row * journal.places, decay_floats = Decay::floats(gdn.k_dim);
  S* state = static_cast<S*>(gdn.state) + index * gdn.state_stride;
  for (int64_t j = 0; j < gdn.v_heads; ++j) {
    for (int64_t r = 0; r < gdn.v_dim; ++r) {
      replay_rows<S, 1, Decay>(
          state + (j * gdn.v_dim + r) * gdn.k_dim, gdn.k_dim,
          journal.keys + at * key_width + j / group * gdn.k_dim, key_width,
          journal.errors + (at * gdn.v_heads + j) * gdn.v_dim + r, gdn.v_heads * gdn.v_dim,
          journal.decays + (at * gdn.v_heads + j) * decay_floats, gdn.v_heads * decay_floats,
          args.pending[row], args.first[row], journal.places);
    }
  }
  const int64_t past = gdn.conv.width - 1, channels = gdn.conv.channels;
  const int64_t taken = journal.taken[row];
  T* conv = static_cast<T*>(gdn.conv.state) + index * gdn.conv.state_stride;
  const T* kept = static_cast<const T*>(journal.inputs) + row * journal.kept * channels;
  for (int64_t w = 0; taken > 0 && w < past; ++w) {
    const int64_t later = w + taken - past;
    const T* from = later < 0 ? conv + (w + taken) * channels : kept + later * channels;
    ::memcpy(conv + w * channels, from, channels * sizeof(T));
  }
}

}  // namespace

void gdn_decode(const GdnArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) {
      if (args.channel_decays) {
        run<decltype(t), decltype(s), ChannelDecays>(args);
      } else {
        run<decltype(t), decltype(s), HeadDecay>(args);
      }
    });
  });
}

void gdn_commit(const GdnCommitArgs& args) {
  with_dtype(args.gdn.dtype, [&](auto t) {
    with_dtype(args.gdn.state_dtype, [&](auto s) {
      parallel_items(args.count, [&](int64_t i) {
        const int32_t* entry = args.entries + i * 2;
        if (args.gdn.channel_decays) {
          commit_row<decltype(t), decltype(s), ChannelDecays>(args, entry);
        } else {
          commit_row<decltype(t), decltype(s), HeadDecay>(args, entry);
        }
      });
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
