// The producer half of KDA forward: one warp turns 16 raw rows into the operands of one group (see sm90_kda_chunk_fwd.cuh).
//
// Lane l owns channels 4l .. 4l+3 of every row: the cumulative decay runs down a column in registers, without shuffles.
#pragma once

#include "sm90_kda_chunk_fwd.cuh"

namespace megamoe::kda {

// q, k, g, v rows of a group from global memory, two rows an instruction; rows past the document's end become zeros.
template <Mode MODE, bool FULL>
__device__ __forceinline__ void copy_rows(const Inputs& in, int head, int token, int rows, uint32_t stage, int lane) {
  const int chunk = lane & 15, odd = lane >> 4;
  const uint32_t swizzled = ((chunk & 7) ^ odd) << 4;  // of the first row; row i + odd differs by an XOR with i & 6
  const auto copy = [&](const View& view, uint32_t first_row, uint32_t row_bytes, bool swizzle) {
    const __nv_bfloat16* source = view.base + (int64_t(token) + odd) * view.stride_t + head * view.stride_h + chunk * 8;
    const int64_t step = 2 * view.stride_t;
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      const uint32_t destination = (swizzle ? first_row ^ ((i & 6) << 4) : first_row) + i * row_bytes;
      if constexpr (FULL) ptx::cp_async_16(destination, source);
      else ptx::cp_async_16(destination, source, odd + i < rows);
      source += step;
    }
  };
  const uint32_t image = stage + kKq + (chunk >> 3) * kHalf + odd * 128 + swizzled;
  copy(in.k, image, 128, true);
  if constexpr (MODE == Mode::kOutput) copy(in.q, image + kQueryRows, 128, true);
  copy(in.g, stage + kInverse + odd * 256 + chunk * 16, 256, false);
  copy(in.v, stage + kValues + odd * 256 + (chunk >> 3) * 128 + swizzled, 256, true);
}

// Starts the loads of a group and arrives at its `loaded` barrier: 32 arrivals when the copies land, one for the beta logits
// and the table entry, which travel through registers into the place that the norms take later.
template <Mode MODE>
__device__ __forceinline__ void load_group(const Arguments& args, int head, int index, uint32_t stage, uint32_t loaded, int lane) {
  const Inputs& in = args.in;
  const int32_t word = group_word(args, index, lane);
  const int token = __shfl_sync(~0u, word, 0), rows = __shfl_sync(~0u, word, 1);
  uint32_t beta = 0;
  if (lane < rows) {
    const int64_t at = (int64_t(token) + lane) * in.beta_stride_t + head * in.beta_stride_h;
    beta = in.beta_is_bf16 ? static_cast<const uint16_t*>(in.beta)[at] : static_cast<const uint32_t*>(in.beta)[at];
  }
  if (rows == kRows) copy_rows<MODE, true>(in, head, token, rows, stage, lane);
  else copy_rows<MODE, false>(in, head, token, rows, stage, lane);
  ptx::cp_async_arrive(loaded);
  if (lane < 16) ptx::store_shared_32(stage + kScalars + lane * 4, beta);
  if (lane < 4) ptx::store_shared_32(stage + kScalars + 64 + lane * 4, word);
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(loaded);
}

__device__ __forceinline__ float decode_beta(const Inputs& in, uint32_t raw, int rows, int lane) {
  const float logit = __uint_as_float(in.beta_is_bf16 ? raw << 16 : raw);
  return lane < rows ? ptx::rcp_approx(1.0f + ptx::exp2_approx(-kLog2e * logit)) : 0.0f;
}

