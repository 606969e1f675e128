// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels: validated pointers, sizes and element strides.
//
// Activations share `dtype`. A Param carries its own dtype, since norm weights and gate
// parameters may be kept in fp32 beside a bf16 model.
#pragma once

#include "types.h"

namespace vllm_cpu {

struct Param {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};

// Rows addressed by up to three leading dimensions with arbitrary strides.
struct Rows {
  const void* data;
  int64_t sizes[3];
  int64_t strides[3];
  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
  int64_t offset(int64_t row) const {
    const int64_t c = row % sizes[2];
    const int64_t rest = row / sizes[2];
    return rest / sizes[1] * strides[0] + rest % sizes[1] * strides[1] + c * strides[2];
  }
};

struct RmsNormArgs {
  DType dtype;
  Rows x;
  const void* residual = nullptr;  // dense rows, added to x when given
  int64_t residual_stride = 0;
  void* sum = nullptr;  // dense rows: x + residual
  void* out;            // dense rows
  Param weight;
  int64_t n;
  float eps;
  bool one_plus;
};

struct GatedArgs {
  DType dtype;
  Rows x;
  Rows gate;
  Param weight;  // gated_rms_norm only
  float eps = 0;
  int64_t n;
  void* out;  // dense rows
};

struct GateUpArgs {
  DType dtype;
  const void* gate_up;
  int64_t stride;
  int64_t tokens;
  int64_t n;
  void* out;
  float alpha = 1, limit = 0, offset = 0;  // clamped_swiglu only
};

// Dense [tokens, count, hidden]: the residual streams of hyper-connections.
struct Streams {
  DType dtype;
  const void* data;
  int64_t tokens, count, hidden;
};

// The streams are collapsed alone, or connected with `post` and `mix`.
struct ReadStreamsArgs {
  Streams streams;
  const float* weight;   // dense [outputs, count * hidden]
  const float* base;     // [outputs]
  const float* scale;    // one, or three to connect
  float norm_eps, eps;
  int64_t iterations = 0;  // to connect
  void* out;               // dense [tokens, hidden]
  float* post = nullptr;   // dense [tokens, count]
  float* mix = nullptr;    // dense [tokens, count, count]
};

struct JoinStreamsArgs {
  Streams streams;
  const void* branch;
  int64_t branch_stride;
  const float* post;  // dense [tokens, count]
  const float* mix;   // dense [tokens, count, count]
  void* out;  // as `streams`
};

// [num_blocks, 2, block_size, num_kv_heads, head_dim], dense but for the block stride.
struct KvCache {
  char* data;
  int64_t num_blocks;
  int64_t block_stride;
  int64_t block_size;
  int64_t heads;
  int64_t head_dim;
  int64_t value_offset() const { return block_size * heads * head_dim; }
};

// Cosines of `rot / 2` angles of each position, then their sines.
struct Angles {
  const float* cos_sin;
  int64_t stride;
  int64_t rot;
  const float* of(int64_t position) const { return cos_sin + position * stride; }
};

struct RopeCacheArgs {
  DType dtype;
  const void* qkv;
  int64_t qkv_stride;
  int64_t tokens;
  const int64_t* positions;
  Angles angles;
  Param q_weight;
  Param k_weight;
  KvCache cache;
  const int64_t* slots;
  int64_t heads;
  bool gated;
  bool one_plus;
  float eps;
  void* q_out;  // dense [tokens, heads, head_dim]
};

// Copies of `row_bytes` to `block * block_stride + offset_in_block * row_bytes`.
struct WriteRowsArgs {
  const char* rows;
  int64_t token_stride;   // bytes
  int64_t columns;
  int64_t column_stride;  // bytes
  int64_t column_bytes;
  int64_t tokens;
  char* cache;
  int64_t block_stride;  // bytes
  int64_t block_size;
  const int64_t* slots;
};

// What the query rows of a sequence see: `QueryRows` in vllm/kernels/attention.
enum class QueryRows : int64_t { kTokens, kCausalBlock, kWholeBlock };

struct AttentionArgs {
  DType dtype;
  const void* query;
  int64_t query_strides[2];
  void* out;
  int64_t out_strides[2];
  KvCache cache;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* seq_lens;
  const int32_t* query_start;
  int64_t num_seqs;
  int64_t heads;
  float scale;
  int64_t window;  // 0: unlimited
  QueryRows rows;
  const float* sinks = nullptr;  // [heads], what a softmax has besides the keys' scores
};

// Row i of a sequence lies in block i / rows of its table, at place i % rows; blocks that are not
// positive are nobody's. `vllm.kernels.compressed_attention`.
struct PagedRows {
  void* data = nullptr;
  int64_t block_stride;
  int64_t rows, width;
  const int32_t* table;
  int64_t table_stride, columns;
};

// Tokens that an entry is made of at most.
constexpr int64_t kMostRows = 256;

// Equally many tokens of each sequence, `ratio` of which are an entry.
struct CompressedStep {
  int64_t num_tokens, tokens_per_seq;
  const int64_t* positions;
  int64_t ratio;
};

struct CompressArgs {
  CompressedStep step;
  DType dtype;       // of the entries
  PagedRows tokens;  // fp32: values, then scores
  PagedRows entries;
  const int64_t* slots;
  bool overlap;
  Param weight;
  float eps;
  Angles angles;
};

struct ChooseArgs {
  CompressedStep step;
  DType dtype;
  const void* query;
  int64_t query_strides[2];
  int64_t heads;
  const float* head_weights;
  int64_t weights_stride;
  PagedRows keys;
  int32_t* chosen;  // dense [tokens, topk]
  int64_t topk;
};

struct AttendArgs {
  CompressedStep step;
  DType dtype;
  const void* query;
  int64_t query_strides[2];
  void* out;
  int64_t out_strides[2];
  int64_t heads;
  PagedRows tokens;
  int64_t window;
  PagedRows entries;  // without data: there are none
  const int32_t* chosen = nullptr;  // dense [tokens, topk]; null: all that are visible
  int64_t topk = 0;
  const float* sinks;
  float scale;
};

// Digests of `count` parts of `data`, each longer than 240 bytes.
struct DigestArgs {
  const uint8_t* data;
  const int64_t* starts;
  const int64_t* sizes;
  int64_t count;
  uint64_t* out;
};

// conv_state [num_blocks, width - 1, channels], dense but for the block stride.
struct ConvArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int64_t channels;
  int64_t width;
  Param weight;  // dense [channels, width]
  Param bias;    // [channels] or null
  void* state;
  int64_t state_stride;
  const int32_t* state_indices;
  const bool* has_initial_state;
  const int32_t* query_start;
  int64_t num_seqs;
};

