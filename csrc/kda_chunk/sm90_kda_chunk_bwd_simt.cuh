// Runs the KDA backward's kernels on a CPU: one fiber per CUDA thread, blocks one after the other.
//
// What it shows: every index, mask, fragment layout, barrier and buffer reuse of the real source. Shared memory starts as NaN;
// asynchronous copies are delivered only when somebody waits for them, so a missing wait reads NaN; a missing barrier usually
// reads stale data because fibers run one at a time until they block. What it cannot show: speed, memory-model subtleties,
// fences between proxies. A block in which every fiber waits is reported as a deadlock.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __shared__ static  // blocks run one after the other
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace megamoe::simt {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  std::vector<std::vector<std::function<void()>>> groups{1};       // cp.async groups, the last one open
};
struct Collective { int count = 0; uint64_t generation = 0; void* args[128]; };
struct Barrier { int count = 0; uint64_t generation = 0; };
struct Mbar { int phase = 0, expected = 0, missing = 0; int64_t bytes = 0; std::vector<std::function<void()>> copies; };

struct Block {
  std::vector<Fiber> fibers;
  std::vector<unsigned char> smem;
  std::vector<Collective> warps, warpgroups;
  Barrier barriers[16];
  std::vector<std::pair<uint32_t, Mbar>> mbars;
  ucontext_t scheduler;
  int current = 0, live = 0;
  uint64_t progress = 0;
};
inline Block* block = nullptr;
inline std::function<void()> body;
inline dim3 grid_dim, block_dim, block_idx;

inline void yield() { swapcontext(&block->fibers[block->current].context, &block->scheduler); }
inline void entry() {
  body();
  block->fibers[block->current].done = true;
  block->progress++;
  yield();
}

inline void barrier_wait(Barrier& b, int threads) {
  uint64_t mine = b.generation;
  block->progress++;
  if (++b.count == threads) {
    b.count = 0;
    b.generation++;
    return;
  }
  while (b.generation == mine) yield();
  block->progress++;
}

// All lanes of a warp or warpgroup deposit a pointer; the last to arrive computes for everybody.
template <class F>
inline void collective(Collective& c, int lanes, void* mine, F compute) {
  c.args[block->current % lanes] = mine;
  uint64_t generation = c.generation;
  block->progress++;
  if (++c.count == lanes) {
    compute(c.args);
    c.count = 0;
    c.generation++;
  } else {
    while (c.generation == generation) yield();
  }
}
template <class F>
inline void warp_collective(void* mine, F compute) {
  collective(block->warps[block->current / 32], 32, mine, compute);
}

template <class Kernel>
inline void launch(dim3 grid, int threads, size_t smem_bytes, Kernel kernel) {
  grid_dim = grid;
  block_dim = dim3(threads);
  body = kernel;
  Block b;
  b.fibers.resize(threads);
  for (auto& f : b.fibers) f.stack.resize(128 << 10);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        block = &b;
        block_idx = dim3(x, y, z);
        b.smem.assign(smem_bytes + 16, 0xff);  // every float and bf16 is NaN
        b.warps.assign((threads + 31) / 32, Collective());
        b.warpgroups.assign((threads + 127) / 128, Collective());
        b.mbars.clear();
        for (auto& bar : b.barriers) bar = Barrier();
        b.live = threads;
        for (auto& f : b.fibers) {
          f.done = false;
          f.groups.assign(1, {});
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data();
          f.context.uc_stack.ss_size = f.stack.size();
          f.context.uc_link = nullptr;
          makecontext(&f.context, entry, 0);
        }
        for (int alive = threads; alive;) {
          uint64_t before = b.progress;
          alive = 0;
          for (b.current = 0; b.current < threads; b.current++) {
            if (b.fibers[b.current].done) continue;
            swapcontext(&b.scheduler, &b.fibers[b.current].context);
            alive += !b.fibers[b.current].done;
          }
          if (alive && before == b.progress) {
            fprintf(stderr, "simt: deadlock in block %u, %d threads wait\n", x, alive);
            abort();
          }
        }
      }
}

struct ThreadIndex { operator unsigned() const { return block->current; } };
}  // namespace megamoe::simt

struct { megamoe::simt::ThreadIndex x; } static threadIdx;
#define blockIdx (megamoe::simt::block_idx)
#define gridDim (megamoe::simt::grid_dim)
#define blockDim (megamoe::simt::block_dim)

inline void __syncthreads() { megamoe::simt::barrier_wait(megamoe::simt::block->barriers[0], blockDim.x); }
inline void __syncwarp() { megamoe::simt::warp_collective(nullptr, [](void**) {}); }

