// Documents cut into segments that run at once from exact entering states: where the cuts lie, and how the segments' maps chain.
//
// With few heads a chain through a whole document leaves most SMs idle. Documents are then cut every `length` rows, counted
// from their OWN start: where the cuts lie is a function of the document alone, so packing, and tokens appended later, change
// no bit. A cut is a border: the state that crosses it, and in backward the gradient that crosses it the other way, come from
// affine maps of whole segments (S -> M S + S0), chained in fp32.
//
// A border at token t has number t / length. Borders of one document are `length` apart, and a document's first border lies
// at least `length` after its start: numbers are distinct, run on inside a document, and lie in 1 .. T / length whatever N is.
#pragma once

#include <cstdint>

#ifdef MEGAMOE_SIMT_EMULATION
#include "sm90_kda_chunk_bwd_simt.cuh"
#else
#include <cuda_runtime.h>
#endif

namespace megamoe::kda {

#ifdef MEGAMOE_KDA_SEGMENT_ROWS  // tests and benchmarks build other lengths
constexpr int kForwardSegment = MEGAMOE_KDA_SEGMENT_ROWS, kBackwardSegment = MEGAMOE_KDA_SEGMENT_ROWS;
#else
constexpr int kForwardSegment = 1024, kBackwardSegment = 4096;
#endif

struct Border {
  int32_t token;     // first token of the segment after it
  int32_t document;
  int32_t index;     // of the segment after it in its document, >= 1; 0: no border has this number
  bool last;         // no further border in this document
};

// start(n): first token of document n, start(N) = T.
template <class Start>
__device__ __forceinline__ Border border_at(const Start& start, int N, int length, int number) {
  const int32_t before = number * length;
  int low = 0, high = N;  // the one document that starts before that token and ends at it or after
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (start(middle) < before) low = middle; else high = middle;
  }
  const int32_t first = start(low), left = start(low + 1) - first, index = (before - first - 1) / length + 1;
  if (int64_t(index) * length >= left) return {0, 0, 0, false};
  return {first + index * length, low, index, int64_t(index + 1) * length >= left};
}

// Chains the maps: slot 0 of border b becomes the state that crosses it, slot kGradient the gradient that crosses it.
//
// states: (borders, H, SLOTS, K, V) fp32. Before: slot 0 = S0 of the segment before the border, slot 1 = M of that segment
// transposed, [column][row] (read only where the segment is not its document's first), and, with four slots, slot 2 = M as it
// is, slot 3 = the gradient that the segment after the border hands back when none enters it (the document's last: the real one).
// One block: 16 of the 128 value columns of one head, in one direction; a thread owns a row of the state.
constexpr int kChainThreads = 128, kChainColumns = 16, kGradient = 3;
template <int SLOTS, class Start>
__device__ __forceinline__ void chain_segments(float* states, int H, int head, int column, bool reverse, const Start& start, int N, int length, int borders) {
  constexpr int kSide = 128, kState = kSide * kSide;
  static_assert(kChainThreads == kSide && kChainColumns % 4 == 0);
  alignas(16) __shared__ float entering[kSide][kChainColumns];
  __shared__ int link[kChainThreads];  // 0: no border, 1: a chain starts here, 2: it goes on
  const int row = threadIdx.x;
  const int64_t step_floats = int64_t(H) * SLOTS * kState;
  float sum[kChainColumns] = {};
  for (int step = 0; step < borders; ++step) {
    if (step % kChainThreads == 0) {
      __syncthreads();
      const int ahead = step + threadIdx.x;
      if (ahead < borders) {
        const Border border = border_at(start, N, length, reverse ? borders - ahead : ahead + 1);
        link[threadIdx.x] = border.index == 0 ? 0 : 1 + (reverse ? !border.last : border.index > 1);
      }
      __syncthreads();
    }
    const int kind = link[step % kChainThreads];
    if (kind == 0) continue;
    float* at = states + (reverse ? borders - step - 1 : step) * step_floats + int64_t(head) * SLOTS * kState;
    float* own = at + (reverse ? kGradient * kState : 0) + row * kSide + column;
    if (kind == 2) {
      // Forward: M of the segment before this border; reverse: of the one after it, which the next border keeps.
      const float* map = (reverse ? at + step_floats + 2 * kState : at + kState) + row;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) entering[row][i] = sum[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) sum[i] = own[i];
#pragma unroll 16
      for (int k = 0; k < kSide; ++k) {
        const float m = map[k * kSide];
#pragma unroll
        for (int i = 0; i < kChainColumns; ++i) sum[i] = fmaf(m, entering[k][i], sum[i]);
      }
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) own[i] = sum[i];
    } else {
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) sum[i] = own[i];
    }
  }
}

}  // namespace megamoe::kda
