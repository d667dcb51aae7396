// KDA backward, third kernel: every gradient of a chunk from its raw inputs, S, dS, v~ and dv; and the last, tiny sums.
//
// 16 warps; warp (I, cq) owns rows of tile I and 32 channels. Row terms (dq, the β-weighted part of dk) sweep tiles J = 0..I with one
// anchor after the other, column terms (the rest of dk) sweep J = 3..I; between two anchors the fp32 ACCUMULATORS are rescaled by
// e^(R_J+1 - R_J) <= 1, so every operand is built once, at its own tile's anchor. The L2 norm, gate, cumulative sum and β
// backward are the epilogue: dq, dk, dg leave once, in bf16.
#pragma once
#include "sm90_kda_chunk_bwd_common.cuh"

namespace megamoe::kda_bwd {

constexpr int kGradThreads = 512;
constexpr int kLdGate = 132;  // fp32 row of a 128-wide matrix

struct GradSmem {
  static constexpr int k = 0, q = k + kImage128, kd = q + kImage128, dout = kd + kImage128, dv = dout + kImage128, vt = dv + kImage128;
  static constexpr int s = vt + kImage128, ds = s + kImageState, dp = ds + kImageState, dl = dp + kImage64, gate = dl + kImage64;
  static constexpr int total = gate + kChunk * kLdGate * 4;             // [8][128] gate sums over eight rows
  static constexpr int state_part = total;                             // then [8][128] sums over v of S dS
  static constexpr int tails = dout, bias_part = dv;                   // [8][128] each, once the products are done
  static constexpr int first = total + 8 * kDim * 4;                   // [4][128]
  static constexpr int hop = first + kTiles * kDim * 4;                // [3][128] e^(R_J+1 - R_J)
  static constexpr int start = hop + 3 * kDim * 4;                     // [128] e^(R_0 - shift)
  static constexpr int end = start + kDim * 4;                         // [4][128] e^(G_C - R_I + shift)
  static constexpr int decay = end + kTiles * kDim * 4;                // [128] e^(G_C)
  static constexpr int end_part = decay + kDim * 4;                    // [4][128]
  static constexpr int row_part = end_part + kTiles * kDim * 4;        // [3][4][64]
  static constexpr int rstd = row_part + 12 * kChunk * 4;              // [2][64]
  static constexpr int beta = rstd + 2 * kChunk * 4, vdot = beta + kChunk * 4;
  static constexpr int warp_part = vdot + kChunk * 4;                  // [16]
  static constexpr int bars = warp_part + 64, bytes = bars + 16;
};
static_assert(GradSmem::bytes <= 227 * 1024, "one block per SM");

__global__ void __launch_bounds__(kGradThreads, 1) sm90_kda_bwd_grad(const Args p) {
  const int hl = blockIdx.x % p.heads, chunk = blockIdx.x / p.heads, head = p.head0 + hl;
  if (chunk >= p.doc_chunk[p.num_docs]) return;
  const int4 info = p.chunks[chunk];
  const int64_t token0 = info.x;
  const int rows = info.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const size_t image = static_cast<size_t>(chunk) * p.heads + hl;
  unsigned char* sm = dynamic_smem();
  const uint32_t base = smem_addr(sm);
  auto table = [sm](int offset) { return reinterpret_cast<float*>(sm + offset); };
  float *total = table(GradSmem::total), *first = table(GradSmem::first), *hop = table(GradSmem::hop), *start = table(GradSmem::start), *end = table(GradSmem::end);
  float *decay = table(GradSmem::decay), *end_part = table(GradSmem::end_part), *state_part = table(GradSmem::state_part), *row_part = table(GradSmem::row_part);
  float *tails = table(GradSmem::tails), *bias_part = table(GradSmem::bias_part);
  float *rstd = table(GradSmem::rstd), *beta = table(GradSmem::beta), *vdot = table(GradSmem::vdot), *gate = table(GradSmem::gate);

  if (tid == 0) {
    mbar_init(base + GradSmem::bars, 1);
    mbar_init(base + GradSmem::bars + 8, 1);
    fence_mbar_init();
    mbar_expect(base + GradSmem::bars, kImage128 + kImageState);
    bulk_load(base + GradSmem::vt, p.vt + image * kImage128, kImage128, base + GradSmem::bars);
    bulk_load(base + GradSmem::s, p.s + image * kImageState, kImageState, base + GradSmem::bars);
    mbar_expect(base + GradSmem::bars + 8, kImageState);
    bulk_load(base + GradSmem::ds, p.ds + image * kImageState, kImageState, base + GradSmem::bars + 8);
  }
  load_image128(base + GradSmem::k, p.k, token0, rows, head, tid, kGradThreads);
  load_image128(base + GradSmem::q, p.q, token0, rows, head, tid, kGradThreads);
  cp_async_commit();
  load_image128(base + GradSmem::dout, p.dout, token0, rows, head, tid, kGradThreads);
  load_image128(base + GradSmem::dv, Rows{p.dv.ptr, p.dv.token_stride, p.dv.head_stride}, token0, rows, head, tid, kGradThreads);
  cp_async_commit();

  // Gate: a thread owns eight rows (half a tile) of a channel pair.
  const int group = tid >> 6, pair = tid & 63, tile_of_group = group >> 1;
  const float rate2 = gate_rate2(p, head), lb2 = p.lower_bound * kLog2e;
  const float bias0 = p.dt_bias ? p.dt_bias[head * kDim + 2 * pair] : 0.f, bias1 = p.dt_bias ? p.dt_bias[head * kDim + 2 * pair + 1] : 0.f;
  uint32_t raw[8];
  {
#pragma unroll
    for (int r = 0; r < 8; r++) raw[r] = group * 8 + r < rows ? load_u32(p.g.at(token0 + group * 8 + r, head) + 2 * pair) : 0u;
    float c0[8], c1[8], run0 = 0.f, run1 = 0.f;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      if (group * 8 + r < rows) {
        float s0, s1, unused;
        sigmoid2(rate2 * (bf_lo(raw[r]) + bias0), s0, unused);
        sigmoid2(rate2 * (bf_hi(raw[r]) + bias1), s1, unused);
        run0 += lb2 * s0, run1 += lb2 * s1;
      }
      c0[r] = run0, c1[r] = run1;
    }
    total[group * kDim + 2 * pair] = run0, total[group * kDim + 2 * pair + 1] = run1;
    if (!(group & 1)) first[tile_of_group * kDim + 2 * pair] = c0[0], first[tile_of_group * kDim + 2 * pair + 1] = c1[0];
    if (tid < kChunk) {
      float s = 0.f, unused;
      if (tid < rows) sigmoid2(load_beta_logit(p, token0 + tid, head) * kLog2e, s, unused);
      beta[tid] = s;
    }
    cp_async_wait<1>();
    __syncthreads();
    const float f0 = first[tile_of_group * kDim + 2 * pair] - (group & 1 ? total[(group - 1) * kDim + 2 * pair] : 0.f) - kShift;
    const float f1 = first[tile_of_group * kDim + 2 * pair + 1] - (group & 1 ? total[(group - 1) * kDim + 2 * pair + 1] : 0.f) - kShift;
#pragma unroll
    for (int r = 0; r < 8; r++) *reinterpret_cast<float2*>(gate + (group * 8 + r) * kLdGate + 2 * pair) = make_float2(c0[r] - f0, c1[r] - f1);  // G - R + shift
  }
  if (tid < kDim) {
    float R[kTiles], sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      R[i] = sum + first[i * kDim + tid];
      sum += total[2 * i * kDim + tid] + total[(2 * i + 1) * kDim + tid];
    }
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      if (i) hop[(i - 1) * kDim + tid] = ex2(R[i] - R[i - 1]);
      end[i * kDim + tid] = ex2(sum - R[i] + kShift);
    }
    start[tid] = ex2(R[0] - kShift), decay[tid] = ex2(sum);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = warp * 4 + i * 2 + (lane >> 4);
    float sk = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + GradSmem::k + off128(row, lane & 15)));
    float sq = sum_squares_half_warp(*reinterpret_cast<uint4*>(sm + GradSmem::q + off128(row, lane & 15)));
    if ((lane & 15) == 0) rstd[row] = rsqrt_fast(sk + kL2Eps), rstd[kChunk + row] = rsqrt_fast(sq + kL2Eps);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const int row = group * 8 + r;
    const uint32_t off = off128_pair(row, pair);
    const uint32_t kr = load_u32(sm + GradSmem::k + off), qr = load_u32(sm + GradSmem::q + off);
    const float2 x = *reinterpret_cast<float2*>(gate + row * kLdGate + 2 * pair);
    const float rk = rstd[row], rq = rstd[kChunk + row] * p.scale, k0 = bf_lo(kr) * rk, k1 = bf_hi(kr) * rk, up0 = ex2(x.x), up1 = ex2(x.y);
    *reinterpret_cast<uint32_t*>(sm + GradSmem::k + off) = pack_bf16(k0 * up0, k1 * up1);
    *reinterpret_cast<uint32_t*>(sm + GradSmem::q + off) = pack_bf16(bf_lo(qr) * rq * up0, bf_hi(qr) * rq * up1);
    *reinterpret_cast<uint32_t*>(sm + GradSmem::kd + off) = pack_bf16(k0 * ex2(-x.x), k1 * ex2(-x.y));
  }
  // v·dv of each row, half a warp a row; v is read from global memory, once.
  cp_async_wait<0>();
  mbar_wait(base + GradSmem::bars, 0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = warp * 4 + i * 2 + (lane >> 4);
    float s = 0.f;
    if (row < rows) {
      const uint4 x = *reinterpret_cast<const uint4*>(p.v.at(token0 + row, head) + (lane & 15) * 8);
      const uint4 y = *reinterpret_cast<const uint4*>(sm + GradSmem::dv + off128(row, lane & 15));
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; j++) s += bf_lo(xs[j]) * bf_lo(ys[j]) + bf_hi(xs[j]) * bf_hi(ys[j]);
    }
