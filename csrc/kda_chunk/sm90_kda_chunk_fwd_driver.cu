// One C entry over the KDA forward for tests that want no torch extension: nvcc makes a GPU library of it, a host compiler with
// -DMEGAMOE_SIMT_EMULATION -x c++ a library that runs the same kernels on the CPU. Not part of the extension.
#include "sm90_kda_chunk_fwd.cu"

extern "C" int64_t kda_fwd_workspace_bytes(int64_t T, int H, int N, int num_sms) { return megamoe::kda::forward_workspace_bytes(T, H, N, num_sms); }
extern "C" int64_t kda_fwd_struct_bytes() { return sizeof(megamoe::kda::Forward); }  // the caller lays the struct out itself
extern "C" int kda_fwd(const megamoe::kda::Forward* args, void* stream) { return static_cast<int>(megamoe::kda::forward(*args, static_cast<cudaStream_t>(stream))); }
