// One C entry over the KDA backward for tests that want no torch extension: nvcc makes a GPU library of it, a host compiler with
// -DMEGAMOE_SIMT_EMULATION -x c++ a library that runs the same kernels on the CPU. Not part of the extension.
//
// pointers: q k v g do beta A_log dt_bias initial_state d_final_state cu_seqlens | dq dk dv dg dbeta dA_log ddt_bias d_initial_state | workspace
// (contiguous; null where the contract allows None). dims: T H N beta_is_fp32 num_sms. scalars: scale lower_bound.
#ifdef MEGAMOE_SIMT_EMULATION
#include "sm90_kda_chunk_bwd_launch.cuh"
#else
#include "sm90_kda_chunk_bwd.cu"
#endif

namespace kernels = megamoe::kda_bwd;

extern "C" int64_t kda_bwd_workspace_bytes(int64_t T, int H, int N, int num_sms) { return kernels::make_plan(T, H, N, num_sms).bytes; }

#ifdef MEGAMOE_SIMT_EMULATION
extern "C" int kda_bwd(void** x, const int64_t* dims, const double* scalars, void*) {
  const int H = static_cast<int>(dims[1]);
  auto rows = [H](void* p) { return kernels::Rows{static_cast<const uint16_t*>(p), H * 128, 128}; };
  auto out = [H](void* p) { return kernels::OutRows{static_cast<uint16_t*>(p), H * 128, 128}; };
  kernels::Args a = {};
  a.q = rows(x[0]), a.k = rows(x[1]), a.v = rows(x[2]), a.g = rows(x[3]), a.dout = rows(x[4]);
  a.dq = out(x[11]), a.dk = out(x[12]), a.dv = out(x[13]), a.dg = out(x[14]);
  a.beta = x[5], a.dbeta = x[15], a.beta_token_stride = a.dbeta_token_stride = H, a.beta_head_stride = a.dbeta_head_stride = 1;
  a.beta_is_fp32 = dims[3];
  a.a_log = (float*)x[6], a.dt_bias = (float*)x[7], a.initial_state = (float*)x[8], a.dfinal_state = (float*)x[9], a.cu_seqlens = x[10];
  a.da_log = (float*)x[16], a.ddt_bias = (float*)x[17], a.dinitial_state = (float*)x[18];
  a.num_tokens = dims[0], a.num_heads = H, a.num_docs = dims[2], a.scale = scalars[0], a.lower_bound = scalars[1];
  kernels::run(a, kernels::make_plan(dims[0], H, dims[2], dims[4]), x[19], [](auto kernel, unsigned blocks, int threads, size_t smem, const kernels::Args& args) {
    megamoe::simt::launch(dim3(blocks), threads, smem, [&] { kernel(args); });
  });
  return 0;
}
#else
extern "C" int kda_bwd(void** x, const int64_t* dims, const double* scalars, void* stream) {
  const int64_t H = dims[1];
  auto view = [H](void* p) { return megamoe::kda::View{static_cast<const __nv_bfloat16*>(p), H * 128, 128}; };
  megamoe::kda::Backward b = {};
  b.in = {view(x[0]), view(x[1]), view(x[2]), view(x[3]), x[5], H, 1, dims[3] == 0, (float*)x[6], (float*)x[7], (float*)x[8], (int32_t*)x[10],
          dims[0], static_cast<int>(H), static_cast<int>(dims[2]), static_cast<float>(scalars[1]), static_cast<float>(scalars[0])};
  b.d_o = view(x[4]), b.d_final_state = (float*)x[9];
  b.d_q = (__nv_bfloat16*)x[11], b.d_k = (__nv_bfloat16*)x[12], b.d_v = (__nv_bfloat16*)x[13], b.d_g = (__nv_bfloat16*)x[14];
  b.d_beta = x[15], b.d_a_log = (float*)x[16], b.d_dt_bias = (float*)x[17], b.d_initial_state = (float*)x[18];
  b.workspace = x[19], b.num_sms = static_cast<int>(dims[4]);
  return static_cast<int>(megamoe::kda::backward(b, static_cast<cudaStream_t>(stream)));
}
#endif