// Reciprocal row norms of the raw rows: k's in lanes 0-15, q's in 16-31. The diagonal of K K^T, exact products in fp32, costs
// a third of the instructions of summing squares and reducing them over the warp.
template <Mode MODE>
__device__ __forceinline__ float row_norms(uint32_t stage, int lane) {
  const int row = lane & 15, r = lane >> 2;
  float kk[2][4] = {}, qq[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = stage + kKq + (step >> 2) * kHalf + row * 128 + (((2 * (step & 3) + (lane >> 4)) ^ (row & 7)) << 4);
    uint32_t a[4];
    ptx::ldmatrix_x4(a, at);  // as B, the same registers are the transposed rows: 0, 2 rows 0-7 and 1, 3 rows 8-15
    ptx::mma_16816(kk[0], a, a[0], a[2]);
    ptx::mma_16816(kk[1], a, a[1], a[3]);
    if constexpr (MODE == Mode::kOutput) {
      ptx::ldmatrix_x4(a, at + kQueryRows);
      ptx::mma_16816(qq[0], a, a[0], a[2]);
      ptx::mma_16816(qq[1], a, a[1], a[3]);
    }
  }
  // Row i's square sits in lane 4 (i % 8) + i % 8 / 2 of its tile: fetch it to lane i.
  const bool odd = r & 1, high = lane & 8, query = lane >> 4;
  const int source = (lane & 7) * 4 + ((lane & 7) >> 1);
  const float k_low = __shfl_sync(~0u, odd ? kk[0][1] : kk[0][0], source), k_high = __shfl_sync(~0u, odd ? kk[1][3] : kk[1][2], source);
  const float q_low = __shfl_sync(~0u, odd ? qq[0][1] : qq[0][0], source), q_high = __shfl_sync(~0u, odd ? qq[1][3] : qq[1][2], source);
  return rsqrtf((query ? (high ? q_high : q_low) : (high ? k_high : k_low)) + 1e-6f);
}

struct GateOfLane {  // g2 = bound2 * sigmoid(A (g + bias)) for this lane's four channels; slope and offset carry -A log2(e)
  float slope, offset[4], bound2;
};

// Rows in place to k~ and q~, k^ beside them, and the group's decay.
template <Mode MODE>
__device__ __forceinline__ void scale_rows(const GateOfLane& gate, int rows, uint32_t stage, int lane) {
  uint32_t image = stage + kKq + (lane >> 4) * kHalf + (lane & 15) * 8;  // row 0 of the half; row i differs by an XOR with i in the 16-byte chunk
  uint32_t transposed = stage + kInverse + (lane >> 1) * kInverseStride + (lane & 1) * 64;
  const uint32_t g_at = stage + kInverse + lane * 8;
  uint2 g_raw[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) g_raw[i] = ptx::load_shared_64(g_at + i * 256);
  float G[4] = {kShift, kShift, kShift, kShift};
#pragma unroll 1  // eight rows an iteration: the instruction cache is shared with the consumers
  for (int half = 0; half < 2; ++half) {
    uint32_t k_inverse[4][4];
    uint2 k_raw[2], q_raw[2];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = (image ^ ((first + i) << 4)) + (first + i) * 128;
        k_raw[i] = ptx::load_shared_64(at);
        q_raw[i] = MODE == Mode::kOutput ? ptx::load_shared_64(at + kQueryRows) : uint2{0, 0};
      }
    };
    fetch(0);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint2 k_now[2] = {k_raw[0], k_raw[1]}, q_now[2] = {q_raw[0], q_raw[1]};
      if (pair < 3) fetch(pair * 2 + 2);
      float right[2][4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int i = pair * 2 + odd;
        const uint32_t at = (image ^ (i << 4)) + i * 128;
        const float g[4] = {ptx::low_bf16(g_raw[i].x), ptx::high_bf16(g_raw[i].x), ptx::low_bf16(g_raw[i].y), ptx::high_bf16(g_raw[i].y)};
        const float k[4] = {ptx::low_bf16(k_now[odd].x), ptx::high_bf16(k_now[odd].x), ptx::low_bf16(k_now[odd].y), ptx::high_bf16(k_now[odd].y)};
        const float q[4] = {ptx::low_bf16(q_now[odd].x), ptx::high_bf16(q_now[odd].x), ptx::low_bf16(q_now[odd].y), ptx::high_bf16(q_now[odd].y)};
        const float bound2 = i < rows ? gate.bound2 : 0.0f;  // no decay past the document's end
        float left[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float sigmoid = ptx::rcp_approx(1.0f + ptx::exp2_approx(fmaf(g[c], gate.slope, gate.offset[c])));
          G[c] = fmaf(bound2, sigmoid, G[c]);
          left[c] = ptx::exp2_approx(G[c]);
          right[odd][c] = k[c] * ptx::exp2_approx(-G[c]);
        }
        ptx::store_shared_64(at, ptx::pack_bf16(k[0] * left[0], k[1] * left[1]), ptx::pack_bf16(k[2] * left[2], k[3] * left[3]));
        if constexpr (MODE == Mode::kOutput)
          ptx::store_shared_64(at + kQueryRows, ptx::pack_bf16(q[0] * left[0], q[1] * left[1]), ptx::pack_bf16(q[2] * left[2], q[3] * left[3]));
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) k_inverse[c][pair] = ptx::pack_bf16(right[0][c], right[1][c]);
    }
    if (half == 0) {  // the other rows of g, before k^ overwrites them
#pragma unroll
      for (int i = 0; i < 8; ++i) g_raw[i] = ptx::load_shared_64(g_at + (8 + i) * 256);
      __syncwarp();
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::store_shared_128(transposed + c * 16, k_inverse[c][0], k_inverse[c][1], k_inverse[c][2], k_inverse[c][3]);
    image += 1024;
    transposed += 128;
    rows -= 8;
  }
  float decay[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) decay[c] = ptx::exp2_approx(G[c] - kShift);
  const uint32_t decay_at = stage + kDecay + decay_place(lane * 4);
  ptx::store_shared_64(decay_at, __float_as_uint(decay[0]), __float_as_uint(decay[1]));
  ptx::store_shared_64(decay_at + 16, __float_as_uint(decay[2]), __float_as_uint(decay[3]));
}