namespace megamoe::kda_bwd {
using simt::block;

inline unsigned char* dynamic_smem() { return (unsigned char*)((((uintptr_t)block->smem.data()) + 15) & ~uintptr_t(15)); }
inline uint32_t smem_addr(const void* p) { return (uint32_t)((const unsigned char*)p - dynamic_smem()); }
inline unsigned char* at(uint32_t addr, size_t bytes, size_t align) {
  if (addr + bytes > block->smem.size() - 16 || addr % align) {
    fprintf(stderr, "simt: shared address %u (+%zu) out of range or not aligned to %zu\n", addr, bytes, align);
    abort();
  }
  return dynamic_smem() + addr;
}

struct MatrixArgs { uint32_t* r; uint32_t addr; };
inline void ldsm_any(uint32_t* r, uint32_t addr, bool trans) {
  MatrixArgs a{r, addr};
  simt::warp_collective(&a, [trans](void** args) {
    for (int m = 0; m < 4; m++) {
      uint16_t tile[8][8];
      for (int row = 0; row < 8; row++) memcpy(tile[row], at(((MatrixArgs*)args[8 * m + row])->addr, 16, 16), 16);
      for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        uint16_t lo = trans ? tile[2 * t][g] : tile[g][2 * t], hi = trans ? tile[2 * t + 1][g] : tile[g][2 * t + 1];
        ((MatrixArgs*)args[lane])->r[m] = lo | ((uint32_t)hi << 16);
      }
    }
  });
}
inline void stsm_any(uint32_t addr, const uint32_t* r, bool trans) {
  MatrixArgs a{(uint32_t*)r, addr};
  simt::warp_collective(&a, [trans](void** args) {
    for (int m = 0; m < 4; m++) {
      uint16_t tile[8][8];
      for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        uint32_t x = ((MatrixArgs*)args[lane])->r[m];
        (trans ? tile[2 * t][g] : tile[g][2 * t]) = x & 0xffff;
        (trans ? tile[2 * t + 1][g] : tile[g][2 * t + 1]) = x >> 16;
      }
      for (int row = 0; row < 8; row++) memcpy(at(((MatrixArgs*)args[8 * m + row])->addr, 16, 16), tile[row], 16);
    }
  });
}
inline void ldsm4(uint32_t (&r)[4], uint32_t addr) { ldsm_any(r, addr, false); }
inline void ldsm4_t(uint32_t (&r)[4], uint32_t addr) { ldsm_any(r, addr, true); }
inline void stsm4(uint32_t addr, const uint32_t (&r)[4]) { stsm_any(addr, r, false); }
inline void stsm4_t(uint32_t addr, const uint32_t (&r)[4]) { stsm_any(addr, r, true); }

inline float bits_to_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
struct MmaArgs { float* d; const uint32_t* a; uint32_t b0, b1; };
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaArgs mine{d, a, b0, b1};
  simt::warp_collective(&mine, [](void** args) {
    float A[16][16], B[16][8];
    auto half = [](uint32_t x, int i) { return bits_to_float(i ? (x & 0xffff0000u) : (x << 16)); };
    for (int lane = 0; lane < 32; lane++) {
      auto& m = *(MmaArgs*)args[lane];
      int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 2; i++) {
        A[g][2 * t + i] = half(m.a[0], i), A[g + 8][2 * t + i] = half(m.a[1], i);
        A[g][2 * t + 8 + i] = half(m.a[2], i), A[g + 8][2 * t + 8 + i] = half(m.a[3], i);
        B[2 * t + i][g] = half(m.b0, i), B[2 * t + 8 + i][g] = half(m.b1, i);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      auto& m = *(MmaArgs*)args[lane];
      int g = lane / 4, t = lane % 4;
      for (int e = 0; e < 4; e++) {
        int row = g + 8 * (e / 2), col = 2 * t + e % 2;
        float sum = m.d[e];
        for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][col];
        m.d[e] = sum;
      }
    }
  });
}

inline uint32_t wgmma_operand(uint32_t addr) { return addr; }
constexpr uint32_t wgmma_bytes(uint32_t bytes) { return bytes; }
struct WgmmaArgs { float (*d)[4]; uint32_t a, b; bool accumulate; };
// Element (row, column) of an operand: the swizzle is on address bits, as the hardware has it.
inline float wgmma_element(uint32_t addr, int row, int column) {
  uint32_t x = addr + (row / 8) * 1024 + (row % 8) * 128 + column * 2;
  uint16_t bits;
  memcpy(&bits, at(x ^ ((x >> 7 & 7) << 4), 2, 2), 2);
  return bits_to_float((uint32_t)bits << 16);
}
template <bool kTransA, bool kTransB>
inline void wgmma_m64n32(float (&d)[4][4], uint32_t a, uint32_t b, bool accumulate) {
  WgmmaArgs mine{d, a, b, accumulate};
  simt::collective(block->warpgroups[block->current / 128], 128, &mine, [](void** args) {
    auto& first = *(WgmmaArgs*)args[0];
    std::vector<float> A(64 * 16), B(16 * 32);
    for (int k = 0; k < 16; k++) {
      for (int m = 0; m < 64; m++) A[m * 16 + k] = kTransA ? wgmma_element(first.a, k, m) : wgmma_element(first.a, m, k);
      for (int n = 0; n < 32; n++) B[k * 32 + n] = kTransB ? wgmma_element(first.b, k, n) : wgmma_element(first.b, n, k);
    }
    for (int thread = 0; thread < 128; thread++) {
      auto& mine = *(WgmmaArgs*)args[thread];
      if (mine.a != first.a || mine.b != first.b || mine.accumulate != first.accumulate) {
        fprintf(stderr, "simt: a warpgroup's threads disagree about a product\n");
        abort();
      }
      int w = thread / 32, g = thread % 32 / 4, t = thread % 4;
      for (int n = 0; n < 4; n++)
        for (int e = 0; e < 4; e++) {
          int row = 16 * w + g + 8 * (e / 2), col = n * 8 + 2 * t + e % 2;
          float sum = mine.accumulate ? mine.d[n][e] : 0.f;
          for (int k = 0; k < 16; k++) sum += A[row * 16 + k] * B[k * 32 + col];
          mine.d[n][e] = sum;
        }
    }
  });
}
inline void wgmma_begin() {}
inline void wgmma_end() {}
inline void wgmma_settle(float (&)[4][4]) {}
inline void fence_async_proxy() {}

