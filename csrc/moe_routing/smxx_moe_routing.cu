// Routing: sigmoid scores, the A+1 largest biased scores of each token, renormalised weights, required-bias histogram.
//
// route       one warp per token. Lane l holds experts l, l + 32, … in registers. A+1 rounds of: warp maximum of the lanes'
//             best keys (redux), lowest id among equals (redux), the winning lane strikes it and looks for its next best.
//             Only that lane's registers are searched, so a round is some 60 instructions whatever E is.
// histogram   a block owns 32 consecutive experts (one per lane, so loads are 128 contiguous bytes) and a share of the
//             tokens; counts live in shared memory and are added to memory once.
//
// exp and division are the accurate ones: scores agree bit for bit with the framework's sigmoid, hence so do ties,
// bins and selections.
#include "moe_routing.h"

namespace megamoe::routing {
namespace {

constexpr int kWarps = 8;

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, __fadd_rn(1.f, expf(-x))); }

// Monotone map from float to unsigned; 0 is below every number and marks what is struck out. NaN sorts above all.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
__device__ __forceinline__ float value_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

template <int PER_LANE>
__global__ void __launch_bounds__(kWarps * 32) route_kernel(Route args) {
  const int lane = threadIdx.x % 32;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= args.N) return;
  const float* logits = args.logits + n * args.E;
  const bool real = !args.real || args.real[n];

  uint32_t key[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) {
    const int e = j * 32 + lane;
    key[j] = 0;
    if (e < args.E) {
      const float logit = logits[e];
      key[j] = key_of(__fadd_rn(args.select_on_logits ? logit : sigmoid(logit), args.bias[e]));
    }
  }
  uint32_t best = 0;
  int best_j = 0;
  auto search = [&] {
    best = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
      if (key[j] > best) best = key[j], best_j = j;
  };
  search();

  // Lane a keeps the a-th choice.
  int chosen = 0;
  uint32_t last = 0;
  const int rounds = min(args.A + 1, args.E);
  for (int a = 0; a < rounds; ++a) {
    last = __reduce_max_sync(~0u, best);
    const int id = __reduce_min_sync(~0u, best == last ? best_j * 32 + lane : 0x7fffffff);
    if (lane == a) chosen = id;
    if (id % 32 == lane) {
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j)
        if (j == id / 32) key[j] = 0;
      search();
    }
  }
  if (lane == 0) args.cutoff[n] = value_of(last);

  const bool mine = lane < args.A;
  const float score = mine ? sigmoid(logits[chosen]) : 0.f;
  float sum = 0.f;  // in order of choice
  for (int a = 0; a < args.A; ++a) sum += __shfl_sync(~0u, score, a);
  if (!mine) return;
  args.idx[n * args.A + lane] = real ? chosen : -1;
  args.weight[n * args.A + lane] = __fmul_rn(__fdiv_rn(score, sum + 1e-20f), args.scale);
  if (real && args.count) atomicAdd(args.count + chosen, 1ull);
}

// w_a = c s_a / S, S = sum s + 1e-20:  ds_a = c/S (dw_a - sum_b dw_b s_b / S);  dlogit = ds s (1 - s)
__global__ void route_backward_kernel(RouteBackward args) {
  const int lane = threadIdx.x % 32;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= args.N) return;
  const int64_t id = lane < args.A ? args.idx[n * args.A + lane] : -1;
  const float score = id >= 0 ? sigmoid(args.logits[n * args.E + id]) : 0.f;
  const float dw = id >= 0 ? args.d_weight[n * args.A + lane] : 0.f;
  float sum = 1e-20f, mean = 0.f;
  for (int a = 0; a < args.A; ++a) {
    const float s = __shfl_sync(~0u, score, a), d = __shfl_sync(~0u, dw, a);
    sum += s, mean = fmaf(s, d, mean);
  }
  if (id >= 0) args.d_logits[n * args.E + id] = args.scale / sum * (dw - mean / sum) * score * (1.f - score);
}

constexpr int kHistogramThreads = 1024;