// KK and QK of the group: one Tensor Core routine for both, D tiles of 8 columns as ptx::mma_16816 leaves them.
template <Mode MODE>
__device__ __forceinline__ void score(float (&kk)[2][4], float (&qk)[2][4], uint32_t stage, int lane) {
  const int row = lane & 15, right = (lane >> 3) & 1;
  const uint32_t b_at = stage + kInverse + right * kInverseStride + (lane >> 4) * 128 + (lane & 7) * 16;
#pragma unroll 4
  for (int step = 0; step < 8; ++step) {
    const uint32_t a_at = stage + kKq + (step >> 2) * kHalf + row * 128 + (((2 * (step & 3) + (lane >> 4)) ^ (row & 7)) << 4);
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4_trans(b, b_at + 2 * step * kInverseStride);
    ptx::ldmatrix_x4(a, a_at);
    ptx::mma_16816(kk[0], a, b[0], b[1]);
    ptx::mma_16816(kk[1], a, b[2], b[3]);
    if constexpr (MODE == Mode::kOutput) {
      ptx::ldmatrix_x4(a, a_at + kQueryRows);
      ptx::mma_16816(qk[0], a, b[0], b[1]);
      ptx::mma_16816(qk[1], a, b[2], b[3]);
    }
  }
}

// Z by forward substitution in fp32, lane c (and c + 16) one column; from it W, W' in the places of k~ and q~, and Z'.
template <Mode MODE>
__device__ __forceinline__ void store_operands(const float (&kk)[2][4], const float (&qk)[2][4], float norm, float beta, uint32_t stage, int lane) {
  const int r = lane >> 2, c = lane & 3, column = lane & 15, upper = lane >> 4;
  const float row_scale = norm * beta;  // lanes 0-15: beta_i rk_i
  const float scale_i[2] = {__shfl_sync(~0u, row_scale, r), __shfl_sync(~0u, row_scale, r + 8)};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int j = tile * 8 + 2 * c;
    const float rk_j[2] = {__shfl_sync(~0u, norm, j), __shfl_sync(~0u, norm, j + 1)};
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int i = r + 8 * low;
      const float l0 = j < i ? scale_i[low] * rk_j[0] * kk[tile][2 * low] : 0.0f, l1 = j + 1 < i ? scale_i[low] * rk_j[1] * kk[tile][2 * low + 1] : 0.0f;
      ptx::store_shared_64(stage + kZ + i * 64 + j * 4, __float_as_uint(l0), __float_as_uint(l1));
    }
  }
  __syncwarp();
  float x[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j4 = 0; j4 < i; j4 += 4) {
      const uint4 packed = ptx::load_shared_128(stage + kZ + i * 64 + j4 * 4);
      const float l[4] = {__uint_as_float(packed.x), __uint_as_float(packed.y), __uint_as_float(packed.z), __uint_as_float(packed.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j4 + j < i) sum = fmaf(-l[j], x[j4 + j], sum);
    }
    x[i] = sum;
  }
  const float beta_c = __shfl_sync(~0u, beta, column), minus_rk_c = -__shfl_sync(~0u, norm, column);
  __syncwarp();  // every lane has read L: its place becomes Z and Y
  const uint32_t z_at = stage + kZ + upper * 2 * kTileStride + (column >> 3) * kTileStride + (column & 7) * 2;
  const uint4 rk_low = ptx::load_shared_128(stage + kScalars + upper * 32), rk_high = ptx::load_shared_128(stage + kScalars + upper * 32 + 16);
  const uint32_t rk[8] = {rk_low.x, rk_low.y, rk_low.z, rk_low.w, rk_high.x, rk_high.y, rk_high.z, rk_high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float z = __uint_as_float(rk[i]) * beta_c * (upper ? x[i + 8] : x[i]);
    ptx::store_shared_16(z_at + i * 16, __bfloat16_as_ushort(__float2bfloat16_rn(z)));
    ptx::store_shared_16(z_at + (kSecond - kZ) + i * 16, __bfloat16_as_ushort(__float2bfloat16_rn(z * minus_rk_c)));
  }
  __syncwarp();
  const uint32_t tile_at = stage + kZ + (lane & 7) * 16 + ((lane >> 3) & 1) * 2 * kTileStride + upper * kTileStride;
  uint32_t y[4], qk_y[4];
  ptx::ldmatrix_x4(y, tile_at + (kSecond - kZ));
  if constexpr (MODE == Mode::kOutput) {
    uint32_t qk_a[4], b[4];  // a D tile pair, packed, is an A operand
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int tile = e >> 1, low = e & 1, i = r + 8 * low, j = tile * 8 + 2 * c;
      qk_a[e] = ptx::pack_bf16(j <= i ? qk[tile][2 * low] : 0.0f, j + 1 <= i ? qk[tile][2 * low + 1] : 0.0f);
    }
    float product[2][4] = {};
    ptx::ldmatrix_x4_trans(b, tile_at + (kSecond - kZ));
    ptx::mma_16816(product[0], qk_a, b[0], b[1]);
    ptx::mma_16816(product[1], qk_a, b[2], b[3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) qk_y[e] = ptx::pack_bf16(product[e >> 1][2 * (e & 1)], product[e >> 1][2 * (e & 1) + 1]);
    float second[2][4] = {};
    ptx::ldmatrix_x4_trans(b, tile_at);
    ptx::mma_16816(second[0], qk_a, b[0], b[1]);
    ptx::mma_16816(second[1], qk_a, b[2], b[3]);
    __syncwarp();  // every lane has read Y: its place becomes Z'
#pragma unroll
    for (int e = 0; e < 4; ++e)
      ptx::store_shared_32(stage + kSecond + (e & 1) * 2 * kTileStride + (e >> 1) * kTileStride + r * 16 + c * 4, ptx::pack_bf16(second[e >> 1][2 * (e & 1)], second[e >> 1][2 * (e & 1) + 1]));
  }
  // 16 channels at a time, in the places of the k~ and q~ that they are made of; the next operands are fetched first.
  const auto place = [&](int step) { return stage + kKq + (step >> 2) * kHalf + column * 128 + (((2 * (step & 3) + upper) ^ (column & 7)) << 4); };
  uint32_t k_next[4], q_next[4];
  ptx::ldmatrix_x4_trans(k_next, place(0));
  if constexpr (MODE == Mode::kOutput) ptx::ldmatrix_x4(q_next, place(0) + kQueryRows);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = place(step), k[4] = {k_next[0], k_next[1], k_next[2], k_next[3]}, q[4] = {q_next[0], q_next[1], q_next[2], q_next[3]};
    if (step < 7) {
      ptx::ldmatrix_x4_trans(k_next, place(step + 1));
      if constexpr (MODE == Mode::kOutput) ptx::ldmatrix_x4(q_next, place(step + 1) + kQueryRows);
    }
    float w[2][4] = {};
    ptx::mma_16816(w[0], y, k[0], k[1]);
    ptx::mma_16816(w[1], y, k[2], k[3]);
    if constexpr (MODE == Mode::kOutput) {  // an A operand is a packed D tile pair: q~ seeds the accumulators
      float w2[2][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) w2[e >> 1][2 * (e & 1)] = ptx::low_bf16(q[e]), w2[e >> 1][2 * (e & 1) + 1] = ptx::high_bf16(q[e]);
      ptx::mma_16816(w2[0], qk_y, k[0], k[1]);
      ptx::mma_16816(w2[1], qk_y, k[2], k[3]);
      ptx::stmatrix_x4(at + kQueryRows, ptx::pack_bf16(w2[0][0], w2[0][1]), ptx::pack_bf16(w2[0][2], w2[0][3]), ptx::pack_bf16(w2[1][0], w2[1][1]), ptx::pack_bf16(w2[1][2], w2[1][3]));
    }
    ptx::stmatrix_x4(at, ptx::pack_bf16(w[0][0], w[0][1]), ptx::pack_bf16(w[0][2], w[0][3]), ptx::pack_bf16(w[1][0], w[1][1]), ptx::pack_bf16(w[1][2], w[1][3]));
  }
}

