// Plain-pointer interface of the KDA decode step: one token of each of B sequences, the recurrent states updated in place.
//
// Views are (B, H, 128), as kda_chunk.h has them with t read as the sequence. States are a pool (S, H, K, V) fp32, contiguous.
#pragma once

#include "../kda_chunk/kda_chunk.h"

namespace megamoe::kda {

struct Decode {
  View q, k, v, g;
  const void* beta;  // (B, H) logits, bf16 when beta_is_bf16, else fp32
  int64_t beta_stride_b, beta_stride_h;
  bool beta_is_bf16;
  const float* a_log;    // (H,)
  const float* dt_bias;  // (H, K) or nullptr
  const int32_t* slots;  // (B,) row of the pool of each sequence, all different; < 0: no sequence, o = 0; nullptr: sequence b has row b
  float* states;         // (S, H, K, V)
  __nv_bfloat16* o;      // (B, H, V)
  int64_t B;
  int H;
  float lower_bound, scale;
};
// Enqueues on `stream`; no allocation, no synchronisation: capturable. Same inputs give the same bits, whatever else is in the batch.
cudaError_t decode(const Decode& args, cudaStream_t stream);

}  // namespace megamoe::kda
