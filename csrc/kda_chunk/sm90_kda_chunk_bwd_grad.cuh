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
  static constexpr int tails = dp, bias_part = dp + 8 * kDim * 4;  // [8][128] each, over dP and dL once the products are done
  static constexpr int total = gate + kChunk * kLdGate * 4;         // [8][128] gate sums over eight rows
  static constexpr int first = total + 8 * kDim * 4;               // [4][128] gate of a tile's first row
  static constexpr int end_part = total;                           // [4][128] and
  static constexpr int row_part = end_part + kTiles * kDim * 4;    // [64][3][4], over the gate sums once the anchors are known
  static constexpr int state_part = first + kTiles * kDim * 4;     // [128] sums over v of S dS
  static constexpr int hop = state_part + kDim * 4;                // [3][128] e^(R_J+1 - R_J)
  static constexpr int start = hop + 3 * kDim * 4;                 // [128] e^(R_0 - shift)
  static constexpr int end = start + kDim * 4;                     // [4][128] e^(G_C - R_I + shift)
  static constexpr int decay = end + kTiles * kDim * 4;            // [128] e^(G_C)
  static constexpr int rstd = decay + kDim * 4;                    // [64] {of k, of q}
  static constexpr int beta = rstd + 2 * kChunk * 4, vdot = beta + kChunk * 4;
  static constexpr int warp_part = vdot + kChunk * 4;              // [16]
  static constexpr int bars = warp_part + 64, bytes = bars + 16;
};
static_assert(GradSmem::row_part + 12 * kChunk * 4 <= GradSmem::state_part, "the row sums fit over the gate sums");
static_assert(GradSmem::bytes <= 227 * 1024, "one block per SM");

// A chunk of one head, and what its first phase needs: in flight while the previous one is finished.
struct GradItem {
  int head, rows, token0;
  size_t image, part;
};
struct GradRows {
  uint4 q[2], k[2];
  uint32_t g[8];
  float2 bias;
  float rate2, beta_logit;
};

