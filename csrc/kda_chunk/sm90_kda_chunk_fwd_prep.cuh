// The producer half of KDA forward: one warp turns 16 raw rows into the operands of one group (see sm90_kda_chunk_fwd.cuh).
//
// Lane l owns channels 4l .. 4l+3 of every row: the cumulative decay runs down a column in registers, without shuffles.
#pragma once

#include "sm90_kda_chunk_fwd.cuh"

namespace megamoe::kda {

// q, k, g, v rows of a group from global memory, two rows an instruction; rows past the document's end become zeros.
template <Mode MODE>
__device__ __forceinline__ void load_rows(const Inputs& in, int head, const Group& group, uint32_t stage, int lane) {
  const int chunk = lane & 15, odd = lane >> 4;
  const uint32_t swizzled = ((chunk & 7) ^ odd) << 4;  // of the first row; row i + odd differs by an XOR with i & 6
  const auto copy = [&](const View& view, uint32_t first_row, uint32_t row_bytes, bool swizzle) {
    const __nv_bfloat16* source = view.base + (int64_t(group.token) + odd) * view.stride_t + head * view.stride_h + chunk * 8;
    const int64_t step = 2 * view.stride_t;
#pragma unroll 4  // in full it costs the loop around it registers, which spill
    for (int i = 0; i < kRows; i += 2) {
      ptx::cp_async_16((swizzle ? first_row ^ ((i & 6) << 4) : first_row) + i * row_bytes, source, odd + i < group.rows);
      source += step;
    }
  };
  const uint32_t image = stage + kKq + (chunk >> 3) * kHalf + odd * 128 + swizzled;
  copy(in.k, image, 128, true);
  if constexpr (MODE == Mode::kOutput) copy(in.q, image + kQueryRows, 128, true);
  copy(in.g, stage + kInverse + odd * 256 + chunk * 16, 256, false);
  copy(in.v, stage + kValues + odd * 256 + (chunk >> 3) * 128 + swizzled, 256, true);
  ptx::cp_async_commit();
}

__device__ __forceinline__ float load_beta(const Inputs& in, int head, const Group& group, int lane) {
  if (lane >= group.rows) return 0.0f;
  const int64_t at = (int64_t(group.token) + lane) * in.beta_stride_t + head * in.beta_stride_h;
  const float logit = in.beta_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(in.beta)[at]) : static_cast<const float*>(in.beta)[at];
  return ptx::rcp_approx(1.0f + ptx::exp2_approx(-kLog2e * logit));
}

// One step of a sum over the warp that also spreads the values: of 2 * WIDTH values a lane, WIDTH remain, those whose index
// has the bit that equals this lane's bit BIT. Five steps give 32 row sums for 31 shuffles instead of 160.
template <int WIDTH, int BIT>
__device__ __forceinline__ void spread_sum(float* x, int lane) {
  const bool upper = lane & BIT;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const float given = upper ? x[i] : x[i + WIDTH], kept = upper ? x[i + WIDTH] : x[i];
    x[i] = kept + __shfl_xor_sync(~0u, given, BIT);
  }
}

struct GateOfLane {  // g2 = bound2 * sigmoid(A (g + bias)) for this lane's four channels; slope and offset carry -A log2(e)
  float slope, offset[4], bound2;
};

// Rows in place to k~ and q~, k^ beside them; returns this lane's row norm (k rows in lanes 0-15, q rows in 16-31).
template <Mode MODE>
__device__ __forceinline__ float scale_rows(const GateOfLane& gate, int rows, uint32_t stage, int lane) {
  uint2 g_raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) g_raw[i] = ptx::load_shared_64(stage + kInverse + i * 256 + lane * 8);
  __syncwarp();  // k^ is about to overwrite g
  const uint32_t image = stage + kKq + (lane >> 4) * kHalf + (lane & 15) * 8;  // row 0; row i differs by an XOR with i & 7 in the 16-byte chunk
  const uint32_t transposed = stage + kInverse + (lane >> 1) * kInverseStride + (lane & 1) * 64;
  float G[4] = {kShift, kShift, kShift, kShift};
  float sums[16];  // of squares: lanes 0-15 k, lanes 16-31 q; rows in order
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t k_inverse[4][4];
    float squares[8];  // of four rows: k, then q
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float right[2][4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int i = half * 8 + pair * 2 + odd;
        const uint32_t at = (image ^ ((i & 7) << 4)) + i * 128;
        const uint2 k_raw = ptx::load_shared_64(at);
        const uint2 q_raw = MODE == Mode::kOutput ? ptx::load_shared_64(at + kQueryRows) : uint2{0, 0};
        const float g[4] = {ptx::low_bf16(g_raw[i].x), ptx::high_bf16(g_raw[i].x), ptx::low_bf16(g_raw[i].y), ptx::high_bf16(g_raw[i].y)};
        const float k[4] = {ptx::low_bf16(k_raw.x), ptx::high_bf16(k_raw.x), ptx::low_bf16(k_raw.y), ptx::high_bf16(k_raw.y)};
        const float q[4] = {ptx::low_bf16(q_raw.x), ptx::high_bf16(q_raw.x), ptx::low_bf16(q_raw.y), ptx::high_bf16(q_raw.y)};
        const float bound2 = i < rows ? gate.bound2 : 0.0f;  // no decay past the document's end
        float left[4];
        squares[i & 3] = squares[4 + (i & 3)] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float sigmoid = ptx::rcp_approx(1.0f + ptx::exp2_approx(fmaf(g[c], gate.slope, gate.offset[c])));
          G[c] = fmaf(bound2, sigmoid, G[c]);
          left[c] = ptx::exp2_approx(G[c]);
          right[odd][c] = k[c] * ptx::exp2_approx(-G[c]);
          squares[i & 3] = fmaf(k[c], k[c], squares[i & 3]);
          squares[4 + (i & 3)] = fmaf(q[c], q[c], squares[4 + (i & 3)]);
        }
        ptx::store_shared_64(at, ptx::pack_bf16(k[0] * left[0], k[1] * left[1]), ptx::pack_bf16(k[2] * left[2], k[3] * left[3]));
        if constexpr (MODE == Mode::kOutput)
          ptx::store_shared_64(at + kQueryRows, ptx::pack_bf16(q[0] * left[0], q[1] * left[1]), ptx::pack_bf16(q[2] * left[2], q[3] * left[3]));
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) k_inverse[c][pair] = ptx::pack_bf16(right[0][c], right[1][c]);
      if (pair & 1) {
        spread_sum<4, 16>(squares, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[half * 8 + (pair >> 1) * 4 + i] = squares[i];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      ptx::store_shared_128(transposed + half * 128 + c * 16, k_inverse[c][0], k_inverse[c][1], k_inverse[c][2], k_inverse[c][3]);
  }
  float decay[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) decay[c] = ptx::exp2_approx(G[c] - kShift);
  ptx::store_shared_128(stage + kDecay + lane * 16, __float_as_uint(decay[0]), __float_as_uint(decay[1]), __float_as_uint(decay[2]), __float_as_uint(decay[3]));
  spread_sum<8, 8>(sums, lane);
  spread_sum<4, 4>(sums, lane);
  spread_sum<2, 2>(sums, lane);
  spread_sum<1, 1>(sums, lane);
  return rsqrtf(sums[0] + 1e-6f);
}

