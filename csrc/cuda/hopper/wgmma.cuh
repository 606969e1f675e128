// SPDX-License-Identifier: Apache-2.0
// Asynchronous products of a warpgroup on bf16: d [64, N] (+)= a [64, 16] @ b [16, N] in fp32
// (sm_90a). `b`, and `a` where it has a descriptor, lie in shared memory in tiles of 64 elements
// (128 bytes) a row, swizzled by 128 bytes and aligned to 1,024. Products of e4m3 have 32 columns
// of a and tiles of 128 elements: as many bytes.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace vllm_cuda {

constexpr uint32_t kTileRowBytes = 128;
// Eight rows: where the swizzle starts over.
constexpr uint32_t kTileGroupBytes = 8 * kTileRowBytes;

// Rows of the tile run along M or N, columns along the summed dimension: 16 of them further on,
// add 32 bytes.
__device__ inline uint64_t tile_descriptor(const void* tile) {
  return (uint64_t{1} << 62) | (uint64_t{kTileGroupBytes >> 4} << 32) | (uint64_t{1} << 16) |
         ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Rows run along the summed dimension, 16 further on are 2,048 bytes; columns along M or N, where
// the next 64 of them lie `apart` bytes away.
__device__ inline uint64_t transposed_descriptor(const void* tile, uint32_t apart) {
  return (uint64_t{1} << 62) | (uint64_t{kTileGroupBytes >> 4} << 32) |
         (uint64_t{apart >> 4} << 16) | ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Squares of 8 rows of 128 swizzled bytes: `stride` bytes from 8 rows to the next 8, `leading` from
// 64 columns to the next 64 where these are not summed.
__device__ inline uint64_t squares_descriptor(const void* tile, uint32_t leading, uint32_t stride) {
  return (uint64_t{1} << 62) | (uint64_t{stride >> 4} << 32) | (uint64_t{leading >> 4} << 16) |
         ((shared_address(tile) & 0x3FFFF) >> 4);
}

__device__ inline uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Registers written by plain instructions are visible to the products that follow.
__device__ inline void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING of the committed groups are under way; `done` are the results that
// may be read from here on.
template <int PENDING, int N>
__device__ inline void products_wait(float (&done)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(done[i])::"memory");
}

// As above, where the results that are there by then are not looked at yet.
template <int PENDING>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Operands of a product's assembly: the names of its results in the text, and the results.
#define VLLM_R32                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                         \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VLLM_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define VLLM_R16                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define VLLM_R40 VLLM_R32                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define VLLM_R48 VLLM_R40                                                                        \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define VLLM_R56 VLLM_R48                                                                        \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define VLLM_R64 VLLM_R40                                                                        \
  ", %40, %41, %42, %43, %44, %45, %46, %47"                                                     \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define VLLM_R72 VLLM_R64                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71"
#define VLLM_R80 VLLM_R72                                                                        \
  ", %72, %73, %74, %75, %76, %77, %78, %79"
#define VLLM_R128 VLLM_R80                                                                       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"              \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"  \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define VLLM_F8(d, i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),   \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define VLLM_F32(d, i) VLLM_F8(d, i), VLLM_F8(d, i + 8), VLLM_F8(d, i + 16), VLLM_F8(d, i + 24)
#define VLLM_O8 VLLM_F8(d, 0)
#define VLLM_O16 VLLM_F8(d, 0), VLLM_F8(d, 8)
#define VLLM_O32 VLLM_F32(d, 0)
#define VLLM_O40 VLLM_F32(d, 0), VLLM_F8(d, 32)
#define VLLM_O48 VLLM_O40, VLLM_F8(d, 40)
#define VLLM_O56 VLLM_O48, VLLM_F8(d, 48)
#define VLLM_O64 VLLM_F32(d, 0), VLLM_F32(d, 32)
#define VLLM_O72 VLLM_F32(d, 0), VLLM_F32(d, 32), VLLM_F8(d, 64)
#define VLLM_O80 VLLM_O72, VLLM_F8(d, 72)
#define VLLM_O128 VLLM_F32(d, 0), VLLM_F32(d, 32), VLLM_F32(d, 64), VLLM_F32(d, 96)

// The left operand from registers: rows lane / 4 and + 8 of the warp's 16, columns
// 2 * (lane % 4) + {0, 1} and + 8, packed in pairs, as results come out.
template <int TRANSPOSED>
__device__ inline void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" VLLM_R16
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
      : VLLM_O16
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

// Results of b's first 32 rows and of its next.
template <int TRANSPOSED>
__device__ inline void product(float (&d)[16], float (&e)[16], const uint32_t (&a)[4], uint64_t b,
                               int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" VLLM_R32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : VLLM_O16, VLLM_F8(e, 0), VLLM_F8(e, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ inline void product(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" VLLM_R32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : VLLM_F32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ inline void product(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" VLLM_R64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : VLLM_F32(d, 0), VLLM_F32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ inline void product(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" VLLM_R128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"
      : VLLM_O128
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

// Both operands from shared memory. VLLM_PRODUCT names N, its results a thread, and the places of
// the operands after them.
#define VLLM_PRODUCT(N, RESULTS, A, B, ADD, TA, TB)                                          \
  template <int TRANSPOSED_A, int TRANSPOSED_B>                                              \
  __device__ inline void product(float (&d)[RESULTS], uint64_t a, uint64_t b, int add) {     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD                                   \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {"          \
                 VLLM_R##RESULTS "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"      \
                 : VLLM_O##RESULTS                                                           \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));          \
  }
VLLM_PRODUCT(16, 8, 8, 9, 10, 11, 12)
VLLM_PRODUCT(32, 16, 16, 17, 18, 19, 20)
VLLM_PRODUCT(64, 32, 32, 33, 34, 35, 36)
VLLM_PRODUCT(80, 40, 40, 41, 42, 43, 44)
VLLM_PRODUCT(96, 48, 48, 49, 50, 51, 52)
VLLM_PRODUCT(112, 56, 56, 57, 58, 59, 60)
VLLM_PRODUCT(128, 64, 64, 65, 66, 67, 68)
VLLM_PRODUCT(144, 72, 72, 73, 74, 75, 76)
VLLM_PRODUCT(160, 80, 80, 81, 82, 83, 84)
VLLM_PRODUCT(256, 128, 128, 129, 130, 131, 132)
#undef VLLM_PRODUCT

#define VLLM_PRODUCT_E4M3(N, RESULTS, A, B, ADD)                                              \
  __device__ inline void product_e4m3(float (&d)[RESULTS], uint64_t a, uint64_t b, int add) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD                                    \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {"           \
                 VLLM_R##RESULTS "}, %" #A ", %" #B ", p, 1, 1;\n}"                           \
                 : VLLM_O##RESULTS                                                            \
                 : "l"(a), "l"(b), "r"(add));                                                 \
  }
VLLM_PRODUCT_E4M3(32, 16, 16, 17, 18)
VLLM_PRODUCT_E4M3(64, 32, 32, 33, 34)
#undef VLLM_PRODUCT_E4M3

// Eight rows of 32 bytes, not swizzled: the rows' first 16 bytes one after another, then the rest.
__device__ inline uint64_t runs_descriptor(const void* runs) {
  return (uint64_t{128 >> 4} << 32) | (uint64_t{128 >> 4} << 16) |
         ((shared_address(runs) & 0x3FFFF) >> 4);
}

// The left operand from registers: rows lane / 4 and + 8 of the warp's 16, columns
// 4 * (lane % 4) + {0, 1, 2, 3} and + 16.
__device__ inline void product_e4m3(float (&d)[4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}"
      ", {%4, %5, %6, %7}, %8, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef VLLM_F8
#undef VLLM_F32
#undef VLLM_R8
#undef VLLM_R16
#undef VLLM_R32
#undef VLLM_R40
#undef VLLM_R48
#undef VLLM_R56
#undef VLLM_R64
#undef VLLM_R72
#undef VLLM_R80
#undef VLLM_R128
#undef VLLM_O8
#undef VLLM_O16
#undef VLLM_O32
#undef VLLM_O40
#undef VLLM_O48
#undef VLLM_O56
#undef VLLM_O64
#undef VLLM_O72
#undef VLLM_O80
#undef VLLM_O128

}  // namespace vllm_cuda