// Loads run kAhead groups before their use and are handed from warp to warp through the `loaded` barriers, so that no warp
// waits for memory while it has operands to build.
template <Mode MODE>
__device__ __forceinline__ void produce(const Arguments& args, int head, int first, int count, uint32_t stages, const Barriers& barriers, int warp, int lane) {
  const Inputs& in = args.in;
  GateOfLane gate;
  gate.slope = -kLog2e * expf(in.a_log[head]);
  gate.bound2 = in.lower_bound * kLog2e;
#pragma unroll
  for (int c = 0; c < 4; ++c) gate.offset[c] = in.dt_bias ? gate.slope * in.dt_bias[head * kWidth + lane * 4 + c] : 0.0f;
  for (int m = warp; m < kAhead && m < count; m += kProducerWarps)
    load_group<MODE>(args, head, first + m, stages + m * kStageBytes, barriers.loaded + m * 8, lane);
  for (int m = warp; m < count; m += kProducerWarps) {
    asm volatile("" : "+r"(lane));  // lane's addresses and masks are recomputed: kept across the loop they would not fit the registers
    const Stage at = Stage::of(m);  // not carried from group to group: recomputing it is cheaper than the registers
    const uint32_t stage = stages + at.index * kStageBytes;
    ptx::mbarrier_wait(barriers.loaded + at.index * 8, at.parity);
    __syncwarp();
    const uint32_t scalar = ptx::load_shared_32(stage + kScalars + (lane & 15) * 4);             // beta of row lane
    const int32_t word = int32_t(ptx::load_shared_32(stage + kScalars + 64 + (lane & 3) * 4));   // of the table entry
    const int rows = __shfl_sync(~0u, word, 1);
    const float norm = row_norms<MODE>(stage, lane), beta = decode_beta(in, scalar, rows, lane);
    ptx::store_shared_32(stage + kScalars + lane * 4, __float_as_uint(lane < 16 ? norm : norm * in.scale));  // every lane has its beta and word
    scale_rows<MODE>(gate, rows, stage, lane);
    if (lane < 4) ptx::store_shared_32(stage + kGroup + lane * 4, word);
    __syncwarp();
    float kk[2][4] = {}, qk[2][4] = {};
    score<MODE>(kk, qk, stage, lane);
    store_operands<MODE>(kk, qk, __uint_as_float(ptx::load_shared_32(stage + kScalars + (lane & 15) * 4)), beta, stage, lane);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.full + at.index * 8);
    if (m + kAhead < count) {
      const Stage ahead = Stage::of(m + kAhead);
      ptx::mbarrier_wait(barriers.empty + ahead.index * 8, ahead.parity ^ 1);
      __syncwarp();
      load_group<MODE>(args, head, first + m + kAhead, stages + ahead.index * kStageBytes, barriers.loaded + ahead.index * 8, lane);
    }
  }
}

}  // namespace megamoe::kda