#pragma unroll
    for (int m = 8; m; m >>= 1) s += shfl_xor(s, m);
    if ((lane & 15) == 0) vdot[row] = s;
  }

  // dP = tril(do v~^T), dL = -stril(dv v~^T): ten tile pairs, a warp each.
  const LaneBlock straight = lane_straight(lane), crossed = lane_crossed(lane);
  const int g = lane >> 2, t = lane & 3;
  if (warp < 10) {
    const int i = warp == 0 ? 0 : warp < 3 ? 1 : warp < 6 ? 2 : 3, j = warp - i * (i + 1) / 2;
    float dp[2][4] = {}, dl[2][4] = {};
#pragma unroll
    for (int ks = 0; ks < 8; ks++) {
      uint32_t a[4], c[4], b[4];
      ldsm4(a, base + GradSmem::dout + off128(i * kTile + straight.row, ks * 2 + straight.unit));
      ldsm4(c, base + GradSmem::dv + off128(i * kTile + straight.row, ks * 2 + straight.unit));
      ldsm4_t(b, base + GradSmem::vt + off64(ks * 16 + straight.row, j * 2 + straight.unit));
      mma(dp[0], a, b[0], b[1]);
      mma(dp[1], a, b[2], b[3]);
      mma(dl[0], c, b[0], b[1]);
      mma(dl[1], c, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = i * kTile + g + half * 8, col = j * kTile + n * 8 + 2 * t;
        const uint32_t off = off64_pair(row, col >> 1);
        *reinterpret_cast<uint32_t*>(sm + GradSmem::dp + off) = pack_bf16(col <= row ? dp[n][half * 2] : 0.f, col + 1 <= row ? dp[n][half * 2 + 1] : 0.f);
        *reinterpret_cast<uint32_t*>(sm + GradSmem::dl + off) = pack_bf16(col < row ? -dl[n][half * 2] : 0.f, col + 1 < row ? -dl[n][half * 2 + 1] : 0.f);
      }
  }
  mbar_wait(base + GradSmem::bars + 8, 0);
  __syncthreads();

  // Sum over v of S·dS per channel, sixteen v a thread.
  {
    float s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const uint32_t off = off128_pair(group * 16 + r, pair), x = load_u32(sm + GradSmem::s + off), y = load_u32(sm + GradSmem::ds + off);
      s0 += bf_lo(x) * bf_lo(y), s1 += bf_hi(x) * bf_hi(y);
    }
    state_part[group * kDim + 2 * pair] = s0, state_part[group * kDim + 2 * pair + 1] = s1;
  }

  const int it = warp >> 2, cq = warp & 3, ch0 = cq * 32 + 2 * t, r0 = it * kTile + g;
  float aq[4][4] = {}, ak[4][4] = {}, ac[4][4] = {};
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    uint32_t a[4], c[4], w[4], b[4];
    ldsm4(a, base + GradSmem::dout + off128(it * kTile + straight.row, ks * 2 + straight.unit));
    ldsm4(c, base + GradSmem::dv + off128(it * kTile + straight.row, ks * 2 + straight.unit));
    ldsm4_t(w, base + GradSmem::vt + off64(ks * 16 + crossed.row, it * 2 + crossed.unit));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      ldsm4_t(b, base + GradSmem::s + off128(ks * 16 + straight.row, cq * 4 + n * 2 + straight.unit));
      mma(aq[2 * n], a, b[0], b[1]);
      mma(aq[2 * n + 1], a, b[2], b[3]);
      mma(ak[2 * n], c, b[0], b[1]);
      mma(ak[2 * n + 1], c, b[2], b[3]);
      ldsm4_t(b, base + GradSmem::ds + off128(ks * 16 + straight.row, cq * 4 + n * 2 + straight.unit));
      mma(ac[2 * n], w, b[0], b[1]);
      mma(ac[2 * n + 1], w, b[2], b[3]);
    }
  }
  // Through kg to the chunk's end (into end_part), then to the first anchors.
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int ch = ch0 + n * 8;
    const uint32_t x = load_u32(sm + GradSmem::kd + off128_pair(r0, ch >> 1)), y = load_u32(sm + GradSmem::kd + off128_pair(r0 + 8, ch >> 1));
    float s0 = bf_lo(x) * ac[n][0] + bf_lo(y) * ac[n][2], s1 = bf_hi(x) * ac[n][1] + bf_hi(y) * ac[n][3];
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) s0 += shfl_xor(s0, m), s1 += shfl_xor(s1, m);
    if (g == 0) end_part[it * kDim + ch] = s0 * end[it * kDim + ch], end_part[it * kDim + ch + 1] = s1 * end[it * kDim + ch + 1];
    const float2 first_hop = *reinterpret_cast<float2*>(start + ch), last_hop = *reinterpret_cast<float2*>(end + 3 * kDim + ch);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      aq[n][e] *= e & 1 ? first_hop.y : first_hop.x;
      ak[n][e] *= -(e & 1 ? first_hop.y : first_hop.x);
      ac[n][e] *= e & 1 ? last_hop.y : last_hop.x;
    }
  }
  auto rescale = [&](float(&acc)[4][4], int j) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float2 f = *reinterpret_cast<float2*>(hop + j * kDim + ch0 + n * 8);
      acc[n][0] *= f.x, acc[n][1] *= f.y, acc[n][2] *= f.x, acc[n][3] *= f.y;
    }
  };
  for (int j = 0; j <= it; j++) {
    if (j) rescale(aq, j - 1), rescale(ak, j - 1);
    uint32_t a[4], c[4], b[4];
    ldsm4(a, base + GradSmem::dp + off64(it * kTile + straight.row, j * 2 + straight.unit));
    ldsm4(c, base + GradSmem::dl + off64(it * kTile + straight.row, j * 2 + straight.unit));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      ldsm4_t(b, base + GradSmem::kd + off128(j * kTile + straight.row, cq * 4 + n * 2 + straight.unit));
      mma(aq[2 * n], a, b[0], b[1]);
      mma(aq[2 * n + 1], a, b[2], b[3]);
      mma(ak[2 * n], c, b[0], b[1]);
      mma(ak[2 * n + 1], c, b[2], b[3]);
    }
  }
  for (int j = kTiles - 1; j >= it; j--) {
    if (j < kTiles - 1) rescale(ac, j);
    uint32_t a[4], c[4], b[4];
    ldsm4_t(a, base + GradSmem::dp + off64(j * kTile + crossed.row, it * 2 + crossed.unit));
    ldsm4_t(c, base + GradSmem::dl + off64(j * kTile + crossed.row, it * 2 + crossed.unit));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      ldsm4_t(b, base + GradSmem::q + off128(j * kTile + straight.row, cq * 4 + n * 2 + straight.unit));
      mma(ac[2 * n], a, b[0], b[1]);
      mma(ac[2 * n + 1], a, b[2], b[3]);
      ldsm4_t(b, base + GradSmem::k + off128(j * kTile + straight.row, cq * 4 + n * 2 + straight.unit));
      mma(ac[2 * n], c, b[0], b[1]);
      mma(ac[2 * n + 1], c, b[2], b[3]);
    }
  }

  // Epilogue 1: products with the rounded operands (so that pairs cancel exactly in dG), and their row sums.
  float dot[3][2] = {};
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t off = off128_pair(r0 + half * 8, (ch0 + n * 8) >> 1);
      const uint32_t qi = load_u32(sm + GradSmem::q + off), ki = load_u32(sm + GradSmem::k + off), kd = load_u32(sm + GradSmem::kd + off);
      dot[0][half] += bf_lo(qi) * aq[n][2 * half] + bf_hi(qi) * aq[n][2 * half + 1];
      dot[1][half] += bf_lo(ki) * ak[n][2 * half] + bf_hi(ki) * ak[n][2 * half + 1];
      dot[2][half] += bf_lo(kd) * ac[n][2 * half] + bf_hi(kd) * ac[n][2 * half + 1];
    }