inline void cp_async16(uint32_t dst, const void* src, bool valid) {
  unsigned char* d = at(dst, 16, 16);
  if (valid && (uintptr_t)src % 16) {
    fprintf(stderr, "simt: cp.async source not 16-byte aligned\n");
    abort();
  }
  block->fibers[block->current].groups.back().push_back([=] { valid ? (void)memcpy(d, src, 16) : (void)memset(d, 0, 16); });
}
inline void cp_async_commit() { block->fibers[block->current].groups.emplace_back(); }
template <int kPending>
inline void cp_async_wait() {
  auto& groups = block->fibers[block->current].groups;
  while ((int)groups.size() - 1 > kPending) {
    for (auto& c : groups.front()) c();
    groups.erase(groups.begin());
  }
}
inline simt::Mbar& mbar(uint32_t bar) {
  for (auto& m : block->mbars)
    if (m.first == bar) return m.second;
  fprintf(stderr, "simt: mbarrier at %u was not initialised\n", bar);
  abort();
}
inline void mbar_init(uint32_t bar, uint32_t arrivals) {
  simt::Mbar m;
  m.expected = m.missing = arrivals;
  block->mbars.push_back({bar, m});
}
// A phase ends when its arrivals and bytes are in; its copies are delivered at that moment, not before.
inline void mbar_settle(simt::Mbar& m) {
  block->progress++;
  if (m.missing || m.bytes) return;
  for (auto& c : m.copies) c();
  m.copies.clear(), m.missing = m.expected, m.phase ^= 1;
}
inline void mbar_arrive(uint32_t bar) { mbar(bar).missing--, mbar_settle(mbar(bar)); }
inline void mbar_expect(uint32_t bar, uint32_t bytes) { mbar(bar).bytes += bytes, mbar_arrive(bar); }
inline void mbar_arrive_after_cp_async(uint32_t bar) {
  for (auto& group : block->fibers[block->current].groups) {
    for (auto& c : group) mbar(bar).copies.push_back(c);
    group.clear();
  }
  mbar_arrive(bar);
}
inline void mbar_wait(uint32_t bar, uint32_t parity) {
  while (mbar(bar).phase == (int)parity) simt::yield();
}
inline void fence_mbar_init() {}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  unsigned char* d = at(dst, bytes, 16);
  if ((uintptr_t)src % 16 || bytes % 16) {
    fprintf(stderr, "simt: bulk load not 16-byte aligned\n");
    abort();
  }
  simt::Mbar& m = mbar(bar);
  m.bytes -= bytes;
  m.copies.push_back([=] { memcpy(d, src, bytes); });
  mbar_settle(m);
}
inline void bar_sync(int id, int threads) { simt::barrier_wait(block->barriers[id], threads); }
struct ShflArgs { float in, out; int mask; };
inline float shfl_xor(float x, int lane_mask) {
  ShflArgs mine{x, 0.f, lane_mask};
  simt::warp_collective(&mine, [](void** args) {
    for (int lane = 0; lane < 32; lane++) ((ShflArgs*)args[lane])->out = ((ShflArgs*)args[lane ^ ((ShflArgs*)args[lane])->mask])->in;
  });
  return mine.out;
}
inline float ex2(float x) {
  float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
inline float rcp(float x) { return 1.f / x; }
inline float max_nan(float x, float y) { return x != x || x > y ? x : y; }
inline int warp_uniform(int x) { return x; }
inline float rsqrt_fast(float x) { return 1.f / sqrtf(x); }
inline uint32_t round_bf16(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  if (f != f) return 0x7fff;
  return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}
inline uint32_t pack_bf16(float lo, float hi) { return (round_bf16(lo) & 0xffff) | (round_bf16(hi) << 16); }
}  // namespace megamoe::kda_bwd
