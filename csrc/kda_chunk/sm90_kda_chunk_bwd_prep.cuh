// KDA backward, first kernels: where chunks lie, and everything of a chunk that needs no state.
#pragma once
#include "sm90_kda_chunk_bwd_common.cuh"

namespace megamoe::kda_bwd {

// One block: documents to chunks. Empty documents get no chunk; the table's tail stays unused.
constexpr int kMetaThreads = 1024;
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
  static constexpr int total = kd, first = total + kTiles * kDim * 4;  // per-tile gate sums and first rows, until the columns are built
  static constexpr int rstd = ko + 6 * kTile * 256, beta = rstd + 2 * kChunk * 4, bytes = beta + kChunk * 4;
};
static_assert(PrepSmem::x + 3 * kTile * 20 * 4 <= PrepSmem::rstd, "L and the merge's temporaries must fit over the rescaled columns");
static_assert(3 * (PrepSmem::bytes + 1024) <= 228 * 1024, "three blocks per SM");

__global__ void __launch_bounds__(kPrepThreads, 3) sm90_kda_bwd_prep(const Args p) {
  const int hl = blockIdx.x % p.heads, chunk = blockIdx.x / p.heads, head = p.head0 + hl;
  if (chunk >= p.doc_chunk[p.num_docs]) return;
  const int4 info = p.chunks[chunk];
  const int token0 = info.x;
  const int rows = info.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = warp_uniform(tid >> 5);
  const size_t image = static_cast<size_t>(chunk) * p.heads + hl;
  unsigned char* sm = dynamic_smem();
  const uint32_t base = smem_addr(sm);
  float* total = reinterpret_cast<float*>(sm + PrepSmem::total);
  float* first = reinterpret_cast<float*>(sm + PrepSmem::first);
  float2* rstd = reinterpret_cast<float2*>(sm + PrepSmem::rstd);  // of k; of q times scale
  float* beta = reinterpret_cast<float*>(sm + PrepSmem::beta);

  load_image128<kPrepThreads>(base + PrepSmem::k, p.k, token0, rows, head, tid);
  load_image128<kPrepThreads>(base + PrepSmem::q, p.q, token0, rows, head, tid);
  cp_async_commit();

  // Gate: a thread owns one tile's 16 rows of a channel pair, so the cumulative sum is a chain in registers.
  const int tile = warp >> 1, pair = tid & 63;
  const float rate2 = gate_rate2(p, head), lb2 = p.lower_bound * kLog2e;
  float2 bias = make_float2(0.f, 0.f);
  if (p.dt_bias) bias = *reinterpret_cast<const float2*>(p.dt_bias + head * kDim + 2 * pair);
  float c0[kTile], c1[kTile];  // the sum inside the tile, then G - R + shift
  {
    uint32_t raw[kTile];
    const uint16_t* from = p.g.at(token0 + tile * kTile, head) + 2 * pair;
#pragma unroll
    for (int r = 0; r < kTile; r++) {
      raw[r] = tile * kTile + r < rows ? load_u32(from) : 0u;
      from += p.g.token_stride;
    }
    float run0 = 0.f, run1 = 0.f;
#pragma unroll
    for (int r = 0; r < kTile; r++) {
      const float lb = tile * kTile + r < rows ? lb2 : 0.f;
      run0 += lb * sigmoid2(rate2 * (bf_lo(raw[r]) + bias.x)), run1 += lb * sigmoid2(rate2 * (bf_hi(raw[r]) + bias.y));
      c0[r] = run0, c1[r] = run1;
    }
    *reinterpret_cast<float2*>(total + tile * kDim + 2 * pair) = make_float2(run0, run1);
    *reinterpret_cast<float2*>(first + tile * kDim + 2 * pair) = make_float2(c0[0], c1[0]);
    const float to_anchor0 = kShift - c0[0], to_anchor1 = kShift - c1[0];
#pragma unroll
    for (int r = 0; r < kTile; r++) c0[r] += to_anchor0, c1[r] += to_anchor1;
  }
  if (warp < 2) beta[tid] = tid < rows ? sigmoid2(load_beta_logit(p, token0 + tid, head) * kLog2e) : 0.f;
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = warp * 8 + i * 2 + (lane >> 4);
    const uint32_t off = off128(row, lane & 15);
    const float sk = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + PrepSmem::k + off)), sq = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + PrepSmem::q + off));
    if ((lane & 15) == 0) rstd[row] = make_float2(rsqrt_fast(sk + kL2Eps), rsqrt_fast(sq + kL2Eps) * p.scale);
  }
  // Anchors: R_I is the cumulated gate at tile I's first row. Every exponent below is <= 0 up to the constant shift.
  float2 R[kTiles], sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    const float2 f = *reinterpret_cast<float2*>(first + i * kDim + 2 * pair), t = *reinterpret_cast<float2*>(total + i * kDim + 2 * pair);
    R[i] = make_float2(sum.x + f.x, sum.y + f.y);
    sum.x += t.x, sum.y += t.y;
  }
  float2 own = R[0];