#pragma unroll
  for (int x = 0; x < 3; x++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float s = dot[x][half];
      s += shfl_xor(s, 1), s += shfl_xor(s, 2);
      if (t == 0) row_part[(x * 4 + cq) * kChunk + r0 + half * 8] = s;
    }
  __syncthreads();

  // Epilogue 2: the L2 norm's backward in place of qI and kI, dG in place of the gate.
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = r0 + half * 8;
    float sum[3];
#pragma unroll
    for (int x = 0; x < 3; x++) {
      const float* part = row_part + x * 4 * kChunk + row;
      sum[x] = (part[0] + part[kChunk]) + (part[2 * kChunk] + part[3 * kChunk]);
    }
    const float rq = rstd[kChunk + row], rk = rstd[row], q_back = sum[0] / p.scale, k_back = sum[1] + sum[2];
    if (cq == 0 && t == 0 && row < rows) {
      const float d = (1.f - beta[row]) * (vdot[row] + sum[1]);
      const int64_t i = (token0 + row) * p.dbeta_token_stride + head * p.dbeta_head_stride;
      if (p.beta_is_fp32)
        static_cast<float*>(p.dbeta)[i] = d;
      else
        static_cast<uint16_t*>(p.dbeta)[i] = static_cast<uint16_t>(pack_bf16(d, 0.f));
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int ch = ch0 + n * 8;
      const uint32_t off = off128_pair(row, ch >> 1);
      const uint32_t qi = load_u32(sm + GradSmem::q + off), ki = load_u32(sm + GradSmem::k + off), kd = load_u32(sm + GradSmem::kd + off);
      float* x = gate + row * kLdGate + ch;
      float dq[2], dk[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float up = ex2(x[e]), down = ex2(-x[e]);
        const float q = e ? bf_hi(qi) : bf_lo(qi), k = e ? bf_hi(ki) : bf_lo(ki), kdv = e ? bf_hi(kd) : bf_lo(kd);
        const float vq = aq[n][2 * half + e], vk = ak[n][2 * half + e], vc = ac[n][2 * half + e];
        dq[e] = rq * (vq * up * p.scale - q * down * q_back);
        dk[e] = rk * (vk * up + vc * down - k * down * k_back);
        x[e] = q * vq + k * vk - kdv * vc;
      }
      *reinterpret_cast<uint32_t*>(sm + GradSmem::q + off) = pack_bf16(dq[0], dq[1]);
      *reinterpret_cast<uint32_t*>(sm + GradSmem::k + off) = pack_bf16(dk[0], dk[1]);
    }
  }
  __syncthreads();

  // Epilogue 3: copies out, reverse cumulative sum and gate backward by the owners of rows and channels of the first phase.
  for (int i = tid; i < kChunk * 16; i += kGradThreads) {
    const int row = i >> 4, unit = i & 15;
    if (row < rows) {
      *reinterpret_cast<uint4*>(p.dq.at(token0 + row, head) + unit * 8) = *reinterpret_cast<uint4*>(sm + GradSmem::q + off128(row, unit));
      *reinterpret_cast<uint4*>(p.dk.at(token0 + row, head) + unit * 8) = *reinterpret_cast<uint4*>(sm + GradSmem::k + off128(row, unit));
    }
  }
  float2 dg[8];
  float tail0 = 0.f, tail1 = 0.f;
