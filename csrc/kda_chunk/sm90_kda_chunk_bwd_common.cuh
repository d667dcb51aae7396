// Shared by the KDA backward's kernels: arguments, workspace, shared-memory images, fragment addresses, the gate.
//
// Per chunk of 64 rows and head (formulas and their names: megamoe/ops/kda_chunk/emulate_bwd.py, the CPU twin):
//   prep   q k g β          -> ke = k e^G, kg = k e^(G_C-G), qg = q̂ e^G, A' = (I+L)^-1 diag(β), P, e^(G_C)
//   scan   ke kg A' v       -> S entering each chunk, v~                        (forward in time)
//          kg ke qg A' P do -> dS leaving each chunk, dv, d(initial state)      (backward in time, same grid)
//   maps, chain             -> the state and its gradient at the borders of segments     (few heads; segment_maps.cuh)
//   grad   prep's and scan's -> dq dk dg dβ, partial sums of dA_log and d dt_bias
//   sum    partial sums     -> dA_log, d dt_bias                                (fixed order)
//
// Everything between kernels lies in global memory as the shared-memory image the next kernel wants, moved by bulk copies.
// An image of R rows and 64 or 128 bf16 columns stores the 16-byte unit u of row r at unit u ^ (r & 7): eight consecutive
// rows of one unit fall into eight different bank groups, which is what ldmatrix reads. Operands of warpgroup products (S, dS and,
// in the gradient kernel, do and dv) are kept as two halves of 64 columns, each an image of 64: the hardware's 128-byte swizzle.
#pragma once
#include <stddef.h>

#include "segment_maps.cuh"
#include "sm90_kda_chunk_bwd_prims.cuh"

namespace megamoe::kda_bwd {

constexpr int kChunk = 64, kTile = 16, kTiles = 4, kDim = 128;
constexpr int kImage128 = kChunk * kDim * 2;   // ke, kg, qg: [64][128]; v~ transposed: [128][64]
constexpr int kImageState = kDim * kDim * 2;   // S, dS transposed: [v][c], in halves of c
constexpr int kImage64 = kChunk * kChunk * 2;  // A', P: [i][j]
constexpr int kSegment = kda::kBackwardSegment, kSegmentChunks = kSegment / kChunk;  // rows and chunks between two cuts
static_assert(kSegment % kChunk == 0);
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kShift = 15.f * kLog2e;  // constant share of a tile's exponent given to the row factor
constexpr float kL2Eps = 1e-6f;

// (T, H, 128) bf16 tensor with unit stride in the last dimension; strides in elements. Token numbers and strides fit 32 bits (the
// entry checks), their products do not: one widening multiplication each.
struct Rows {
  const uint16_t* ptr;
  int token_stride, head_stride;
  __device__ __forceinline__ const uint16_t* at(int token, int head) const { return ptr + static_cast<int64_t>(token) * token_stride + static_cast<int64_t>(head) * head_stride; }
};
struct OutRows {
  uint16_t* ptr;
  int token_stride, head_stride;
  __device__ __forceinline__ uint16_t* at(int token, int head) const { return ptr + static_cast<int64_t>(token) * token_stride + static_cast<int64_t>(head) * head_stride; }
};

struct Args {
  Rows q, k, v, g, dout;
  OutRows dq, dk, dv, dg;
  const void* beta;  // (T, H) logits, bf16 or fp32
  void* dbeta;       // same dtype, strides as beta's
  int beta_token_stride, beta_head_stride, dbeta_token_stride, dbeta_head_stride;
  int beta_is_fp32;
  const float* a_log;           // (H,) or null (zero)
  const float* dt_bias;         // (H, 128) or null
  const float* initial_state;   // (N, H, K, V) or null
  const float* dfinal_state;    // (N, H, K, V) or null
  float* da_log;                // (H,)
  float* ddt_bias;              // (H, 128)
  float* dinitial_state;        // (N, H, K, V) or null
  const void* cu_seqlens;       // (N+1,) int32 or int64, or null: one document
  int cu_is_int64;
  int64_t num_tokens;
  int num_docs, num_heads;
  float scale, lower_bound;

