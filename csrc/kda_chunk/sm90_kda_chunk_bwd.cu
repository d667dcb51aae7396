// KDA backward for sm_90a: the plain-pointer entry declared in kda_chunk.h. Kernels: see sm90_kda_chunk_bwd_common.cuh.
#include "kda_chunk.h"
#include "sm90_kda_chunk_bwd_launch.cuh"

namespace megamoe::kda {

size_t backward_workspace_bytes(int64_t T, int H, int N, int num_sms) { return kda_bwd::make_plan(T, H, N, num_sms).bytes; }

cudaError_t backward(const Backward& args, cudaStream_t stream) {
  const Inputs& in = args.in;
  // Token numbers and strides are 32-bit in the kernels; their products are not.
  bool fits = in.T < INT32_MAX - kda_bwd::kChunk && int64_t{in.H} * kWidth <= INT32_MAX;
  auto stride = [&fits](int64_t x) {
    fits = fits && x >= 0 && x <= INT32_MAX;
    return static_cast<int>(x);
  };
  auto rows = [&](const View& v) { return kda_bwd::Rows{reinterpret_cast<const uint16_t*>(v.base), stride(v.stride_t), stride(v.stride_h)}; };
  auto out = [&in](__nv_bfloat16* x) { return kda_bwd::OutRows{reinterpret_cast<uint16_t*>(x), in.H * kWidth, kWidth}; };
  kda_bwd::Args a = {};
  a.q = rows(in.q), a.k = rows(in.k), a.v = rows(in.v), a.g = rows(in.g), a.dout = rows(args.d_o);
  a.dq = out(args.d_q), a.dk = out(args.d_k), a.dv = out(args.d_v), a.dg = out(args.d_g);
  a.beta = in.beta, a.beta_token_stride = stride(in.beta_stride_t), a.beta_head_stride = stride(in.beta_stride_h), a.beta_is_fp32 = !in.beta_is_bf16;
  a.dbeta = args.d_beta, a.dbeta_token_stride = in.H, a.dbeta_head_stride = 1;
  a.a_log = in.a_log, a.dt_bias = in.dt_bias, a.initial_state = in.initial_state, a.dfinal_state = args.d_final_state;
  a.da_log = args.d_a_log, a.ddt_bias = args.d_dt_bias, a.dinitial_state = args.d_initial_state;
  a.cu_seqlens = in.cu_seqlens, a.cu_is_int64 = 0;
  a.num_tokens = in.T, a.num_docs = in.N, a.num_heads = in.H, a.scale = in.scale, a.lower_bound = in.lower_bound;

  cudaError_t status = fits ? cudaSuccess : cudaErrorInvalidValue;
  kda_bwd::run(a, kda_bwd::make_plan(in.T, in.H, in.N, args.num_sms), args.workspace,
               [&](void (*kernel)(const kda_bwd::Args), unsigned blocks, int threads, size_t smem, const kda_bwd::Args& x) {
                 if (status != cudaSuccess || blocks == 0) return;
                 if (smem > 48 * 1024) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
                 if (status != cudaSuccess) return;
                 kernel<<<blocks, threads, smem, stream>>>(x);
                 status = cudaGetLastError();
               });
  return status;
}

}  // namespace megamoe::kda