#pragma unroll
  for (int r = 7; r >= 0; r--) {
    const float2 x = *reinterpret_cast<float2*>(gate + (group * 8 + r) * kLdGate + 2 * pair);
    tail0 += x.x, tail1 += x.y;
    dg[r] = make_float2(tail0, tail1);
  }
  tails[group * kDim + 2 * pair] = tail0, tails[group * kDim + 2 * pair + 1] = tail1;
  __syncthreads();
  float end0 = 0.f, end1 = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) end0 += state_part[i * kDim + 2 * pair], end1 += state_part[i * kDim + 2 * pair + 1];
  end0 *= decay[2 * pair], end1 *= decay[2 * pair + 1];
#pragma unroll
  for (int i = 0; i < kTiles; i++) end0 += end_part[i * kDim + 2 * pair], end1 += end_part[i * kDim + 2 * pair + 1];
  for (int i = group + 1; i < 8; i++) end0 += tails[i * kDim + 2 * pair], end1 += tails[i * kDim + 2 * pair + 1];
  const float rate = rate2 / kLog2e, slope = p.lower_bound * rate;
  float bias_sum0 = 0.f, bias_sum1 = 0.f, a_sum = 0.f;
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const int row = group * 8 + r;
    if (row < rows) {
      const float z0 = bf_lo(raw[r]) + bias0, z1 = bf_hi(raw[r]) + bias1;
      float s0, s1, m0, m1;
      sigmoid2(rate2 * z0, s0, m0);
      sigmoid2(rate2 * z1, s1, m1);
      const float dz0 = (dg[r].x + end0) * slope * s0 * m0, dz1 = (dg[r].y + end1) * slope * s1 * m1;
      *reinterpret_cast<uint32_t*>(p.dg.at(token0 + row, head) + 2 * pair) = pack_bf16(dz0, dz1);
      bias_sum0 += dz0, bias_sum1 += dz1, a_sum += dz0 * z0 + dz1 * z1;
    }
  }
