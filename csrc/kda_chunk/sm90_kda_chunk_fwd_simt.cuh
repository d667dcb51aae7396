// The wrappers of ../common/ptx.cuh for a CPU, over the fibers of sm90_kda_chunk_bwd_simt.cuh, so that the forward's own
// source runs there: every index, fragment, swizzle, descriptor, barrier phase and stage reuse. See that file for what this
// shows (shared memory starts as NaN, copies land as late as the waits allow) and what it cannot (speed, proxies, memory model).
#pragma once

#include <stdint.h>

#include "sm90_kda_chunk_bwd_simt.cuh"

#define __grid_constant__

struct uint2 { uint32_t x, y; };
struct __nv_bfloat16 { uint16_t bits; };
using cudaError_t = int;
using cudaStream_t = void*;

inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
inline uint16_t megamoe_bf16_bits(float x) {  // round to nearest even; NaN stays NaN
  const uint32_t u = __float_as_uint(x);
  if (x != x) return uint16_t(u >> 16 | 64);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {megamoe_bf16_bits(x)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
inline T min(T a, T b) { return a < b ? a : b; }

// Shuffles: each lane offers a value and names the lane it takes one from.
struct MegamoeShuffle { uint32_t given; int source; uint32_t* taken; };
template <class T>
inline T megamoe_shuffle(T x, int source) {
  uint32_t bits, taken;
  memcpy(&bits, &x, 4);
  MegamoeShuffle mine{bits, source, &taken};
  megamoe::simt::warp_collective(&mine, [](void** args) {
    for (int lane = 0; lane < 32; lane++) {
      auto& m = *static_cast<MegamoeShuffle*>(args[lane]);
      *m.taken = static_cast<MegamoeShuffle*>(args[m.source])->given;
    }
  });
  T result;
  memcpy(&result, &taken, 4);
  return result;
}
inline int megamoe_lane() { return megamoe::simt::block->current % 32; }
template <class T>
inline T __shfl_sync(unsigned, T x, int source) { return megamoe_shuffle(x, source & 31); }
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) { return megamoe_shuffle(x, megamoe_lane() ^ mask); }
template <class T>
inline T __shfl_up_sync(unsigned, T x, int delta) { return megamoe_shuffle(x, megamoe_lane() < delta ? megamoe_lane() : megamoe_lane() - delta); }

namespace megamoe::ptx {

namespace emulated = megamoe::kda_bwd;

inline uint8_t* dynamic_shared() { return emulated::dynamic_smem(); }
inline uint32_t smem_address(const void* pointer) { return emulated::smem_addr(pointer); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline uint32_t pack_bf16(float low, float high) { return megamoe_bf16_bits(low) | uint32_t(megamoe_bf16_bits(high)) << 16; }
inline float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
inline float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
inline float opaque_copy(float x) { return x; }

template <class T>
inline T load_shared(uint32_t address) { T x; memcpy(&x, emulated::at(address, sizeof(T), sizeof(T)), sizeof(T)); return x; }
template <class T>
inline void store_shared(uint32_t address, const T& x) { memcpy(emulated::at(address, sizeof(T), sizeof(T)), &x, sizeof(T)); }
inline uint32_t load_shared_32(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint2 load_shared_64(uint32_t address) { return load_shared<uint2>(address); }
inline uint4 load_shared_128(uint32_t address) { return load_shared<uint4>(address); }
inline void store_shared_16(uint32_t address, uint16_t x) { store_shared(address, x); }
inline void store_shared_32(uint32_t address, uint32_t x) { store_shared(address, x); }
inline void store_shared_64(uint32_t address, uint32_t x, uint32_t y) { store_shared(address, uint2{x, y}); }
inline void store_shared_128(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { store_shared(address, uint4{x, y, z, w}); }
inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) { emulated::ldsm_any(x, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) { emulated::ldsm_any(x, address, true); }
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&x)[4]) { emulated::stsm_any(address, x, true); }
inline void stmatrix_x4(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t packed[4] = {x, y, z, w};
  emulated::stsm_any(address, packed, false);
}
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emulated::mma(d, a, b0, b1); }

inline void cp_async_16(uint32_t destination, const void* source, bool valid) { emulated::cp_async16(destination, source, valid); }
inline void cp_async_16(uint32_t destination, const void* source) { emulated::cp_async16(destination, source, true); }
inline void cp_async_arrive(uint32_t barrier) { emulated::mbar_arrive_after_cp_async(barrier); }
inline void cp_async_commit() { emulated::cp_async_commit(); }
template <int PENDING>
inline void cp_async_wait() { emulated::cp_async_wait<PENDING>(); }
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { emulated::mbar_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { emulated::mbar_arrive(barrier); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {  // passes when the phase of that parity has ended
  while (emulated::mbar(barrier).phase == int(parity)) simt::yield();
}
inline void fence_proxy_async() {}
template <int COUNT>
inline void register_increase() {}
template <int COUNT>
inline void register_decrease() {}

enum class Swizzle : uint32_t { kNone = 0, k128B = 1 };
struct Descriptor {
  uint32_t low, high;
  Descriptor operator+(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  bool operator!=(const Descriptor& other) const { return low != other.low || high != other.high; }
};
inline Descriptor descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return {(address >> 4) | (leading >> 4) << 16, (stride >> 4) | static_cast<uint32_t>(swizzle) << 30};
}
// Element (n, k) of a K-major B operand, as the hardware reads the descriptor's fields.
inline float operand(const Descriptor& b, int n, int k) {
  const uint32_t start = (b.low & 0x3fff) << 4, leading = (b.low >> 16 & 0x3fff) << 4, stride = (b.high & 0x3fff) << 4;
  uint32_t address;
  if (b.high >> 30 == uint32_t(Swizzle::k128B)) {
    address = start + (n / 8) * stride + (n % 8) * 128 + k * 2;
    address ^= (address >> 7 & 7) << 4;
  } else {
    address = start + (n / 8) * stride + (k / 8) * leading + (n % 8) * 16 + (k % 8) * 2;
  }
  return __uint_as_float(uint32_t(load_shared<uint16_t>(address)) << 16);
}
struct Product { float* d; const uint32_t* a; Descriptor b; int accumulate; };
template <int N>
inline void product(float* d, const uint32_t* a, Descriptor b, int accumulate) {
  Product mine{d, a, b, accumulate};
  simt::collective(simt::block->warpgroups[simt::block->current / 128], 128, &mine, [](void** args) {
    const Product& first = *static_cast<Product*>(args[0]);
    static float B[16][N];
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < N; n++) B[k][n] = operand(first.b, n, k);
    for (int warp = 0; warp < 4; warp++) {
      float A[16][16];
      for (int lane = 0; lane < 32; lane++) {
        const Product& m = *static_cast<Product*>(args[warp * 32 + lane]);
        if (m.b != first.b || m.accumulate != first.accumulate) {
          fprintf(stderr, "simt: a warpgroup's threads disagree about a product\n");
          abort();
        }
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 4; e++) {
          A[g + 8 * (e & 1)][2 * t + 8 * (e >> 1)] = low_bf16(m.a[e]);
          A[g + 8 * (e & 1)][2 * t + 8 * (e >> 1) + 1] = high_bf16(m.a[e]);
        }
      }
      for (int lane = 0; lane < 32; lane++) {
        const Product& m = *static_cast<Product*>(args[warp * 32 + lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < N / 2; i++) {
          const int row = g + 8 * (i >> 1 & 1), column = 8 * (i >> 2) + 2 * t + (i & 1);
          float sum = m.accumulate ? m.d[i] : 0.0f;
          for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][column];
          m.d[i] = sum;
        }
      }
    }
  });
}
inline void wgmma_n16(float (&d)[8], const uint32_t (&a)[4], Descriptor b, int accumulate) { product<16>(d, a, b, accumulate); }
inline void wgmma_n32(float (&d)[16], const uint32_t (&a)[4], Descriptor b, int accumulate) { product<32>(d, a, b, accumulate); }
inline void wgmma_n128(float (&d)[64], const uint32_t (&a)[4], Descriptor b, int accumulate) { product<128>(d, a, b, accumulate); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <int COUNT>
inline void wgmma_hold(float (&)[COUNT]) {}

}  // namespace megamoe::ptx