__global__ void __launch_bounds__(kHistogramThreads, 1) histogram_kernel(Histogram args) {
  extern __shared__ int32_t counts[];  // [32][B]
  __shared__ float extreme[2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = kHistogramThreads / 32;
  for (int i = threadIdx.x; i < 32 * args.B; i += kHistogramThreads) counts[i] = 0;
  float low = INFINITY, high = -INFINITY;
  for (int e = threadIdx.x; e < args.E; e += kHistogramThreads) low = fminf(low, args.bias[e]), high = fmaxf(high, args.bias[e]);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    low = fminf(low, __shfl_xor_sync(~0u, low, offset)), high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
  }
  if (lane == 0) extreme[0][warp] = low, extreme[1][warp] = high;
  __syncthreads();
  for (int i = 0; i < warps; ++i) low = fminf(low, extreme[0][i]), high = fmaxf(high, extreme[1][i]);
  low = __fsub_rn(low, 1.f), high = __fadd_rn(high, 1.f);
  const float width = __fdiv_rn(__fsub_rn(high, low), static_cast<float>(args.B));

  const int e = blockIdx.x * 32 + lane;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * warps;
  if (e < args.E) {
#pragma unroll 4
    for (int64_t n = static_cast<int64_t>(blockIdx.y) * warps + warp; n < args.N; n += stride) {
      if (args.real && !args.real[n]) continue;
      const float needed = __fsub_rn(args.cutoff[n], sigmoid(args.logits[n * args.E + e]));
      const float bin = floorf(__fdiv_rn(__fsub_rn(needed, low), width));
      atomicAdd(&counts[lane * args.B + static_cast<int>(fminf(fmaxf(bin, 0.f), static_cast<float>(args.B - 1)))], 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * args.B; i += kHistogramThreads) {
    const int expert = blockIdx.x * 32 + i / args.B;
    if (counts[i] && expert < args.E) atomicAdd(args.histogram + static_cast<int64_t>(blockIdx.x) * 32 * args.B + i, counts[i]);
  }
}

}  // namespace

cudaError_t route(const Route& args, cudaStream_t stream) {
  if (args.E < 1 || args.E > kMaxExperts || args.A < 1 || args.A > kMaxChosen || args.A > args.E) return cudaErrorInvalidValue;
  if (args.N == 0) return cudaSuccess;
  const int blocks = static_cast<int>((args.N + kWarps - 1) / kWarps);
  const int per_lane = (args.E + 31) / 32;
  if (per_lane <= 4) route_kernel<4><<<blocks, kWarps * 32, 0, stream>>>(args);
  else if (per_lane <= 16) route_kernel<16><<<blocks, kWarps * 32, 0, stream>>>(args);
  else if (per_lane <= 28) route_kernel<28><<<blocks, kWarps * 32, 0, stream>>>(args);
  else route_kernel<32><<<blocks, kWarps * 32, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t route_backward(const RouteBackward& args, cudaStream_t stream) {
  if (args.A < 1 || args.A > kMaxChosen) return cudaErrorInvalidValue;
  if (args.N == 0) return cudaSuccess;
  if (cudaError_t error = cudaMemsetAsync(args.d_logits, 0, args.N * args.E * sizeof(float), stream)) return error;
  route_backward_kernel<<<static_cast<int>((args.N + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t histogram(const Histogram& args, cudaStream_t stream) {
  if (args.B < 2 || args.B > kMaxBins || args.E < 1 || args.E > kMaxExperts) return cudaErrorInvalidValue;
  if (args.N == 0) return cudaSuccess;
  const int groups = (args.E + 31) / 32, bytes = 32 * args.B * static_cast<int>(sizeof(int32_t));
  // One block per SM: shares of the tokens fill the card once, and each share is worth a histogram of its own.
  const int64_t most = (args.N + 255) / 256;
  const int fit = args.num_sms / groups < 1 ? 1 : args.num_sms / groups;
  const int shares = static_cast<int>(fit < most ? fit : most);
  if (cudaError_t error = cudaFuncSetAttribute(histogram_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  histogram_kernel<<<dim3(groups, shares), kHistogramThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace megamoe::routing
