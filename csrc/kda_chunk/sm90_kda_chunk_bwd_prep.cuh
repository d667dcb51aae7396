// KDA backward, first kernels: where chunks lie, and everything of a chunk that needs no state.
#pragma once
#include "sm90_kda_chunk_bwd_common.cuh"

namespace megamoe::kda_bwd {

// One block: documents to chunks. Empty documents get no chunk; the table's tail stays unused.
constexpr int kMetaThreads = 1024;
__device__ __forceinline__ int64_t doc_start(const Args& p, int n) {
  if (!p.cu_seqlens) return n ? p.num_tokens : 0;
  return p.cu_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[n] : static_cast<const int*>(p.cu_seqlens)[n];
}
__global__ void __launch_bounds__(kMetaThreads) sm90_kda_bwd_meta(const Args p) {
  int* warp_sum = reinterpret_cast<int*>(dynamic_smem());  // two buffers of kMetaThreads: Hillis-Steele scan
  const int tid = threadIdx.x;
  int base = 0;
  for (int n0 = 0; n0 < p.num_docs; n0 += kMetaThreads) {
    int n = n0 + tid;
    int count = n < p.num_docs ? static_cast<int>((doc_start(p, n + 1) - doc_start(p, n) + kChunk - 1) / kChunk) : 0;
    int* from = warp_sum;
    int* to = warp_sum + kMetaThreads;
    from[tid] = count;
    __syncthreads();
    for (int step = 1; step < kMetaThreads; step <<= 1) {
      to[tid] = from[tid] + (tid >= step ? from[tid - step] : 0);
      __syncthreads();
      int* swap = from;
      from = to, to = swap;
    }
    if (n < p.num_docs) p.doc_chunk[n] = base + from[tid] - count;
    base += from[kMetaThreads - 1];
    __syncthreads();
  }
  if (tid == 0) p.doc_chunk[p.num_docs] = base;
  __syncthreads();
  for (int c = tid; c < p.max_chunks; c += kMetaThreads) {
    if (c >= base) {
      p.chunks[c] = make_int4(0, 0, 0, 0);
      continue;
    }
    int lo = 0, hi = p.num_docs;  // last document whose first chunk is <= c and that is not empty
    while (hi - lo > 1) {
      int mid = (lo + hi) >> 1;
      (p.doc_chunk[mid] <= c ? lo : hi) = mid;
    }
    int64_t start = doc_start(p, lo), end = doc_start(p, lo + 1), token = start + static_cast<int64_t>(c - p.doc_chunk[lo]) * kChunk;
    p.chunks[c] = make_int4(static_cast<int>(token), static_cast<int>(end - token < kChunk ? end - token : kChunk), lo, 0);
  }
}

// A (I,K) fp32 tile product from split bf16 operands, hi·hi + hi·lo + lo·hi: error near 2^-16.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
  hi = pack_bf16(x, y);
  lo = pack_bf16(x - bf_lo(hi), y - bf_hi(hi));
}
__device__ __forceinline__ void mma_split16(float (&acc)[2][4], const float* a, int lda, const float* b, int ldb, int lane) {
  const int g = lane >> 2, t = lane & 3;
  uint32_t ah[4], al[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* x = a + (g + (i & 1) * 8) * lda + 2 * t + (i >> 1) * 8;
    split_pair(x[0], x[1], ah[i], al[i]);
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    uint32_t bh[2], bl[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* x = b + (2 * t + i * 8) * ldb + n * 8 + g;
      split_pair(x[0], x[ldb], bh[i], bl[i]);
    }
    mma(acc[n], ah, bh[0], bh[1]);
    mma(acc[n], ah, bl[0], bl[1]);
    mma(acc[n], al, bh[0], bh[1]);
  }
}