// KK and QK of the group: one Tensor Core routine for both, D tiles of 8 columns as ptx::mma_16816 leaves them.
template <Mode MODE>
__device__ __forceinline__ void score(float (&kk)[2][4], float (&qk)[2][4], uint32_t stage, int lane) {
  const int row = lane & 15, right = (lane >> 3) & 1;
  const uint32_t b_at = stage + kInverse + right * kInverseStride + (lane >> 4) * 128 + (lane & 7) * 16;
#pragma unroll
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

// Z = diag(rk) (I + L)^-1 diag(beta) by forward substitution in fp32, lane c (and c + 16) one column; and QK, masked.
template <Mode MODE>
__device__ __forceinline__ void store_tiles(const float (&kk)[2][4], const float (&qk)[2][4], float norm, float beta, uint32_t stage, int lane) {
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
  const float beta_c = __shfl_sync(~0u, beta, column);
  __syncwarp();  // every lane has read L: its place becomes Z and QK
  const uint32_t z_at = stage + kZ + upper * 256 + (column >> 3) * 128 + (column & 7) * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float rk_i = __shfl_sync(~0u, norm, upper * 8 + i);
    ptx::store_shared_16(z_at + i * 16, __bfloat16_as_ushort(__float2bfloat16_rn(rk_i * beta_c * (upper ? x[i + 8] : x[i]))));
  }
  if constexpr (MODE == Mode::kOutput) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int i = r + 8 * low, j = tile * 8 + 2 * c;
        ptx::store_shared_32(stage + kQK + low * 256 + tile * 128 + r * 16 + c * 4,
                             ptx::pack_bf16(j <= i ? qk[tile][2 * low] : 0.0f, j + 1 <= i ? qk[tile][2 * low + 1] : 0.0f));
      }
  }
}

template <Mode MODE>
__device__ __forceinline__ void produce(const Arguments& args, int head, int first, int count, uint32_t stages, uint32_t full, uint32_t empty, int warp, int lane) {
  const Inputs& in = args.in;
  GateOfLane gate;
  gate.slope = -kLog2e * expf(in.a_log[head]);
  gate.bound2 = in.lower_bound * kLog2e;
  Stage at;
  at.advance(warp);
  Group next = warp < count ? group_at(args, first + warp) : Group{};
  for (int m = warp; m < count; m += kProducerWarps) {
    const Group group = next;
    const uint32_t stage = stages + at.index * kStageBytes;
    ptx::mbarrier_wait(empty + at.index * 8, at.parity ^ 1);
    __syncwarp();
    if (lane == 0) ptx::store_shared_128(stage + kGroup, group.token, group.rows, group.document, group.place);
    load_rows<MODE>(in, head, group, stage, lane);
    const float beta = load_beta(in, head, group, lane);
    // Read again for every group, while its rows are on their way: kept across the loop the offsets would spill.
    float4 bias{0.0f, 0.0f, 0.0f, 0.0f};
    if (in.dt_bias) bias = *reinterpret_cast<const float4*>(in.dt_bias + head * kWidth + lane * 4);
    gate.offset[0] = gate.slope * bias.x, gate.offset[1] = gate.slope * bias.y, gate.offset[2] = gate.slope * bias.z, gate.offset[3] = gate.slope * bias.w;
    ptx::cp_async_wait<0>();
    __syncwarp();
    const float norm = scale_rows<MODE>(gate, group.rows, stage, lane);
    // Asked for here and not before the rows are scaled, where registers are scarcest; the products below hide the load.
    if (m + kProducerWarps < count) next = group_at(args, first + m + kProducerWarps);
    ptx::store_shared_32(stage + kScalars + lane * 4, __float_as_uint(lane < 16 ? norm : norm * in.scale));
    __syncwarp();
    float kk[2][4] = {}, qk[2][4] = {};
    score<MODE>(kk, qk, stage, lane);
    store_tiles<MODE>(kk, qk, norm, beta, stage, lane);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full + at.index * 8);
    at.advance(kProducerWarps);
  }
}

}  // namespace megamoe::kda
