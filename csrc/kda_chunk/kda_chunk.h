// Plain-pointer interface of the KDA kernels: what csrc/ops.cpp may call. Nothing here knows torch.
//
// Legend: T tokens of the packed stream, N documents, H heads, K = V = 128 key and value widths.
// Element (t, h, c) of an input lies at base + t*stride_t + h*stride_h + c (elements, 64-bit; c is contiguous).
// Outputs are contiguous: (T, H, 128), (T, H), (N, H, K, V), (H,), (H, K).
// Every function enqueues on `stream` and returns the launch status; none allocates, synchronises or reads device
// memory on the host, so all of them can be captured into a CUDA graph. Same inputs give the same bits.
#pragma once

#ifdef MEGAMOE_SIMT_EMULATION
#include "sm90_kda_chunk_fwd_simt.cuh"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

namespace megamoe::kda {

constexpr int kWidth = 128;  // K = V: the only head width these kernels serve

// A strided bf16 (T, H, 128) view. 16-byte aligned base; strides in elements, multiples of 8.
struct View {
  const __nv_bfloat16* base;
  int64_t stride_t;
  int64_t stride_h;
};

// What forward and backward read alike: the raw inputs of the contract, nothing precomputed.
struct Inputs {
  View q, k, v, g;
  const void* beta;  // (T, H) logits, bf16 when beta_is_bf16, else fp32
  int64_t beta_stride_t, beta_stride_h;
  bool beta_is_bf16;
  const float* a_log;          // (H,)
  const float* dt_bias;        // (H, K) or nullptr
  const float* initial_state;  // (N, H, K, V) or nullptr for zero
  const int32_t* cu_seqlens;   // (N + 1,) on the device, or nullptr: one document
  int64_t T;
  int H;
  int N;  // 1 when cu_seqlens is nullptr
  float lower_bound;
  float scale;
};

// ---- forward: sm90_kda_chunk_fwd.cu
struct Forward {
  Inputs in;
  __nv_bfloat16* o;    // (T, H, V)
  float* final_state;  // (N, H, K, V) or nullptr
  void* workspace;     // forward_workspace_bytes() bytes, 256-byte aligned, contents arbitrary
  int num_sms;
};
size_t forward_workspace_bytes(int64_t T, int H, int N, int num_sms);
cudaError_t forward(const Forward& args, cudaStream_t stream);

// ---- backward: sm90_kda_chunk_bwd*.cu
struct Backward {
  Inputs in;
  View d_o;                    // gradient of o
  const float* d_final_state;  // (N, H, K, V) or nullptr for zero
  __nv_bfloat16 *d_q, *d_k, *d_v, *d_g;
  void* d_beta;            // (T, H) in beta's dtype
  float* d_a_log;          // (H,)
  float* d_dt_bias;        // (H, K) or nullptr
  float* d_initial_state;  // (N, H, K, V) or nullptr
  void* workspace;         // backward_workspace_bytes() bytes, 256-byte aligned, contents arbitrary
  int num_sms;
};
size_t backward_workspace_bytes(int64_t T, int H, int N, int num_sms);
cudaError_t backward(const Backward& args, cudaStream_t stream);

}  // namespace megamoe::kda

// Schemas that csrc/ops.cpp registers over these (empty tensors stand for outputs that were not asked for):
//   kda_chunk_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor? dt_bias,
//                 Tensor? initial_state, Tensor? cu_seqlens, float lower_bound, float scale, bool output_final_state)
//       -> (Tensor o, Tensor final_state)
//   kda_chunk_bwd(Tensor d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log,
//                 Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float lower_bound, float scale)
//       -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_g, Tensor d_beta, Tensor d_A_log, Tensor d_dt_bias,
//           Tensor d_initial_state)
