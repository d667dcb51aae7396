// Plain-pointer interface of the routing kernels. Nothing here knows torch.
//
// Legend: N tokens, E experts, A experts per token, B histogram bins. All arrays contiguous, on the device.
// Functions enqueue on `stream` and return the launch status; none allocates or synchronises. Same inputs, same bits:
// the only atomics add integers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megamoe::routing {

constexpr int kMaxExperts = 1024, kMaxChosen = 31, kMaxBins = 1700;

struct Route {
  const float* logits;       // (N, E)
  const float* bias;         // (E,) selects only
  const uint8_t* real;       // (N,) 0 for padding, or nullptr: all real
  int64_t N;
  int E, A;
  float scale;               // routed_scaling_factor
  bool select_on_logits;     // logits + bias instead of sigmoid(logits) + bias
  // out
  int64_t* idx;              // (N, A) descending biased score, ties by lower id; -1 for padding
  float* weight;             // (N, A) sigmoid / (sum + 1e-20) * scale
  float* cutoff;             // (N,) the (A+1)-th biased score (the A-th when A == E)
  unsigned long long* count; // (E,) += slots of real tokens, or nullptr
};
cudaError_t route(const Route& args, cudaStream_t stream);

// d_logits (N, E), zeroed by the call: gradient of the late weights through the chosen scores.
struct RouteBackward {
  const float* logits;
  const int64_t* idx;
  const float* d_weight;
  int64_t N;
  int E, A;
  float scale;
  float* d_logits;
};
cudaError_t route_backward(const RouteBackward& args, cudaStream_t stream);

// histogram (E, B) int32 += real tokens per bin of cutoff - sigmoid(logit); B bins from min(bias) - 1 to max(bias) + 1.
struct Histogram {
  const float* logits;
  const float* bias;
  const float* cutoff;
  const uint8_t* real;
  int64_t N;
  int E, B;
  int num_sms;
  int32_t* histogram;
};
cudaError_t histogram(const Histogram& args, cudaStream_t stream);

}  // namespace megamoe::routing
