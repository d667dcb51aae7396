// AttnRes mix on sm_90: every row is read from memory once forward and once backward.
//
// One block per SM walks over tokens t = block, block + blocks, … A token's rows are 1-D pieces of D bf16 values. One
// producer thread streams them through a ring in shared memory with the bulk copy engine, running ahead into the next
// token; 14 consumer warps use each row twice while it lies there:
//
//   first use    products that span the width: v.v and v.u (forward), v.do (backward). A warp's share is summed by
//                shuffles, the warps' shares through shared memory: one block barrier per token.
//   between      lane i of every warp owns row i: softmax and its gradient are warp shuffles over n lanes.
//   second use   out = sum p_i v_i, or dv_i and this thread's columns of du. Then the slot goes back to the producer.
//
// Each thread owns the same columns for all tokens, so u and du live in registers. du leaves as one line per block and is
// added up in block order by a second kernel.
#include "../common/bulk.cuh"
#include "attn_res_mix.h"

namespace megamoe::attn_res {
namespace {

constexpr int kWarps = 14, kConsumers = kWarps * 32, kThreads = kConsumers + 32;
constexpr int kMaxSlots = 32;
constexpr int kRingBytes = 216 * 1024;

struct Shared {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
  // Two tokens deep: a warp may begin the next token while another still reads this one's sums.
  float sums[2][kMaxRows][2][kWarps + 1];
};

struct Ring {
  int slots, slot = 0;
  uint32_t phase = 0;
  __device__ explicit Ring(int count) : slots(count) {}
  __device__ void next() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

__host__ __device__ constexpr int slot_bytes(int D) { return (D * 2 + 127) / 128 * 128; }
__host__ int ring_slots(int D) {
  const int slots = kRingBytes / slot_bytes(D);
  return slots < kMaxSlots ? slots : kMaxSlots;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}
__device__ __forceinline__ void unpack(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = ptx::low_bf16(words[i]), x[2 * i + 1] = ptx::high_bf16(words[i]);
}
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
  return {ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7])};
}

// The producer: the n rows of each token, after its upstream gradient when there is one.
__device__ void produce(const Mix& mix, const __nv_bfloat16* d_out, Shared& shared, uint32_t ring, int slots) {
  const uint32_t bytes = mix.D * 2;
  Ring at(slots);
  for (int64_t t = blockIdx.x; t < mix.T; t += gridDim.x) {
    for (int i = d_out ? -1 : 0; i < mix.n; ++i, at.next()) {
      const __nv_bfloat16* source = (i < 0 ? d_out : mix.row[i]) + t * mix.D;
      const uint32_t full = ptx::smem_address(&shared.full[at.slot]);
      ptx::mbarrier_wait(ptx::smem_address(&shared.empty[at.slot]), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(full, bytes);
      ptx::bulk_load(ring + at.slot * slot_bytes(mix.D), source, bytes, full);
    }
  }
}

// Thread `tid` owns the 16-byte pieces tid, tid + kConsumers, … of every row.
template <int VECS>
struct Columns {
  int tid, pieces;
  __device__ bool owns(int k) const { return tid + k * kConsumers < pieces; }
  __device__ uint4 load(uint32_t slot, int k) const { return owns(k) ? ptx::load_shared_128(slot + (tid + k * kConsumers) * 16) : uint4{}; }
  __device__ int64_t at(int k) const { return static_cast<int64_t>(tid + k * kConsumers) * 8; }
};

// Sum over the block of one or two values per row, row i ending in lane i of every warp. Fixed order.
template <int VALUES>
__device__ __forceinline__ void sums_of_rows(const Shared& shared, int buffer, int n, int lane, float (&x)[VALUES]) {
  ptx::named_barrier<1, kConsumers>();
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
    x[value] = 0.f;
    if (lane < n) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) x[value] += shared.sums[buffer][lane][value][warp];
    }
  }
}

