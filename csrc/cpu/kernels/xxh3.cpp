// SPDX-License-Identifier: Apache-2.0
// XXH3-64 of long inputs (more than 240 bytes), seed 0, default secret, as the algorithm's
// specification has it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
//
// Eight 64-bit accumulators take a stripe of 64 bytes at a time; every 16 stripes they are
// scrambled, and at the end folded to 64 bits. Memory is what it waits for.
#include <cstring>

#include "../table.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5};
constexpr uint64_t kAvalanche = 0x165667919E3779F9;

constexpr int kStripe = 64;
constexpr int kSecretBytes = 192;
constexpr int kStripesPerBlock = (kSecretBytes - kStripe) / 8;
constexpr int64_t kBlock = kStripe * kStripesPerBlock;

alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

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
    const Longs prime = Longs{} + kPrime32[0];
    for (int i = 0; i < kParts; ++i) {
      const Longs key = load(kSecret + kSecretBytes - kStripe + i * kPartBytes);
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
  const uint64_t initial[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                               kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  State state;
  for (int i = 0; i < kParts; ++i) state.parts[i] = load(initial + i * kLongs);

  const uint8_t* const last = data + size - kStripe;
  int64_t left = size - 1;  // the last stripe is taken whole, whatever it overlaps
  for (; left >= kBlock; left -= kBlock, data += kBlock) {
    for (int i = 0; i < kStripesPerBlock; ++i) {
      __builtin_prefetch(data + i * kStripe + 1024);
      state.add(data + i * kStripe, kSecret + 8 * i);
    }
    state.scramble();
  }
  for (int i = 0; i < left / kStripe; ++i) state.add(data + i * kStripe, kSecret + 8 * i);
  state.add(last, kSecret + kSecretBytes - kStripe - 7);

  uint64_t lanes[8];
  std::memcpy(lanes, state.parts, sizeof lanes);
  uint64_t result = static_cast<uint64_t>(size) * kPrime64[0];
  for (int i = 0; i < 4; ++i) {
    const uint8_t* secret = kSecret + 11 + 16 * i;
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