// Persistent: a block takes items blockIdx.x, + gridDim.x, … Per item six barriers, S1 to S6; the next item's images are asked for after S2,
// when S, dS, v~, do and dv have been read for the last time, its rows (into registers) after S4.
__global__ void __launch_bounds__(kGradThreads, 1) sm90_kda_bwd_grad(const Args p) {
  const int tid = threadIdx.x, lane = tid & 31, warp = warp_uniform(tid >> 5);
  unsigned char* sm = dynamic_smem();
  const uint32_t base = smem_addr(sm), bar0 = base + GradSmem::bars, bar1 = bar0 + 8;
  auto table = [sm](int offset) { return reinterpret_cast<float*>(sm + offset); };
  float *total = table(GradSmem::total), *first = table(GradSmem::first), *hop = table(GradSmem::hop), *start = table(GradSmem::start), *end = table(GradSmem::end);
  float *decay = table(GradSmem::decay), *end_part = table(GradSmem::end_part), *state_part = table(GradSmem::state_part), *row_part = table(GradSmem::row_part);
  float *rstd = table(GradSmem::rstd), *beta = table(GradSmem::beta), *vdot = table(GradSmem::vdot), *gate = table(GradSmem::gate);
  float *tails = table(GradSmem::tails), *bias_part = table(GradSmem::bias_part), *warp_part = table(GradSmem::warp_part);

  // Three ways of sharing 64 x 128 elements out: eight rows of a channel pair; half a warp a row; a fragment of warp (it, cq).
  const int group = warp >> 1, pair = tid & 63;
  const int half_row = tid >> 4, unit = tid & 15;
  const int it = warp & 3, cq = warp >> 2, g = lane >> 2, t = lane & 3, ch0 = cq * 32 + 2 * t, r0 = it * kTile + g;

  auto item_at = [&](int i) {
    const int chunk = i / p.heads, hl = i - chunk * p.heads;
    const int4 info = p.chunks[chunk];
    GradItem x;
    x.head = p.head0 + hl, x.rows = info.y, x.token0 = info.x;
    x.image = i, x.part = static_cast<size_t>(chunk) * p.num_heads + x.head;
    return x;
  };
  auto ask_for_images = [&](const GradItem& x) {
    if (tid == 0) {
      mbar_expect(bar0, kImage128 + kImageState);
      bulk_load(base + GradSmem::vt, p.vt + x.image * kImage128, kImage128, bar0);
      bulk_load(base + GradSmem::s, p.s + x.image * kImageState, kImageState, bar0);
      mbar_expect(bar1, kImageState);
      bulk_load(base + GradSmem::ds, p.ds + x.image * kImageState, kImageState, bar1);
    }
    load_image128<kGradThreads, true>(base + GradSmem::dout, p.dout, x.token0, x.rows, x.head, tid);
    load_image128<kGradThreads, true>(base + GradSmem::dv, Rows{p.dv.ptr, p.dv.token_stride, p.dv.head_stride}, x.token0, x.rows, x.head, tid);
    cp_async_commit();
  };
  auto load_half_rows = [&](uint4(&out)[2], const Rows& src, const GradItem& x) {
    const uint16_t* from = src.at(x.token0 + half_row, x.head) + unit * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      out[i] = half_row + i * 32 < x.rows ? *reinterpret_cast<const uint4*>(from) : uint4{0u, 0u, 0u, 0u};
      from += 32 * static_cast<int64_t>(src.token_stride);
    }
  };
  auto ask_for_rows = [&](GradRows& out, const GradItem& x) {
    load_half_rows(out.q, p.q, x);
    load_half_rows(out.k, p.k, x);
    const uint16_t* from = p.g.at(x.token0 + group * 8, x.head) + 2 * pair;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      out.g[r] = group * 8 + r < x.rows ? load_u32(from) : 0u;
      from += p.g.token_stride;
    }
    out.bias = p.dt_bias ? *reinterpret_cast<const float2*>(p.dt_bias + x.head * kDim + 2 * pair) : make_float2(0.f, 0.f);
    out.rate2 = gate_rate2(p, x.head);
    out.beta_logit = tid < x.rows ? load_beta_logit(p, x.token0 + tid, x.head) : 0.f;  // rows <= 64
  };

  const int num_items = p.doc_chunk[p.num_docs] * p.heads;
  int index = blockIdx.x;
  if (index >= num_items) return;
  if (tid == 0) {
    mbar_init(bar0, 1);
    mbar_init(bar1, 1);
    fence_mbar_init();
  }
  __syncthreads();
  GradItem x = item_at(index);
  ask_for_images(x);
  GradRows in;
  ask_for_rows(in, x);

  for (uint32_t parity = 0;; parity ^= 1) {
    const bool more = index + static_cast<int>(gridDim.x) < num_items;
    GradItem next = x;
    if (more) next = item_at(index + gridDim.x);
    const float lb2 = p.lower_bound * kLog2e;
    const float2 bias = in.bias;
    const float rate2 = in.rate2;
    uint32_t raw[8];
    float c0[8], c1[8];
    uint4 v_rows[2];
    load_half_rows(v_rows, p.v, x);
    {
      float run0 = 0.f, run1 = 0.f;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        raw[r] = in.g[r];
        const float lb = group * 8 + r < x.rows ? lb2 : 0.f;
        run0 += lb * sigmoid2(rate2 * (bf_lo(raw[r]) + bias.x)), run1 += lb * sigmoid2(rate2 * (bf_hi(raw[r]) + bias.y));
        c0[r] = run0, c1[r] = run1;
      }
      *reinterpret_cast<float2*>(total + group * kDim + 2 * pair) = make_float2(run0, run1);
      if (!(group & 1)) *reinterpret_cast<float2*>(first + (group >> 1) * kDim + 2 * pair) = make_float2(c0[0], c1[0]);
      if (warp < 2) beta[tid] = tid < x.rows ? sigmoid2(in.beta_logit * kLog2e) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sk = sum_squares_half_warp(in.k[i]), sq = sum_squares_half_warp(in.q[i]);
      *reinterpret_cast<uint4*>(sm + GradSmem::k + i * 32 * 256 + off128(half_row, unit)) = in.k[i];
      *reinterpret_cast<uint4*>(sm + GradSmem::q + i * 32 * 256 + off128(half_row, unit)) = in.q[i];
      if (unit == 0) *reinterpret_cast<float2*>(rstd + 2 * (half_row + i * 32)) = make_float2(rsqrt_fast(sk + kL2Eps), rsqrt_fast(sq + kL2Eps));
    }
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();  // S1: rows, norms, gate sums, do, dv

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
    {
      const float2 f = *reinterpret_cast<float2*>(first + (group >> 1) * kDim + 2 * pair);
      float2 before = make_float2(kShift - f.x, kShift - f.y);
      if (group & 1) {
        const float2 s = *reinterpret_cast<float2*>(total + (group - 1) * kDim + 2 * pair);
        before.x += s.x, before.y += s.y;
      }
      unsigned char* rows8 = sm + group * 8 * 256;
      float* gate8 = gate + group * 8 * kLdGate + 2 * pair;
      float4 norms;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        const float y0 = c0[r] + before.x, y1 = c1[r] + before.y;  // G - R + shift
        *reinterpret_cast<float2*>(gate8 + r * kLdGate) = make_float2(y0, y1);
        const uint32_t off = off128_pair(r, pair);
        const uint32_t kr = load_u32(rows8 + GradSmem::k + off), qr = load_u32(rows8 + GradSmem::q + off);
        if (!(r & 1)) norms = *reinterpret_cast<const float4*>(rstd + 2 * (group * 8 + r));
        const float rk = r & 1 ? norms.z : norms.x, rq = (r & 1 ? norms.w : norms.y) * p.scale, k0 = bf_lo(kr) * rk, k1 = bf_hi(kr) * rk, up0 = ex2(y0), up1 = ex2(y1);
        *reinterpret_cast<uint32_t*>(rows8 + GradSmem::k + off) = pack_bf16(k0 * up0, k1 * up1);
        *reinterpret_cast<uint32_t*>(rows8 + GradSmem::q + off) = pack_bf16(bf_lo(qr) * rq * up0, bf_hi(qr) * rq * up1);
        *reinterpret_cast<uint32_t*>(rows8 + GradSmem::kd + off) = pack_bf16(k0 * ex2(-y0), k1 * ex2(-y1));
      }
    }
    // v·dv of each row.
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 y = *reinterpret_cast<const uint4*>(sm + GradSmem::dv + i * 32 * 128 + off_halves(half_row, unit, kChunk));
      const uint32_t xs[4] = {v_rows[i].x, v_rows[i].y, v_rows[i].z, v_rows[i].w}, ys[4] = {y.x, y.y, y.z, y.w};
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) s += bf_lo(xs[j]) * bf_lo(ys[j]), s += bf_hi(xs[j]) * bf_hi(ys[j]);
#pragma unroll
      for (int m = 8; m; m >>= 1) s += shfl_xor(s, m);
      if (unit == 0) vdot[half_row + i * 32] = s;
    }

    // dP = tril(do v~^T), dL = -stril(dv v~^T): warpgroups 0, 1 take dP's columns, 2, 3 dL's.
    const uint32_t straight128 = base + lane_off128(lane_straight(lane)), straight64 = base + lane_off64(lane_straight(lane)), crossed64 = base + lane_off64(lane_crossed(lane));
    mbar_wait(bar0, parity);
    {
      const bool is_l = cq >= 2;
      const int col0 = (cq & 1) * 32;
      const uint32_t a = wgmma_operand(base + (is_l ? GradSmem::dv : GradSmem::dout)), b = wgmma_operand(base + GradSmem::vt + col0 * 2);
      float d[4][4];
      wgmma_begin();
#pragma unroll
      for (int ks = 0; ks < 8; ks++) wgmma_m64n32<false, true>(d, a + wgmma_bytes((ks >> 2) * (kChunk * 128) + (ks & 3) * 32), b + wgmma_bytes(ks * 2048), ks > 0);
      wgmma_end();
      wgmma_settle(d);
      unsigned char* out = sm + (is_l ? GradSmem::dl : GradSmem::dp) + it * kTile * 128;
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = it * kTile + g + half * 8, col = col0 + n * 8 + 2 * t;
          const float y = is_l ? -d[n][half * 2] : d[n][half * 2], z = is_l ? -d[n][half * 2 + 1] : d[n][half * 2 + 1];
          const int last = row - is_l;  // last column kept
          *reinterpret_cast<uint32_t*>(out + half * 1024 + off64_pair(g, col >> 1)) = pack_bf16(col <= last ? y : 0.f, col + 1 <= last ? z : 0.f);
        }
    }
    mbar_wait(bar1, parity);

    // Through the states: do S^T, dv S^T, v~ dS^T, a warpgroup 32 channels; and the sum over v of S·dS as the diagonal of S dS^T.
    float aq[4][4], ak[4][4], ac[4][4];
    {
      const uint32_t half = wgmma_bytes((cq >> 1) * (kDim * 128)), columns = half + wgmma_bytes((cq & 1) * 64), images = wgmma_operand(base);
      float ss[4][4];
      wgmma_begin();
#pragma unroll
      for (int ks = 0; ks < 8; ks++) {
        const uint32_t k_row = (ks >> 2) * (kChunk * 128) + (ks & 3) * 32, s = wgmma_bytes(GradSmem::s + ks * 2048), ds = wgmma_bytes(GradSmem::ds + ks * 2048);
        wgmma_m64n32<false, true>(aq, images + wgmma_bytes(GradSmem::dout + k_row), images + columns + s, ks > 0);
        wgmma_m64n32<false, true>(ak, images + wgmma_bytes(GradSmem::dv + k_row), images + columns + s, ks > 0);
        wgmma_m64n32<true, true>(ac, images + wgmma_bytes(GradSmem::vt + ks * 2048), images + columns + ds, ks > 0);
        wgmma_m64n32<true, true>(ss, images + half + s, images + columns + ds, ks > 0);
      }
      wgmma_end();
      wgmma_settle(aq), wgmma_settle(ak), wgmma_settle(ac), wgmma_settle(ss);
      // Rows of ss are the 64 channels of the half, columns its 32 channels from (cq & 1) * 32: two warps hold the diagonal.
      if ((it >> 1) == (cq & 1) && t == (g >> 1)) {
        const float low = it & 1 ? (g & 1 ? ss[2][1] : ss[2][0]) : (g & 1 ? ss[0][1] : ss[0][0]);
        const float high = it & 1 ? (g & 1 ? ss[3][3] : ss[3][2]) : (g & 1 ? ss[1][3] : ss[1][2]);
        state_part[cq * 32 + (it & 1) * 16 + g] = low, state_part[cq * 32 + (it & 1) * 16 + g + 8] = high;
      }
    }
    __syncthreads();  // S2: operands, dP, dL; the images are free
    if (more) ask_for_images(next);

    // Through kg to the chunk's end (into end_part), then to the first anchors.
    const uint32_t frag_off = r0 * 256 + ((cq * 4 ^ g) << 4) + t * 4;  // this lane's pair in n-tile 0; n-tile n flips bits 4-5 by n
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int ch = ch0 + n * 8;
      const unsigned char* kd = sm + GradSmem::kd + (frag_off ^ (n << 4));
      const uint32_t y = load_u32(kd), z = load_u32(kd + 8 * 256);
      float s0 = bf_lo(y) * ac[n][0] + bf_lo(z) * ac[n][2], s1 = bf_hi(y) * ac[n][1] + bf_hi(z) * ac[n][3];