template <int VECS>
__device__ void consume_forward(const Mix& mix, __nv_bfloat16* out, float* rv, Shared& shared, uint32_t ring, int slots, const float (&u)[VECS][8]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = mix.n, bytes = slot_bytes(mix.D);
  const Columns<VECS> columns{static_cast<int>(threadIdx.x), mix.D / 8};
  Ring at(slots);
  int buffer = 0;
  for (int64_t t = blockIdx.x; t < mix.T; t += gridDim.x, buffer ^= 1) {
    Ring use = at;
    for (int i = 0; i < n; ++i, use.next()) {
      ptx::mbarrier_wait(ptx::smem_address(&shared.full[use.slot]), use.phase);
      float squares = 0.f, vu = 0.f;
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        float v[8];
        unpack(columns.load(ring + use.slot * bytes, k), v);
#pragma unroll
        for (int c = 0; c < 8; ++c) squares = fmaf(v[c], v[c], squares), vu = fmaf(v[c], u[k][c], vu);
      }
      squares = warp_sum(squares), vu = warp_sum(vu);
      if (lane == 0) shared.sums[buffer][i][0][warp] = squares, shared.sums[buffer][i][1][warp] = vu;
    }
    float sums[2];
    sums_of_rows(shared, buffer, n, lane, sums);
    const float r = 1.f / sqrtf(sums[0] / mix.D + mix.eps);
    const float score = lane < n ? r * sums[1] : -INFINITY;
    const float highest = warp_max(score);
    const float e = lane < n ? expf(score - highest) : 0.f;
    const float p = e / warp_sum(e);
    if (warp == 0 && lane < n) rv[lane * mix.T + t] = r, rv[(n + lane) * mix.T + t] = sums[1];
    float mixed[VECS][8] = {};
    for (int i = 0; i < n; ++i, at.next()) {
      const float weight = __shfl_sync(~0u, p, i);
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        float v[8];
        unpack(columns.load(ring + at.slot * bytes, k), v);
#pragma unroll
        for (int c = 0; c < 8; ++c) mixed[k][c] = fmaf(weight, v[c], mixed[k][c]);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.empty[at.slot]));
    }
#pragma unroll
    for (int k = 0; k < VECS; ++k)
      if (columns.owns(k)) *reinterpret_cast<uint4*>(out + t * mix.D + columns.at(k)) = pack(mixed[k]);
  }
}

template <int VECS>
__device__ void consume_backward(const Mix& mix, const Backward& args, Shared& shared, uint32_t ring, int slots, const float (&u)[VECS][8]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = mix.n, bytes = slot_bytes(mix.D);
  const Columns<VECS> columns{static_cast<int>(threadIdx.x), mix.D / 8};
  Ring at(slots);
  int buffer = 0;
  float du[VECS][8] = {};
  for (int64_t t = blockIdx.x; t < mix.T; t += gridDim.x, buffer ^= 1) {
    const float r = lane < n ? args.rv[lane * mix.T + t] : 0.f;
    const float vu = lane < n ? args.rv[(n + lane) * mix.T + t] : 0.f;
    uint4 d_out[VECS];
    ptx::mbarrier_wait(ptx::smem_address(&shared.full[at.slot]), at.phase);
#pragma unroll
    for (int k = 0; k < VECS; ++k) d_out[k] = columns.load(ring + at.slot * bytes, k);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.empty[at.slot]));
    at.next();
    Ring use = at;
    for (int i = 0; i < n; ++i, use.next()) {
      ptx::mbarrier_wait(ptx::smem_address(&shared.full[use.slot]), use.phase);
      float along = 0.f;
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        float v[8], d[8];
        unpack(columns.load(ring + use.slot * bytes, k), v);
        unpack(d_out[k], d);
#pragma unroll
        for (int c = 0; c < 8; ++c) along = fmaf(v[c], d[c], along);
      }
      along = warp_sum(along);
      if (lane == 0) shared.sums[buffer][i][0][warp] = along;
    }
    float dp[1];
    sums_of_rows(shared, buffer, n, lane, dp);
    const float score = lane < n ? r * vu : -INFINITY;
    const float highest = warp_max(score);
    const float e = lane < n ? expf(score - highest) : 0.f;
    const float p = e / warp_sum(e);
    const float ds = p * (dp[0] - warp_sum(p * dp[0]));
    const float along_u = ds * r, along_v = -ds * vu * r * r * r / mix.D;
    for (int i = 0; i < n; ++i, at.next()) {
      const float pi = __shfl_sync(~0u, p, i), ui = __shfl_sync(~0u, along_u, i), vi = __shfl_sync(~0u, along_v, i);
      __nv_bfloat16* d_row = args.d_row[i];
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        float v[8], d[8];
        unpack(columns.load(ring + at.slot * bytes, k), v);
        unpack(d_out[k], d);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          du[k][c] = fmaf(ui, v[c], du[k][c]);
          d[c] = fmaf(pi, d[c], fmaf(ui, u[k][c], vi * v[c]));
        }
        if (d_row && columns.owns(k)) *reinterpret_cast<uint4*>(d_row + t * mix.D + columns.at(k)) = pack(d);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.empty[at.slot]));
    }
  }
  float* line = args.du_parts + static_cast<int64_t>(blockIdx.x) * mix.D;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    if (!columns.owns(k)) continue;
    float4* out = reinterpret_cast<float4*>(line + columns.at(k));
    out[0] = {du[k][0], du[k][1], du[k][2], du[k][3]};
    out[1] = {du[k][4], du[k][5], du[k][6], du[k][7]};
  }
}

