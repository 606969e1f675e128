// SPDX-License-Identifier: Apache-2.0
// XXH3-64 of long inputs. Memory is what it waits for.
#include <cstring>

#include "../../xxh3.h"
#include "../table.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

using namespace vllm_xxh3;

// Some of the eight 64-bit lanes; `product` multiplies low halves, `swapped` swaps neighbours.
#if defined(__AVX512F__)
constexpr int kLongs = 8;
typedef uint64_t Longs __attribute__((vector_size(64)));
inline Longs product(Longs a, Longs b) {
  return (Longs)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);
}
inline Longs swapped(Longs a) { return __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6); }
#elif defined(__AVX2__)
constexpr int kLongs = 4;
typedef uint64_t Longs __attribute__((vector_size(32)));
inline Longs product(Longs a, Longs b) { return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
inline Longs swapped(Longs a) { return __builtin_shufflevector(a, a, 1, 0, 3, 2); }
#else
constexpr int kLongs = 2;
typedef uint64_t Longs __attribute__((vector_size(16)));
#if defined(__SSE2__)
inline Longs product(Longs a, Longs b) { return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
inline Longs product(Longs a, Longs b) { return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF); }
#endif
inline Longs swapped(Longs a) { return __builtin_shufflevector(a, a, 1, 0); }
#endif

inline Longs load(const void* p) {
  Longs lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}

constexpr int kParts = 8 / kLongs;
constexpr int kPartBytes = sizeof(Longs);

struct State {
  Longs parts[kParts];

  inline void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < kParts; ++i) {
      const Longs data = load(stripe + i * kPartBytes);
      const Longs key = data ^ load(secret + i * kPartBytes);
      parts[i] += swapped(data) + product(key, key >> 32);
    }
  }

  inline void scramble() {
    const Longs prime = Longs{} + kPrime32_1;
    for (int i = 0; i < kParts; ++i) {
      const Longs key = load(kSecret.bytes + kScrambleSecret + i * kPartBytes);
      const Longs mixed = parts[i] ^ parts[i] >> 47 ^ key;
      parts[i] = product(mixed, prime) + (product(mixed >> 32, prime) << 32);
    }
  }
};

uint64_t read64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t digest(const uint8_t* data, int64_t size) {
  State state;
  for (int i = 0; i < kParts; ++i) state.parts[i] = load(kInitial.words + i * kLongs);

  const uint8_t* const last = data + size - kStripe;
  int64_t left = size - 1;  // the last stripe is taken whole, whatever it overlaps
  for (; left >= kBlock; left -= kBlock, data += kBlock) {
    for (int i = 0; i < kStripesPerBlock; ++i) {
      __builtin_prefetch(data + i * kStripe + 1024);
      state.add(data + i * kStripe, kSecret.bytes + 8 * i);
    }
    state.scramble();
  }
  for (int i = 0; i < left / kStripe; ++i) state.add(data + i * kStripe, kSecret.bytes + 8 * i);
  state.add(last, kSecret.bytes + kLastSecret);

  uint64_t lanes[8];
  std::memcpy(lanes, state.parts, sizeof lanes);
  uint64_t result = static_cast<uint64_t>(size) * kPrime64_1;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* secret = kSecret.bytes + kFoldSecret + 16 * i;
    result += folded_product(lanes[2 * i] ^ read64(secret), lanes[2 * i + 1] ^ read64(secret + 8));
  }
  result = (result ^ result >> 37) * kAvalanche;
  return result ^ result >> 32;
}

}  // namespace

void xxh3_64(const DigestArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    args.out[i] = digest(args.data + args.starts[i], args.sizes[i]);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