// Shared memory of the prep kernel, bytes. L overlays the rescaled columns, the inverse overlays k and q, once their products are done.
constexpr int kPrepThreads = 256;
constexpr int kLd = 68;  // fp32 row of a 64-wide matrix
struct PrepSmem {
  static constexpr int k = 0, q = k + kImage128, kd = q + kImage128, ko = kd + kImage128;  // ko: six [16][128] tiles
  static constexpr int l = ko, x = l + kChunk * kLd * 4, inverse = k;
  static constexpr int total = ko + 6 * kTile * 256;  // per-tile gate sums
  static constexpr int first = total + kTiles * kDim * 4, rstd = first + kTiles * kDim * 4, beta = rstd + 2 * kChunk * 4, bytes = beta + kChunk * 4;
};
static_assert(PrepSmem::x + 3 * kTile * 20 * 4 <= PrepSmem::total, "L and the merge's temporaries must fit over the rescaled columns");

__global__ void __launch_bounds__(kPrepThreads, 2) sm90_kda_bwd_prep(const Args p) {
  const int hl = blockIdx.x % p.heads, chunk = blockIdx.x / p.heads, head = p.head0 + hl;
  if (chunk >= p.doc_chunk[p.num_docs]) return;
  const int4 info = p.chunks[chunk];
  const int64_t token0 = info.x;
  const int rows = info.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const size_t image = static_cast<size_t>(chunk) * p.heads + hl;
  unsigned char* sm = dynamic_smem();
  const uint32_t base = smem_addr(sm);
  float* total = reinterpret_cast<float*>(sm + PrepSmem::total);
  float* first = reinterpret_cast<float*>(sm + PrepSmem::first);
  float* rstd = reinterpret_cast<float*>(sm + PrepSmem::rstd);
  float* beta = reinterpret_cast<float*>(sm + PrepSmem::beta);

  load_image128(base + PrepSmem::k, p.k, token0, rows, head, tid, kPrepThreads);
  load_image128(base + PrepSmem::q, p.q, token0, rows, head, tid, kPrepThreads);
  cp_async_commit();

  // Gate: a thread owns one tile's 16 rows of a channel pair, so the cumulative sum is a chain in registers.
  const int tile = tid >> 6, pair = tid & 63;
  const float rate2 = gate_rate2(p, head), lb2 = p.lower_bound * kLog2e;
  const float bias0 = p.dt_bias ? p.dt_bias[head * kDim + 2 * pair] : 0.f, bias1 = p.dt_bias ? p.dt_bias[head * kDim + 2 * pair + 1] : 0.f;
  float c0[kTile], c1[kTile];
  uint32_t raw[kTile];
#pragma unroll
  for (int r = 0; r < kTile; r++) {
    int row = tile * kTile + r;
    raw[r] = row < rows ? load_u32(p.g.at(token0 + row, head) + 2 * pair) : 0u;
  }
  float run0 = 0.f, run1 = 0.f;
#pragma unroll
  for (int r = 0; r < kTile; r++) {
    if (tile * kTile + r < rows) {
      float s0, s1, unused;
      sigmoid2(rate2 * (bf_lo(raw[r]) + bias0), s0, unused);
      sigmoid2(rate2 * (bf_hi(raw[r]) + bias1), s1, unused);
      run0 += lb2 * s0, run1 += lb2 * s1;
    }
    c0[r] = run0, c1[r] = run1;
  }
  const float first0 = c0[0], first1 = c1[0];
  total[tile * kDim + 2 * pair] = run0, total[tile * kDim + 2 * pair + 1] = run1;
  first[tile * kDim + 2 * pair] = first0, first[tile * kDim + 2 * pair + 1] = first1;
  if (tid < kChunk) {
    float s = 0.f, unused;
    if (tid < rows) sigmoid2(load_beta_logit(p, token0 + tid, head) * kLog2e, s, unused);
    beta[tid] = s;
  }
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = warp * 8 + i * 2 + (lane >> 4);
    float sk = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + PrepSmem::k + off128(row, lane & 15)));
    float sq = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + PrepSmem::q + off128(row, lane & 15)));
    if ((lane & 15) == 0) rstd[row] = rsqrt_fast(sk + kL2Eps), rstd[kChunk + row] = rsqrt_fast(sq + kL2Eps) * p.scale;
  }
  __syncthreads();

  // Anchors: R_I is the cumulated gate at tile I's first row. Every exponent below is <= 0 up to the constant shift.
  float R0[kTiles], R1[kTiles], sum0 = 0.f, sum1 = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    R0[i] = sum0 + first[i * kDim + 2 * pair], R1[i] = sum1 + first[i * kDim + 2 * pair + 1];
    sum0 += total[i * kDim + 2 * pair], sum1 += total[i * kDim + 2 * pair + 1];
  }
  float own0 = R0[0], own1 = R1[0];
