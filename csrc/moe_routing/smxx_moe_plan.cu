// Balanced placement (megamoe/ops/moe_plan): one block; the filling itself is one warp, everything around it is the block.
//
// The warp holds two ranks per lane. A step finds the fullest and the emptiest rank by warp reductions over (excess, rank)
// packed into one 64-bit key, then takes the giver's largest experts, again by warp reductions, from shared memory. There are
// at most P - 1 steps and E + P takings, each some ten shuffles.
#include "plan.h"

namespace megamoe::routing {
namespace {

constexpr int kThreads = 1024;

__device__ __forceinline__ int64_t warp_max(int64_t x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = max(x, static_cast<int64_t>(__shfl_xor_sync(~0u, static_cast<long long>(x), offset)));
  return x;
}
// Larger value first, among equals the lower index.
__device__ __forceinline__ int64_t key_of(int64_t value, int index) { return value * 4096 + (4095 - index); }
__device__ __forceinline__ int index_of(int64_t key) { return 4095 - static_cast<int>(key & 4095); }

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const int32_t* count_E, int E, int P, int32_t* share_EP, int32_t* borrowed_Pe) {
  __shared__ int32_t left[kMaxPlanExperts], taken_by[kMaxPlanExperts * 2], taken[kMaxPlanExperts * 2], taken_expert[kMaxPlanExperts * 2];
  __shared__ int32_t load[kMaxPlanRanks];
  __shared__ int takings;
  const int own = E / P, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < E * P; i += kThreads) share_EP[i] = 0;
  for (int i = threadIdx.x; i < E; i += kThreads) left[i] = count_E[i], borrowed_Pe[i] = -1;
  __syncthreads();
  for (int p = threadIdx.x / 32; p < P; p += kThreads / 32) {
    int32_t sum = 0;
    for (int i = lane; i < own; i += 32) sum += left[p * own + i];
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) load[p] = sum;
  }
  __syncthreads();

  if (threadIdx.x < 32) {
    int64_t total = 0;
    for (int p = lane; p < P; p += 32) total += load[p];
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) total += __shfl_xor_sync(~0u, static_cast<long long>(total), offset);
    int64_t over[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int p = lane + j * 32;
      over[j] = p < P ? load[p] - (total / P + (p < total % P)) : 0;
    }
    int count = 0;
    for (;;) {
      int64_t fullest = INT64_MIN, emptiest = INT64_MIN;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int p = lane + j * 32;
        if (p < P) fullest = max(fullest, key_of(over[j], p)), emptiest = max(emptiest, key_of(-over[j], p));
      }
      fullest = warp_max(fullest), emptiest = warp_max(emptiest);
      const int giver = index_of(fullest), taker = index_of(emptiest);
      int64_t missing = emptiest >> 12;
      if (missing == 0) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (lane + j * 32 == giver) over[j] -= missing;
        if (lane + j * 32 == taker) over[j] = 0;
      }
      while (missing > 0) {
        int64_t largest = INT64_MIN;
        for (int i = lane; i < own; i += 32) largest = max(largest, key_of(left[giver * own + i], i));
        largest = warp_max(largest);
        const int e = giver * own + index_of(largest);
        const int32_t moved = static_cast<int32_t>(min(largest >> 12, missing));
        __syncwarp();
        if (lane == 0) left[e] -= moved, taken_by[count] = taker, taken_expert[count] = e, taken[count] = moved;
        __syncwarp();
        missing -= moved, ++count;
      }
    }
    if (lane == 0) takings = count;
  }
  __syncthreads();

  for (int i = threadIdx.x; i < takings; i += kThreads) {
    const int p = taken_by[i], e = taken_expert[i];
    share_EP[e * P + p] = taken[i];
    int place = 0;  // a rank's takings are distinct experts: their order is that of their ids
    for (int k = 0; k < takings; ++k) place += taken_by[k] == p && taken_expert[k] < e;
    borrowed_Pe[p * own + place] = e;
  }
  for (int e = threadIdx.x; e < E; e += kThreads) share_EP[e * P + e / own] = left[e];
}

}  // namespace

cudaError_t plan(const int32_t* count_E, int E, int P, int32_t* share_EP, int32_t* borrowed_Pe, cudaStream_t stream) {
  if (P < 1 || P > kMaxPlanRanks || E < 1 || E > kMaxPlanExperts || E % P) return cudaErrorInvalidValue;
  plan_kernel<<<1, kThreads, 0, stream>>>(count_E, E, P, share_EP, borrowed_Pe);
  return cudaGetLastError();
}

}  // namespace megamoe::routing