  // Filled in by the launcher.
  int head0, heads;     // this pass's heads
  int max_chunks;       // T/64 + N, a bound known without reading cu_seqlens
  int* doc_chunk;       // (N+1,) first chunk of each document
  int4* chunks;         // (max_chunks,) {first token, rows, document, 0}
  unsigned char *ke, *kg, *qg, *a, *p, *vt, *s, *ds;  // images, index chunk * heads + head
  float* decay;         // (chunks, heads, 128) e^(G_C)
  float* borders;       // (num_borders, H, 4, 128, 128): see chain_segments; few heads only, all of them in one pass
  int num_borders;      // 0: no document is cut
  float* da_part;       // (max_chunks, H)
  float* dbias_part;    // (max_chunks, H, 128)
};

__device__ __forceinline__ uint32_t off128(int row, int unit) { return row * 256 + ((unit ^ (row & 7)) << 4); }
__device__ __forceinline__ uint32_t off64(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
// 128 columns as two images of 64, `rows` rows each.
__device__ __forceinline__ uint32_t off_halves(int row, int unit, int rows) { return (unit >> 3) * rows * 128 + off64(row, unit & 7); }
// Byte offset of the column pair (2 pair, 2 pair + 1).
__device__ __forceinline__ uint32_t off128_pair(int row, int pair) { return off128(row, pair >> 2) + (pair & 3) * 4; }
__device__ __forceinline__ uint32_t off64_pair(int row, int pair) { return off64(row, pair >> 2) + (pair & 3) * 4; }

// This lane's row and 16-byte unit, relative to a 16x16 block, for the four ways of reading an operand.
struct LaneBlock { int row, unit; };
// Blocks further right flip bits 5-7 of the swizzled offset (XOR with 32 * block), blocks further down add 16 rows: from one lane
// offset, (offset ^ (n << 5)) + k * 16 * row_bytes is block (k, n). Image addresses are multiples of 256.
// A from [m][k], or B from [k][n] with ldsm4_t (two n-tiles: r0 r1, r2 r3).
__device__ __forceinline__ LaneBlock lane_straight(int lane) { return {lane & 15, lane >> 4}; }
// A from [k][m] with ldsm4_t, or B from [n][k] with ldsm4 (two n-tiles: r0 r1, r2 r3).
__device__ __forceinline__ LaneBlock lane_crossed(int lane) { return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1}; }

__device__ __forceinline__ uint32_t lane_off128(LaneBlock b) { return off128(b.row, b.unit); }
__device__ __forceinline__ uint32_t lane_off64(LaneBlock b) { return off64(b.row, b.unit); }
__device__ __forceinline__ uint32_t block128(uint32_t lane_offset, int k, int n) { return (lane_offset ^ (n << 5)) + k * 4096; }
__device__ __forceinline__ uint32_t block64(uint32_t lane_offset, int k, int n) { return (lane_offset ^ (n << 5)) + k * 2048; }

__device__ __forceinline__ void pack_a(uint32_t (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
  a[0] = pack_bf16(c0[0], c0[1]), a[1] = pack_bf16(c0[2], c0[3]);
  a[2] = pack_bf16(c1[0], c1[1]), a[3] = pack_bf16(c1[2], c1[3]);
}
__device__ __forceinline__ void negate_a(uint32_t (&out)[4], const uint32_t (&in)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = in[i] ^ 0x80008000u;
}

// σ(x) and 1 - σ(x), both to full relative precision; x comes in already times log2 e.
__device__ __forceinline__ void sigmoid2(float x2, float& s, float& one_minus_s) {
  const float e = ex2(-max_nan(x2, -126.f));
  s = rcp(1.f + e);
  one_minus_s = e * s;
}
__device__ __forceinline__ float sigmoid2(float x2) { return rcp(1.f + ex2(-max_nan(x2, -126.f))); }
__device__ __forceinline__ int64_t doc_start(const Args& p, int n) {
  if (!p.cu_seqlens) return n ? p.num_tokens : 0;
  return p.cu_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[n] : static_cast<const int*>(p.cu_seqlens)[n];
}
struct DocumentStart {
  const Args& p;
  __device__ __forceinline__ int operator()(int n) const { return static_cast<int>(doc_start(p, n)); }
};
__device__ __forceinline__ float load_beta_logit(const Args& p, int token, int head) {
  const int64_t i = static_cast<int64_t>(token) * p.beta_token_stride + static_cast<int64_t>(head) * p.beta_head_stride;
  return p.beta_is_fp32 ? static_cast<const float*>(p.beta)[i] : bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.beta)[i]) << 16);
}
__device__ __forceinline__ uint32_t load_u32(const void* p) { return *static_cast<const uint32_t*>(p); }
__device__ __forceinline__ float gate_rate2(const Args& p, int head) { return (p.a_log ? ex2(p.a_log[head] * kLog2e) : 1.f) * kLog2e; }

// Loads up to 64 rows of one head into a [64][128] image, zero beyond `rows`; threads 0..kThreads-1 take part.
template <int kThreads, bool kHalves = false>
__device__ __forceinline__ void load_image128(uint32_t dst, const Rows& src, int token0, int rows, int head, int tid) {
  constexpr int kStep = kThreads / 16;  // rows; a multiple of 8, so the swizzle repeats
  const int row = tid >> 4, unit = tid & 15;
  const uint16_t* from = src.at(token0 + row, head) + unit * 8;
  const uint32_t to = dst + (kHalves ? off_halves(row, unit, kChunk) : off128(row, unit));
#pragma unroll
  for (int i = 0; i < kChunk / kStep; i++) {
    cp_async16(to + i * kStep * (kHalves ? 128 : 256), from, row + i * kStep < rows);
    from += kStep * static_cast<int64_t>(src.token_stride);
  }
}
// 1/||x|| of rows of an image, half a warp a row: lane's 16-byte unit -> the row's sum over 16 lanes.
__device__ __forceinline__ float sum_squares_half_warp(uint4 x) {
  float s = 0.f;
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) s += bf_lo(w[i]) * bf_lo(w[i]), s += bf_hi(w[i]) * bf_hi(w[i]);
#pragma unroll
  for (int m = 8; m; m >>= 1) s += shfl_xor(s, m);
  return s;
}

}  // namespace megamoe::kda_bwd