// What decode leaves out of the states' blocks: `vllm.kernels.journal.Journal` of one layer.
struct JournalArgs {
  const int32_t* steps = nullptr;  // [seqs, 4]; null: there is no journal
  const int32_t* taken;            // [rows]
  float* keys;                     // [rows, places, k_heads, k_dim]
  float* errors;                   // [rows, places, v_heads, v_dim]
  float* decays;                   // [rows, places, v_heads(, k_dim)]
  void* inputs;                    // [rows, kept, channels], dtype of the activations
  int64_t rows, places, kept;
};

// What the kernels of recurrent layers have in common: sequences, their states, the output.
struct RecurrentArgs {
  DType dtype;
  void* state;  // [num_blocks, heads, rows, columns], dense but for the block stride
  DType state_dtype;
  int64_t state_stride;
  const int32_t* state_indices;
  const bool* has_initial_state;  // prefill only
  const int32_t* query_start;     // prefill only
  int64_t num_seqs;
  void* out;  // [tokens, heads, rows]
  int64_t out_strides[2];
  ConvArgs conv;               // decode only
  int64_t tokens_per_seq = 1;  // decode only
  JournalArgs journal;         // decode only
};

// A head's state is [v_dim, k_dim].
struct GdnArgs : RecurrentArgs {
  const void* qkv;
  int64_t qkv_stride;
  // Whether each key channel has a decay (Kimi delta attention): `a` is then
  // [tokens, v_heads, k_dim] with dense heads, `dt_bias` [v_heads * k_dim].
  bool channel_decays = false;
  const void* a;
  int64_t a_stride;
  const void* b;
  int64_t b_stride;
  Param A_log;
  Param dt_bias;
  float beta_scale = 1;
  int64_t k_heads, v_heads, k_dim, v_dim;
};

// Tokens are x, B and C: heads * head_dim and twice groups * columns channels. A head's state is
// [head_dim, columns]. The journal's keys are B of each group, its errors step sizes times x.
struct Mamba2Args : RecurrentArgs {
  const void* xbc;
  int64_t xbc_stride;
  const void* dt;  // [tokens, heads]
  int64_t dt_stride;
  Param A_log, dt_bias, D;  // [heads]
  float dt_low, dt_high;
  int64_t heads, groups, head_dim, columns;
};

// Rows of the journal to write to their blocks.
struct GdnCommitArgs {
  const int32_t* entries;  // [count, 2]: row, block
  int64_t count;
  const int32_t* pending;  // [rows]
  const int32_t* first;    // [rows]
  GdnArgs gdn;             // sizes, state and journal
};

struct SkinnyLinearArgs {
  DType dtype;
  bool fp8_weight;  // else of `dtype`; then `dtype` is kF32
  const void* x;
  int64_t x_stride;
  int64_t rows;
  const void* weight;
  int64_t weight_stride;
  int64_t outputs;
  int64_t depth;
  const void* bias;
  void* out;
};

enum class ExpertActivation : int32_t { kSwiglu, kClampedSwiglu, kReluSquared };

// The pairs [begin, end) of `ExpertsArgs.pairs`, which all go to one expert of the stack.
struct ExpertBlock {
  int64_t expert;
  int64_t begin, end;
};
// Pairs of a block at most: so many tokens and a few columns of weights fit the second cache.
constexpr int64_t kExpertPairs = 96;

// A pair is a token with one of its slots: token * slots + slot.
struct ExpertsArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  int64_t tokens, slots, hidden, inner;
  ExpertActivation activation;
  float alpha, limit, offset;   // kClampedSwiglu only
  const void* gate_up;          // dense [num_experts, inner or 2 inner, hidden]
  const void* down;             // dense [num_experts, hidden, inner]
  const void* gate_up_bias;     // dense [num_experts, inner or 2 inner], or null
  const void* down_bias;        // dense [num_experts, hidden], or null
  int64_t num_experts;
  const int32_t* experts;       // [tokens, slots]; those not in [0, num_experts) add nothing
  int64_t experts_stride;
  const float* weights;         // [tokens, slots + (shared ? 1 : 0)]
  int64_t weights_stride;
  const void* shared;           // [tokens, hidden], or null
  int64_t shared_stride;
  const int32_t* pairs;         // those that the stack computes, by expert
  const ExpertBlock* blocks;
  int64_t num_blocks;
  void* active;                 // room for 4-byte elements [pairs, active_stride]
  int64_t active_stride;
  void* outputs;                // room for dense [tokens * slots, hidden]
  void* out;                    // dense [tokens, hidden]
};

}  // namespace vllm_cpu