#pragma unroll
      for (int m = 4; m < 32; m <<= 1) s0 += shfl_xor(s0, m), s1 += shfl_xor(s1, m);
      const float2 own_end = *reinterpret_cast<float2*>(end + it * kDim + ch);
      if (g == 0) *reinterpret_cast<float2*>(end_part + it * kDim + ch) = make_float2(s0 * own_end.x, s1 * own_end.y);
      const float2 first_hop = *reinterpret_cast<float2*>(start + ch), last_hop = *reinterpret_cast<float2*>(end + 3 * kDim + ch);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        aq[n][e] *= e & 1 ? first_hop.y : first_hop.x;
        ak[n][e] *= -(e & 1 ? first_hop.y : first_hop.x);
        ac[n][e] *= e & 1 ? last_hop.y : last_hop.x;
      }
    }
    auto rescale = [&](float(&acc)[4][4], const float* by) {
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float2 f = *reinterpret_cast<const float2*>(by + ch0 + n * 8);
        acc[n][0] *= f.x, acc[n][1] *= f.y, acc[n][2] *= f.x, acc[n][3] *= f.y;
      }
    };
    for (int j = 0; j <= it; j++) {
      if (j) rescale(aq, hop + (j - 1) * kDim), rescale(ak, hop + (j - 1) * kDim);
      uint32_t a[4], c[4], b[4];
      ldsm4(a, block64(straight64 + GradSmem::dp, it, j));
      ldsm4(c, block64(straight64 + GradSmem::dl, it, j));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        ldsm4_t(b, block128(straight128 + GradSmem::kd, j, cq * 2 + n));
        mma(aq[2 * n], a, b[0], b[1]);
        mma(aq[2 * n + 1], a, b[2], b[3]);
        mma(ak[2 * n], c, b[0], b[1]);
        mma(ak[2 * n + 1], c, b[2], b[3]);
      }
    }
    for (int j = kTiles - 1; j >= it; j--) {
      if (j < kTiles - 1) rescale(ac, hop + j * kDim);
      uint32_t a[4], c[4], b[4];
      ldsm4_t(a, block64(crossed64 + GradSmem::dp, j, it));
      ldsm4_t(c, block64(crossed64 + GradSmem::dl, j, it));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        ldsm4_t(b, block128(straight128 + GradSmem::q, j, cq * 2 + n));
        mma(ac[2 * n], a, b[0], b[1]);
        mma(ac[2 * n + 1], a, b[2], b[3]);
        ldsm4_t(b, block128(straight128 + GradSmem::k, j, cq * 2 + n));
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
        const unsigned char* at = sm + (frag_off ^ (n << 4)) + half * 8 * 256;
        const uint32_t qi = load_u32(at + GradSmem::q), ki = load_u32(at + GradSmem::k), kd = load_u32(at + GradSmem::kd);
        dot[0][half] += bf_lo(qi) * aq[n][2 * half], dot[0][half] += bf_hi(qi) * aq[n][2 * half + 1];
        dot[1][half] += bf_lo(ki) * ak[n][2 * half], dot[1][half] += bf_hi(ki) * ak[n][2 * half + 1];
        dot[2][half] += bf_lo(kd) * ac[n][2 * half], dot[2][half] += bf_hi(kd) * ac[n][2 * half + 1];
      }