#pragma unroll
  for (int m = 16; m; m >>= 1) a_sum += shfl_xor(a_sum, m);
  float* warp_part = table(GradSmem::warp_part);
  if (lane == 0) warp_part[warp] = a_sum;
  bias_part[group * kDim + 2 * pair] = bias_sum0, bias_part[group * kDim + 2 * pair + 1] = bias_sum1;
  __syncthreads();
  const size_t part = static_cast<size_t>(chunk) * p.num_heads + head;
  if (tid < kDim) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) s += bias_part[i * kDim + tid];
    p.dbias_part[part * kDim + tid] = s;
  }
  if (tid == kDim) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) s += warp_part[i];
    p.da_part[part] = s;
  }
}

// dA_log and d dt_bias of one head: eight interleaved slices of the chunks, then their sums; the order is fixed.
constexpr int kSumThreads = 1024;
__global__ void __launch_bounds__(kSumThreads) sm90_kda_bwd_sum(const Args p) {
  float* part = reinterpret_cast<float*>(dynamic_smem());  // [8][128], [8]
  const int head = blockIdx.x, tid = threadIdx.x, slice = tid >> 7, ch = tid & 127, chunks = p.doc_chunk[p.num_docs];
  float s = 0.f, a = 0.f;
  for (int c = slice; c < chunks; c += 8) {
    const size_t i = static_cast<size_t>(c) * p.num_heads + head;
    s += p.dbias_part[i * kDim + ch];
    if (ch == 0) a += p.da_part[i];
  }
  part[tid] = s;
  if (ch == 0) part[kSumThreads + slice] = a;
  __syncthreads();
  if (tid < kDim) {
    s = 0.f;
    for (int i = 0; i < 8; i++) s += part[i * kDim + tid];
    if (p.ddt_bias) p.ddt_bias[head * kDim + tid] = s;
  }
  if (tid == 0) {
    a = 0.f;
    for (int i = 0; i < 8; i++) a += part[kSumThreads + i];
    p.da_log[head] = a;
  }
}

}  // namespace megamoe::kda_bwd