#pragma unroll
  for (int i = 1; i < kTiles; i++)
    if (tile == i) own0 = R0[i], own1 = R1[i];
  const float start0 = ex2(own0 - kShift), start1 = ex2(own1 - kShift), end0 = ex2(sum0 - own0 + kShift), end1 = ex2(sum1 - own1 + kShift);
  float hop0[kTiles], hop1[kTiles];
#pragma unroll
  for (int i = 1; i < kTiles; i++) hop0[i] = ex2(R0[i] - own0), hop1[i] = ex2(R1[i] - own1);
  if (tile == 0) {
    float* d = p.decay + image * kDim + 2 * pair;
    d[0] = ex2(sum0), d[1] = ex2(sum1);
  }
  unsigned char* ke = p.ke + image * kImage128;
  unsigned char* kg = p.kg + image * kImage128;
  unsigned char* qg = p.qg + image * kImage128;
#pragma unroll
  for (int r = 0; r < kTile; r++) {
    const int row = tile * kTile + r;
    const uint32_t off = off128_pair(row, pair);
    const uint32_t kr = load_u32(sm + PrepSmem::k + off), qr = load_u32(sm + PrepSmem::q + off);
    const float k0 = bf_lo(kr) * rstd[row], k1 = bf_hi(kr) * rstd[row], q0 = bf_lo(qr) * rstd[kChunk + row], q1 = bf_hi(qr) * rstd[kChunk + row];
    const float x0 = c0[r] - first0 + kShift, x1 = c1[r] - first1 + kShift;
    const float up0 = ex2(x0), up1 = ex2(x1), kd0 = k0 * ex2(-x0), kd1 = k1 * ex2(-x1);
    const float ki0 = k0 * up0, ki1 = k1 * up1, qi0 = q0 * up0, qi1 = q1 * up1;
    *reinterpret_cast<uint32_t*>(sm + PrepSmem::k + off) = pack_bf16(ki0, ki1);
    *reinterpret_cast<uint32_t*>(sm + PrepSmem::q + off) = pack_bf16(qi0, qi1);
    *reinterpret_cast<uint32_t*>(sm + PrepSmem::kd + off) = pack_bf16(kd0, kd1);
#pragma unroll
    for (int i = 1; i < kTiles; i++)
      if (i > tile) *reinterpret_cast<uint32_t*>(sm + PrepSmem::ko + (i * (i - 1) / 2 + tile) * kTile * 256 + off128_pair(r, pair)) = pack_bf16(kd0 * hop0[i], kd1 * hop1[i]);
    *reinterpret_cast<uint32_t*>(ke + off) = pack_bf16(ki0 * start0, ki1 * start1);
    *reinterpret_cast<uint32_t*>(kg + off) = pack_bf16(kd0 * end0, kd1 * end1);
    *reinterpret_cast<uint32_t*>(qg + off) = pack_bf16(qi0 * start0, qi1 * start1);
  }
  __syncthreads();

  // Scores: warps 0-3 the k·k rows of tile `it`, warps 4-7 the q·k rows.
  const int it = warp & 3;
  const bool is_q = warp >= 4;
  float acc[kTiles][2][4] = {};
  {
    const LaneBlock la = lane_straight(lane), lb = lane_crossed(lane);
    const uint32_t a_base = base + (is_q ? PrepSmem::q : PrepSmem::k);
#pragma unroll
    for (int ks = 0; ks < 8; ks++) {
      uint32_t a[4];
      ldsm4(a, a_base + off128(it * kTile + la.row, ks * 2 + la.unit));
#pragma unroll
      for (int j = 0; j < kTiles; j++)
        if (j <= it) {
          uint32_t b[4];
          ldsm4(b, base + (j == it ? PrepSmem::kd + j * kTile * 256 : PrepSmem::ko + (it * (it - 1) / 2 + j) * kTile * 256) + off128(lb.row, ks * 2 + lb.unit));
          mma(acc[j][0], a, b[0], b[1]);
          mma(acc[j][1], a, b[2], b[3]);
        }
    }
  }
  __syncthreads();
  const int g = lane >> 2, t = lane & 3;
  if (is_q) {
    unsigned char* out = p.p + image * kImage64;
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int row = it * kTile + g + half * 8, col = j * kTile + n * 8 + 2 * t;
          float x = col <= row ? acc[j][n][half * 2] : 0.f, y = col + 1 <= row ? acc[j][n][half * 2 + 1] : 0.f;
          *reinterpret_cast<uint32_t*>(out + off64_pair(row, col >> 1)) = pack_bf16(x, y);
        }
    return;
  }
  float* L = reinterpret_cast<float*>(sm + PrepSmem::l);
  float* inv = reinterpret_cast<float*>(sm + PrepSmem::inverse);
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = it * kTile + g + half * 8, col = j * kTile + n * 8 + 2 * t;
        L[row * kLd + col] = col < row ? acc[j][n][half * 2] * beta[row] : 0.f;
        L[row * kLd + col + 1] = col + 1 < row ? acc[j][n][half * 2 + 1] * beta[row] : 0.f;
      }
  bar_sync(1, 128);

  // Inverse of I + L: a lane owns a column of its warp's diagonal tile, then blocks by their distance from the diagonal.
  {
    const int col = lane & 15;
    const float* tileL = L + it * kTile * kLd + it * kTile;
    float x[kTile];
#pragma unroll
    for (int r = 0; r < kTile; r++) {
      float s = r == col ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < r; m++) s -= tileL[r * kLd + m] * x[m];
      x[r] = s;
    }
    if (lane < 16)