#pragma unroll
    for (int y = 0; y < 3; y++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float s = dot[y][half];
        s += shfl_xor(s, 1);
        s += shfl_xor(s, 2);
        if (t == 0) row_part[((r0 + half * 8) * 3 + y) * 4 + cq] = s;
      }
    __syncthreads();  // S3: row sums; dP, dL, and the operands' last reads by other warps

    // Epilogue 2: the L2 norm's backward in place of qI and kI, dG in place of the gate.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = r0 + half * 8;
      float sum[3];
#pragma unroll
      for (int y = 0; y < 3; y++) {
        const float4 part = *reinterpret_cast<const float4*>(row_part + (row * 3 + y) * 4);
        sum[y] = (part.x + part.y) + (part.z + part.w);
      }
      const float2 norm = *reinterpret_cast<const float2*>(rstd + 2 * row);
      const float rk = norm.x, rq = norm.y, q_up = rq * p.scale, q_back = rq * sum[0] * rcp(p.scale), k_back = sum[1] + sum[2];
      if (cq == 0 && t == 0 && row < x.rows) {
        const float d = (1.f - beta[row]) * (vdot[row] + sum[1]);
        const int64_t i = static_cast<int64_t>(x.token0 + row) * p.dbeta_token_stride + static_cast<int64_t>(x.head) * p.dbeta_head_stride;
        if (p.beta_is_fp32)
          static_cast<float*>(p.dbeta)[i] = d;
        else
          static_cast<uint16_t*>(p.dbeta)[i] = static_cast<uint16_t>(pack_bf16(d, 0.f));
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        unsigned char* at = sm + (frag_off ^ (n << 4)) + half * 8 * 256;
        const uint32_t qi = load_u32(at + GradSmem::q), ki = load_u32(at + GradSmem::k), kd = load_u32(at + GradSmem::kd);
        float2* y = reinterpret_cast<float2*>(gate + row * kLdGate + ch0 + n * 8);
        const float2 exponent = *y;
        float dq[2], dk[2], dG[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float up = ex2(e ? exponent.y : exponent.x), down = ex2(e ? -exponent.y : -exponent.x);
          const float q = e ? bf_hi(qi) : bf_lo(qi), k = e ? bf_hi(ki) : bf_lo(ki), kdv = e ? bf_hi(kd) : bf_lo(kd);
          const float vq = aq[n][2 * half + e], vk = ak[n][2 * half + e], vc = ac[n][2 * half + e];
          dq[e] = vq * (up * q_up) - q * (down * q_back);
          dk[e] = vk * (up * rk) + (vc - k * k_back) * (down * rk);
          dG[e] = q * vq + k * vk - kdv * vc;
        }
        *y = make_float2(dG[0], dG[1]);
        *reinterpret_cast<uint32_t*>(at + GradSmem::q) = pack_bf16(dq[0], dq[1]);
        *reinterpret_cast<uint32_t*>(at + GradSmem::k) = pack_bf16(dk[0], dk[1]);
      }
    }
    __syncthreads();  // S4: dq, dk, dG
    if (more) ask_for_rows(in, next);

    // Epilogue 3: copies out, then reverse cumulative sum and gate backward by the owners of eight rows.
    {
      uint16_t *to_q = p.dq.at(x.token0 + half_row, x.head) + unit * 8, *to_k = p.dk.at(x.token0 + half_row, x.head) + unit * 8;
      const unsigned char* from = sm + off128(half_row, unit);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (half_row + i * 32 < x.rows) {
          *reinterpret_cast<uint4*>(to_q) = *reinterpret_cast<const uint4*>(from + GradSmem::q + i * 32 * 256);
          *reinterpret_cast<uint4*>(to_k) = *reinterpret_cast<const uint4*>(from + GradSmem::k + i * 32 * 256);
        }
        to_q += 32 * static_cast<int64_t>(p.dq.token_stride), to_k += 32 * static_cast<int64_t>(p.dk.token_stride);
      }
    }
    float2 dg[8];
    {
      float tail0 = 0.f, tail1 = 0.f;
      const float* gate8 = gate + group * 8 * kLdGate + 2 * pair;
#pragma unroll
      for (int r = 7; r >= 0; r--) {
        const float2 y = *reinterpret_cast<const float2*>(gate8 + r * kLdGate);
        tail0 += y.x, tail1 += y.y;
        dg[r] = make_float2(tail0, tail1);
      }
      *reinterpret_cast<float2*>(tails + group * kDim + 2 * pair) = make_float2(tail0, tail1);
    }
    __syncthreads();  // S5: sums of eight rows
    float2 at_end;
    {
      const float2 y = *reinterpret_cast<const float2*>(state_part + 2 * pair), d = *reinterpret_cast<const float2*>(decay + 2 * pair);
      at_end = make_float2(y.x * d.x, y.y * d.y);
      const float2* part = reinterpret_cast<const float2*>(end_part + 2 * pair);
#pragma unroll
      for (int i = 0; i < kTiles; i++) at_end.x += part[i * kDim / 2].x, at_end.y += part[i * kDim / 2].y;
      part = reinterpret_cast<const float2*>(tails + 2 * pair);
#pragma unroll
      for (int i = 1; i < 8; i++)
        if (i > group) at_end.x += part[i * kDim / 2].x, at_end.y += part[i * kDim / 2].y;
    }
    const float slope = p.lower_bound * (rate2 * (1.f / kLog2e));
    float bias_sum0 = 0.f, bias_sum1 = 0.f, a_sum = 0.f;
    {
      uint16_t* to = p.dg.at(x.token0 + group * 8, x.head) + 2 * pair;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        const float z0 = bf_lo(raw[r]) + bias.x, z1 = bf_hi(raw[r]) + bias.y;
        float s0, s1, m0, m1;
        sigmoid2(rate2 * z0, s0, m0);
        sigmoid2(rate2 * z1, s1, m1);
        const bool live = group * 8 + r < x.rows;
        const float dz0 = live ? (dg[r].x + at_end.x) * slope * (s0 * m0) : 0.f, dz1 = live ? (dg[r].y + at_end.y) * slope * (s1 * m1) : 0.f;
        if (live) *reinterpret_cast<uint32_t*>(to) = pack_bf16(dz0, dz1);
        to += p.dg.token_stride;
        bias_sum0 += dz0, bias_sum1 += dz1, a_sum += dz0 * z0 + dz1 * z1;
      }
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) a_sum += shfl_xor(a_sum, m);
    if (lane == 0) warp_part[warp] = a_sum;
    *reinterpret_cast<float2*>(bias_part + group * kDim + 2 * pair) = make_float2(bias_sum0, bias_sum1);
    __syncthreads();  // S6: partial sums; every table is free
    if (warp < 4) {
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) s += bias_part[i * kDim + tid];
      p.dbias_part[x.part * kDim + tid] = s;
    } else if (tid == kDim) {
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < 16; i++) s += warp_part[i];
      p.da_part[x.part] = s;
    }
    if (!more) return;
    index += gridDim.x;
    x = next;
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
