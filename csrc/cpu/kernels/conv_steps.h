// SPDX-License-Identifier: Apache-2.0
// The convolution of a decode's tokens, the first of which belongs to the sequence.
#pragma once

#include "conv1d.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// One sequence of a decode: its tokens, its state and what its row of the journal holds.
template <typename T>
struct Sequence {
  const T* x;  // [tokens, channels] in rows of x_stride
  int64_t x_stride, tokens;
  T* state;         // [width - 1, channels]
  T* kept;          // [tokens - 1, channels]: inputs of drafts, the last step's and then this one's
  int64_t taken;    // of them belong to accepted drafts
};

// What a step of a sequence takes from its row of the journal and keeps there.
struct Kept {
  int64_t row = 0, pending = 0, first = 0, places = 1;
  bool commits = true;

  // Of a sequence of the step; nothing without a journal.
  Kept(const JournalArgs& journal, int64_t seq) {
    if (!journal.steps) return;
    const int32_t* step = journal.steps + 4 * seq;
    row = step[0];
    pending = step[1];
    commits = step[2] != 0;
    first = step[3];
    places = journal.places;
  }
  // Whether token t is kept: all but one that commits.
  bool keeps(int64_t t) const { return t > 0 || !commits; }
  // Its place in the row, and among all rows'.
  int64_t slot(int64_t t) const { return (first + pending + t - (commits ? 1 : 0)) % places; }
  int64_t place(int64_t t) const { return row * places + slot(t); }
};

// The tokens of sequence `seq`, rows of `x`, each `x_stride` elements.
template <typename T>
Sequence<T> sequence_of(
    const RecurrentArgs& args, const Kept& kept, int64_t seq, const void* x, int64_t x_stride) {
  const int64_t tokens = args.tokens_per_seq, index = args.state_indices[seq];
  const JournalArgs& journal = args.journal;
  Sequence<T> sequence{
      static_cast<const T*>(x) + seq * tokens * x_stride, x_stride, tokens,
      static_cast<T*>(args.conv.state) + index * args.conv.state_stride, nullptr, 0};
  if (journal.steps) {
    sequence.kept =
        static_cast<T*>(journal.inputs) + kept.row * journal.kept * args.conv.channels;
    sequence.taken = journal.taken[kept.row];
  }
  return sequence;
}

// Convolves channels [first, first + count) of the tokens and returns the results, `pitch` apart, as
// T would hold them: prefill passes them through a tensor of T. The state takes in the accepted
// drafts of the last step and the first token.
template <typename T>
void conv_steps(
    const ConvArgs& conv, const Sequence<T>& seq, int64_t first, int64_t count, float* out,
    int64_t pitch) {
  const int64_t past = conv.width - 1;
  for_lanes(count, [&](int64_t c, int64_t lanes) {
    const int64_t channel = first + c;
    const ConvTaps taps = load_taps(conv, channel, lanes);
    vf history[kMaxWidth];
    for (int64_t w = 0; w < past; ++w) {
      const int64_t later = w + seq.taken - past;
      history[w] = later < 0 ? load_upto(seq.state + (w + seq.taken) * conv.channels + channel, lanes)
                             : load_upto(seq.kept + later * conv.channels + channel, lanes);
    }
    for (int64_t t = 0; t < seq.tokens; ++t) {
      const vf input = load_upto(seq.x + t * seq.x_stride + channel, lanes);
      vf y = taps.bias;
      for (int64_t w = 0; w < past; ++w) y = fma(history[w], taps.weight[w], y);
      y = fma(input, taps.weight[past], y);
      store(out + t * pitch + c, round_to<T>(silu(y)));
      for (int64_t w = 0; w + 1 < past; ++w) history[w] = history[w + 1];
      history[past - 1] = input;
      if (t > 0) {
        store_upto(seq.kept + (t - 1) * conv.channels + channel, input, lanes);
        continue;
      }
      for (int64_t w = 0; w < past; ++w) {
        store_upto(seq.state + w * conv.channels + channel, history[w], lanes);
      }
    }
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