#pragma unroll
      for (int r = 0; r < kTile; r++) inv[(it * kTile + r) * kLd + it * kTile + col] = x[r];
  }
  bar_sync(1, 128);
  float* tmp = reinterpret_cast<float*>(sm + PrepSmem::x) + it * kTile * 20;
  for (int distance = 1; distance < kTiles; distance++) {
    if (it < kTiles - distance) {
      const int j = it, i = it + distance;
      float s[2][4] = {};
      for (int m = j; m < i; m++) mma_split16(s, L + i * kTile * kLd + m * kTile, kLd, inv + m * kTile * kLd + j * kTile, kLd, lane);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) tmp[(g + (e >> 1) * 8) * 20 + n * 8 + 2 * t + (e & 1)] = s[n][e], s[n][e] = 0.f;
      __syncwarp();
      mma_split16(s, inv + i * kTile * kLd + i * kTile, kLd, tmp, 20, lane);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) inv[(i * kTile + g + (e >> 1) * 8) * kLd + j * kTile + n * 8 + 2 * t + (e & 1)] = -s[n][e];
    }
    bar_sync(1, 128);
  }
  unsigned char* out = p.a + image * kImage64;
  for (int i = tid; i < kChunk * 32; i += 128) {
    int row = i >> 5, col = (i & 31) * 2;
    bool below = (col >> 4) <= (row >> 4);  // tiles above the diagonal were never written
    float x = below ? inv[row * kLd + col] * beta[col] : 0.f, y = below ? inv[row * kLd + col + 1] * beta[col + 1] : 0.f;
    *reinterpret_cast<uint32_t*>(out + off64_pair(row, col >> 1)) = pack_bf16(x, y);
  }
}

}  // namespace megamoe::kda_bwd
