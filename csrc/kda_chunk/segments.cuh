// The packed stream cut into row groups that restart at document starts, tabulated on the device.
//
// Forward walks groups of 16 rows, backward chunks of 64. The number of groups is only known on the device (it depends
// on cu_seqlens), its bound T / ROWS + N is known on the host: launches and buffers use the bound, entries past the real
// number have rows == 0 and are skipped.
#pragma once

#ifndef MEGAMOE_SIMT_EMULATION
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "segment_maps.cuh"

namespace megamoe::kda {

struct alignas(16) Group {
  int32_t token;     // first token in the stream
  int32_t rows;      // 1..ROWS valid rows; 0: an entry past the end of the table
  int32_t document;  // which document
  int32_t place;     // index of the group in its document, shifted left by one; bit 0: last group of the document

  __device__ int index() const { return place >> 1; }
  __device__ bool first() const { return place < 2; }
  __device__ bool last() const { return place & 1; }
};

__host__ __device__ constexpr int64_t max_groups(int64_t T, int N, int rows) { return T / rows + N; }

// One block of 1024 threads. first_group: (N + 1,) scratch and output: index of each document's first group; [N] is the
// total. table: max_groups entries. cu_seqlens may be nullptr (one document of T tokens).
template <int ROWS>
__global__ void __launch_bounds__(1024) build_group_table(const int32_t* cu_seqlens, int64_t T, int N, int32_t* first_group, Group* table) {
  __shared__ int32_t warp_sum[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto start = [&](int n) { return cu_seqlens ? cu_seqlens[n] : (n ? int32_t(T) : 0); };
  int32_t total = 0;
  for (int base = 0; base < N; base += 1024) {
    const int n = base + threadIdx.x;
    const int32_t own = n < N ? (start(n + 1) - start(n) + ROWS - 1) / ROWS : 0;
    int32_t sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int32_t before = total, all = total;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) before += warp_sum[w];
      all += warp_sum[w];
    }
    if (n < N) first_group[n] = before + sum - own;
    total = all;
    __syncthreads();
  }
  if (threadIdx.x == 0) first_group[N] = total;
  __syncthreads();
  const int64_t entries = max_groups(T, N, ROWS);
  for (int64_t i = threadIdx.x; i < entries; i += 1024) {
    Group group{0, 0, 0, 0};
    if (i < total) {
      int low = 0, high = N;  // the last document whose first group is <= i; empty documents before it share that index
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_group[middle] <= i) low = middle; else high = middle;
      }
      const int32_t index = int32_t(i) - first_group[low];
      const int32_t token = start(low) + index * ROWS, left = start(low + 1) - token;
      group = {token, left < ROWS ? left : ROWS, low, index * 2 + (left <= ROWS)};
    }
    table[i] = group;
  }
}

}  // namespace megamoe::kda
