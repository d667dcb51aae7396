// KDA decode step. It is the traffic of the states: 128 KB a sequence and head, read and written once.
//
// A block takes 32 of the 128 value columns of one sequence and head: 16 KB of state, all of it asked for before anything else
// is done, held in registers, written once. Thread t: columns 4 (t % 8) .. + 3 of rows t / 8 + 16 i. With S' = diag(decay) S,
//   u = beta (v - S'^T k)      S <- S' + k u^T      o = S'^T q + (q . k) u
// so both products are taken in the one pass over S'. Sums run in a fixed order: rows of a thread, lanes, warps.
#include "kda_decode.h"

namespace megamoe::kda {
namespace {

constexpr int kColumns = 32, kThreads = 128, kRowsApart = kThreads / (kColumns / 4), kRowsOfThread = kWidth / kRowsApart, kWarps = kThreads / 32;
static_assert(kThreads == kWidth);  // a thread owns one channel of q, k and g

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__global__ void __launch_bounds__(kThreads) smxx_kda_decode(const Decode args) {
  __shared__ float decay_K[kWidth], k_K[kWidth], q_K[kWidth];
  __shared__ float dots[3][kWarps];               // k.k, q.q, q.k of a warp's channels
  __shared__ float of_k[kWarps][kColumns], of_q[kWarps][kColumns];  // S'^T k and S'^T q of a warp's rows
  const int split = blockIdx.x % (kWidth / kColumns), head = blockIdx.x / (kWidth / kColumns) % args.H;
  const int64_t sequence = blockIdx.x / (kWidth / kColumns) / args.H;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, column = thread % (kColumns / 4) * 4, row = thread / (kColumns / 4);
  __nv_bfloat16* o = args.o + (sequence * args.H + head) * kWidth + split * kColumns;
  const int64_t slot = args.slots ? args.slots[sequence] : sequence;
  if (slot < 0) {
    if (thread < kColumns) o[thread] = __float2bfloat16_rn(0.0f);
    return;
  }
  float* state = args.states + (slot * args.H + head) * kWidth * kWidth + row * kWidth + split * kColumns + column;
  float4 s[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) s[i] = *reinterpret_cast<const float4*>(state + i * kRowsApart * kWidth);

  const auto load = [&](const View& x, int channel) { return __bfloat162float(x.base[sequence * x.stride_t + head * x.stride_h + channel]); };
  const float k = load(args.k, thread), q = load(args.q, thread);
  const float z = load(args.g, thread) + (args.dt_bias ? args.dt_bias[head * kWidth + thread] : 0.0f);
  const float sums[3] = {sum_over_warp(k * k), sum_over_warp(q * q), sum_over_warp(q * k)};
  if (lane == 0) dots[0][warp] = sums[0], dots[1][warp] = sums[1], dots[2][warp] = sums[2];
  decay_K[thread] = expf(args.lower_bound * sigmoid(expf(args.a_log[head]) * z));
  __syncthreads();
  float kk = 0.0f, qq = 0.0f, qk = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) kk += dots[0][w], qq += dots[1][w], qk += dots[2][w];
  const float norm_k = rsqrtf(kk + 1e-6f), norm_q = args.scale * rsqrtf(qq + 1e-6f);
  k_K[thread] = k * norm_k, q_K[thread] = q * norm_q;
  __syncthreads();

  float4 with_k{0.0f, 0.0f, 0.0f, 0.0f}, with_q{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int r = row + i * kRowsApart;
    const float decay = decay_K[r], k_r = k_K[r], q_r = q_K[r];
    s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
    with_k.x = fmaf(k_r, s[i].x, with_k.x), with_k.y = fmaf(k_r, s[i].y, with_k.y), with_k.z = fmaf(k_r, s[i].z, with_k.z), with_k.w = fmaf(k_r, s[i].w, with_k.w);
    with_q.x = fmaf(q_r, s[i].x, with_q.x), with_q.y = fmaf(q_r, s[i].y, with_q.y), with_q.z = fmaf(q_r, s[i].z, with_q.z), with_q.w = fmaf(q_r, s[i].w, with_q.w);
  }
  float partial[8] = {with_k.x, with_k.y, with_k.z, with_k.w, with_q.x, with_q.y, with_q.z, with_q.w};
#pragma unroll
  for (int e = 0; e < 8; ++e)
#pragma unroll
    for (int mask = 8; mask < 32; mask *= 2) partial[e] += __shfl_xor_sync(~0u, partial[e], mask);  // lanes of the same columns
  if (lane < kColumns / 4)
#pragma unroll
    for (int e = 0; e < 4; ++e) of_k[warp][column + e] = partial[e], of_q[warp][column + e] = partial[4 + e];
  __syncthreads();

  const int64_t at_beta = sequence * args.beta_stride_b + head * args.beta_stride_h;
  const float beta = sigmoid(args.beta_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.beta)[at_beta]) : static_cast<const float*>(args.beta)[at_beta]);
  const auto write_of = [&](int c) {  // u of a column of this block
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_k[w][c];
    return beta * (load(args.v, split * kColumns + c) - sum);
  };
  const float u[4] = {write_of(column), write_of(column + 1), write_of(column + 2), write_of(column + 3)};
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const float k_r = k_K[row + i * kRowsApart];
    const float4 next{fmaf(k_r, u[0], s[i].x), fmaf(k_r, u[1], s[i].y), fmaf(k_r, u[2], s[i].z), fmaf(k_r, u[3], s[i].w)};
    *reinterpret_cast<float4*>(state + i * kRowsApart * kWidth) = next;
  }
  if (thread < kColumns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_q[w][thread];
    o[thread] = __float2bfloat16_rn(fmaf(qk * norm_q * norm_k, write_of(thread), sum));
  }
}

}  // namespace

cudaError_t decode(const Decode& args, cudaStream_t stream) {
  const int64_t blocks = args.B * args.H * (kWidth / kColumns);
  if (blocks == 0) return cudaError_t{};
#ifdef MEGAMOE_SIMT_EMULATION
  (void)stream;
  simt::launch(dim3(unsigned(blocks)), kThreads, 0, [&] { smxx_kda_decode(args); });
  return 0;
#else
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  smxx_kda_decode<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
#endif
}

}  // namespace megamoe::kda
