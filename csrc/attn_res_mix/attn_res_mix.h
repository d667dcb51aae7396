// Plain-pointer interface of the AttnRes mix. Nothing here knows torch.
//
// Legend: T tokens, D width, n rows. Rows are contiguous bf16 (T, D), 16-byte aligned, D a multiple of 8.
// Functions enqueue on `stream` and return the launch status; none allocates or synchronises. Same inputs, same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace megamoe::attn_res {

constexpr int kMaxRows = 16;

struct Mix {
  const __nv_bfloat16* row[kMaxRows];
  const float* u;  // (D,) query * norm weight
  int64_t T;
  int D;
  int n;
  float eps;  // forward only
  int num_sms;
};

// How many rows of width D the kernels hold at once; larger n is refused with cudaErrorInvalidValue.
int most_rows(int D, bool backward);

// out (T, D); rv (2, n, T) fp32: reciprocal norm of each row and its product with u, for backward.
cudaError_t forward(const Mix& mix, __nv_bfloat16* out, float* rv, cudaStream_t stream);

struct Backward {
  const __nv_bfloat16* d_out;        // (T, D)
  const float* rv;                   // from forward
  __nv_bfloat16* d_row[kMaxRows];    // (T, D) each, or nullptr where no gradient is wanted
  float* du_parts;                   // (num_sms, D) scratch
  float* du;                         // (D,) sum over rows and tokens, in an order fixed by num_sms
};
cudaError_t backward(const Mix& mix, const Backward& args, cudaStream_t stream);

}  // namespace megamoe::attn_res