#pragma unroll
  for (int i = 1; i < kTiles; i++)
    if (tile == i) own = R[i];
  const float start0 = ex2(own.x - kShift), start1 = ex2(own.y - kShift), end0 = ex2(sum.x - own.x + kShift), end1 = ex2(sum.y - own.y + kShift);
  float hop0[kTiles], hop1[kTiles];
#pragma unroll
  for (int i = 1; i < kTiles; i++) hop0[i] = ex2(R[i].x - own.x), hop1[i] = ex2(R[i].y - own.y);
  __syncthreads();

  if (tile == 0) *reinterpret_cast<float2*>(p.decay + image * kDim + 2 * pair) = make_float2(ex2(sum.x), ex2(sum.y));
  const size_t tile_rows = image * kImage128 + tile * kTile * 256;
  unsigned char *ke = p.ke + tile_rows, *kg = p.kg + tile_rows, *qg = p.qg + tile_rows;
  unsigned char* sm_tile = sm + tile * kTile * 256;
#pragma unroll
  for (int r = 0; r < kTile; r++) {
    const uint32_t off = off128_pair(r, pair);
    const uint32_t kr = load_u32(sm_tile + PrepSmem::k + off), qr = load_u32(sm_tile + PrepSmem::q + off);
    const float2 norm = rstd[tile * kTile + r];
    const float k0 = bf_lo(kr) * norm.x, k1 = bf_hi(kr) * norm.x, q0 = bf_lo(qr) * norm.y, q1 = bf_hi(qr) * norm.y;
    const float up0 = ex2(c0[r]), up1 = ex2(c1[r]), kd0 = k0 * ex2(-c0[r]), kd1 = k1 * ex2(-c1[r]);
    const float ki0 = k0 * up0, ki1 = k1 * up1, qi0 = q0 * up0, qi1 = q1 * up1;
    *reinterpret_cast<uint32_t*>(sm_tile + PrepSmem::k + off) = pack_bf16(ki0, ki1);
    *reinterpret_cast<uint32_t*>(sm_tile + PrepSmem::q + off) = pack_bf16(qi0, qi1);
    *reinterpret_cast<uint32_t*>(sm_tile + PrepSmem::kd + off) = pack_bf16(kd0, kd1);
#pragma unroll
    for (int i = 1; i < kTiles; i++)
      if (i > tile) *reinterpret_cast<uint32_t*>(sm + PrepSmem::ko + (i * (i - 1) / 2 + tile) * kTile * 256 + off) = pack_bf16(kd0 * hop0[i], kd1 * hop1[i]);
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
    const uint32_t lane_a = base + (is_q ? PrepSmem::q : PrepSmem::k) + it * kTile * 256 + lane_off128(lane_straight(lane));
    const uint32_t lane_b = base + lane_off128(lane_crossed(lane)), own_b = lane_b + PrepSmem::kd + it * kTile * 256, earlier_b = lane_b + PrepSmem::ko + it * (it - 1) / 2 * kTile * 256;
#pragma unroll
    for (int ks = 0; ks < 8; ks++) {
      uint32_t a[4];
      ldsm4(a, block128(lane_a, 0, ks));
#pragma unroll
      for (int j = 0; j < kTiles; j++)
        if (j <= it) {
          uint32_t b[4];
          ldsm4(b, j == it ? block128(own_b, 0, ks) : block128(earlier_b, j, ks));
          mma(acc[j][0], a, b[0], b[1]);
          mma(acc[j][1], a, b[2], b[3]);
        }
    }
  }
  __syncthreads();
  const int g = lane >> 2, t = lane & 3;
  if (is_q) {
    unsigned char* out = p.p + image * kImage64 + it * kTile * 128;
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int row = it * kTile + g + half * 8, col = j * kTile + n * 8 + 2 * t;
          float x = col <= row ? acc[j][n][half * 2] : 0.f, y = col + 1 <= row ? acc[j][n][half * 2 + 1] : 0.f;
          *reinterpret_cast<uint32_t*>(out + half * 1024 + off64_pair(g, col >> 1)) = pack_bf16(x, y);
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
        if (j > it) continue;
        const int row = it * kTile + g + half * 8, col = j * kTile + n * 8 + 2 * t;
        const float b = beta[row];
        *reinterpret_cast<float2*>(L + row * kLd + col) = make_float2(col < row ? acc[j][n][half * 2] * b : 0.f, col + 1 < row ? acc[j][n][half * 2 + 1] * b : 0.f);
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
  const float2 b = *reinterpret_cast<float2*>(beta + 2 * lane);
#pragma unroll
  for (int i = 0; i < kChunk / 4; i++) {
    const int row = it + i * 4;
    const bool below = (lane >> 3) <= (i >> 2);  // tiles above the diagonal were never written
    const float2 x = below ? *reinterpret_cast<float2*>(inv + row * kLd + 2 * lane) : make_float2(0.f, 0.f);
    *reinterpret_cast<uint32_t*>(out + off64_pair(row, lane)) = pack_bf16(x.x * b.x, x.y * b.y);
  }
}

}  // namespace megamoe::kda_bwd