template <int VECS, bool BACKWARD>
__global__ void __launch_bounds__(kThreads, 1) mix_kernel(const __grid_constant__ Mix mix, const __grid_constant__ Backward args, __nv_bfloat16* out, float* rv, int slots) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory + slots * slot_bytes(mix.D));
  const uint32_t ring = ptx::smem_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < slots; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&shared.full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&shared.empty[i]), kWarps);
    }
    ptx::mbarrier_init_fence();
    ptx::fence_proxy_async();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) produce(mix, BACKWARD ? args.d_out : nullptr, shared, ring, slots);
    return;
  }
  float u[VECS][8] = {};
  const Columns<VECS> columns{static_cast<int>(threadIdx.x), mix.D / 8};
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    if (!columns.owns(k)) continue;
#pragma unroll
    for (int c = 0; c < 8; ++c) u[k][c] = mix.u[columns.at(k) + c];
  }
  if constexpr (BACKWARD) {
    consume_backward<VECS>(mix, args, shared, ring, slots, u);
  } else {
    consume_forward<VECS>(mix, out, rv, shared, ring, slots, u);
  }
}

// du[d] = sum over lines, in line order within each of 8 fixed groups, then over the groups.
__global__ void sum_lines(const float* lines, float* du, int count, int D) {
  __shared__ float part[8][33];
  const int d = blockIdx.x * 32 + threadIdx.x, each = (count + 7) / 8;
  float x = 0.f;
  if (d < D)
    for (int i = threadIdx.y * each; i < min(count, static_cast<int>(threadIdx.y + 1) * each); ++i) x += lines[static_cast<int64_t>(i) * D + d];
  part[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  if (threadIdx.y || d >= D) return;
  for (int i = 1; i < 8; ++i) x += part[i][threadIdx.x];
  du[d] = x;
}

template <int VECS, bool BACKWARD>
cudaError_t launch(const Mix& mix, const Backward& args, __nv_bfloat16* out, float* rv, int blocks, cudaStream_t stream) {
  const int slots = ring_slots(mix.D), bytes = slots * slot_bytes(mix.D) + static_cast<int>(sizeof(Shared));
  auto* kernel = mix_kernel<VECS, BACKWARD>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(mix, args, out, rv, slots);
  return cudaGetLastError();
}

template <bool BACKWARD>
cudaError_t launch_any(const Mix& mix, const Backward& args, __nv_bfloat16* out, float* rv, int blocks, cudaStream_t stream) {
  switch ((mix.D / 8 + kConsumers - 1) / kConsumers) {
    case 1: return launch<1, BACKWARD>(mix, args, out, rv, blocks, stream);
    case 2: return launch<2, BACKWARD>(mix, args, out, rv, blocks, stream);
    case 3: return launch<3, BACKWARD>(mix, args, out, rv, blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

int blocks_for(const Mix& mix) { return static_cast<int>(mix.T < mix.num_sms ? mix.T : mix.num_sms); }

}  // namespace

int most_rows(int D, bool backward) {
  if (D <= 0 || D % 8 || D / 8 > 3 * kConsumers) return 0;
  const int rows = ring_slots(D) - (backward ? 1 : 0);
  return rows < kMaxRows ? rows : kMaxRows;
}

cudaError_t forward(const Mix& mix, __nv_bfloat16* out, float* rv, cudaStream_t stream) {
  if (mix.n < 1 || mix.n > most_rows(mix.D, false)) return cudaErrorInvalidValue;
  if (mix.T == 0) return cudaSuccess;
  return launch_any<false>(mix, Backward{}, out, rv, blocks_for(mix), stream);
}

cudaError_t backward(const Mix& mix, const Backward& args, cudaStream_t stream) {
  if (mix.n < 1 || mix.n > most_rows(mix.D, true)) return cudaErrorInvalidValue;
  if (mix.T == 0) return cudaMemsetAsync(args.du, 0, mix.D * sizeof(float), stream);
  const int blocks = blocks_for(mix);
  if (cudaError_t error = launch_any<true>(mix, args, nullptr, nullptr, blocks, stream)) return error;
  sum_lines<<<(mix.D + 31) / 32, dim3(32, 8), 0, stream>>>(args.du_parts, args.du, blocks, mix.D);
  return cudaGetLastError();
}

}  // namespace megamoe::attn_res
