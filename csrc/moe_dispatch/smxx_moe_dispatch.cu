// Dispatch and combine over a table of peer addresses. See moe_dispatch.h for layouts and phases.
//
// Slots are assigned by prefix sums, never by atomic counters. Within a chunk of 128 tokens a token names an expert at most
// once, so four words of token bits per expert hold both the count (popcount) and every slot's rank (popcount below it).
//
// Payload kernels give a token (or a slot) to one warp: 16-byte vectors, a row's vector l, l + 32, … in lane l, all loads of a batch
// issued before the first use.
#include "moe_dispatch.h"

namespace megamoe::dispatch {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;

__device__ __forceinline__ uint4 load(const __nv_bfloat16* row, int vector) { return *(reinterpret_cast<const uint4*>(row) + vector); }
__device__ __forceinline__ void store(__nv_bfloat16* row, int vector, const uint4& x) { *(reinterpret_cast<uint4*>(row) + vector) = x; }
__device__ __forceinline__ void unpack(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint4 pack(const float (&x)[8]) { return {pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7])}; }

// ---- count: one block per chunk
__global__ void count_chunks(Count args) {
  extern __shared__ uint32_t bits[];  // [E][4]
  for (int i = threadIdx.x; i < args.E * 4; i += kThreads) bits[i] = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int tokens = static_cast<int>(args.N - first < kChunk ? args.N - first : kChunk), slots = tokens * args.A;
  const int64_t* idx = args.idx + first * args.A;
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    const int e = static_cast<int>(idx[i]), t = i / args.A;
    if (e >= 0) atomicOr(&bits[e * 4 + t / 32], 1u << t % 32);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    const int e = static_cast<int>(idx[i]), t = i / args.A;
    if (e < 0) continue;
    int rank = __popc(bits[e * 4 + t / 32] & ((1u << t % 32) - 1));
    for (int w = 0; w < t / 32; ++w) rank += __popc(bits[e * 4 + w]);
    args.scratch.rank_NA[first * args.A + i] = static_cast<uint8_t>(rank);
  }
  for (int e = threadIdx.x; e < args.E; e += kThreads) {
    const uint32_t* b = bits + e * 4;
    args.scratch.chunk_CE[static_cast<int64_t>(blockIdx.x) * args.E + e] = __popc(b[0]) + __popc(b[1]) + __popc(b[2]) + __popc(b[3]);
  }
}

// Counts per chunk become slots before the chunk. Block: 32 experts (x) by 32 shares of the chunks (y).
__global__ void __launch_bounds__(1024) scan_chunks(int32_t* chunk_CE, int32_t* total_E, int chunks, int E) {
  __shared__ int32_t share[32][33];
  const int e = blockIdx.x * 32 + threadIdx.x, each = (chunks + 31) / 32;
  const int begin = min(static_cast<int>(threadIdx.y) * each, chunks), end = min(begin + each, chunks);
  int32_t sum = 0;
  if (e < E)
    for (int c = begin; c < end; ++c) sum += chunk_CE[static_cast<int64_t>(c) * E + e];
  share[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (e >= E) return;
  int32_t before = 0;
  for (int y = 0; y < static_cast<int>(threadIdx.y); ++y) before += share[y][threadIdx.x];
  for (int c = begin; c < end; ++c) {
    int32_t& x = chunk_CE[static_cast<int64_t>(c) * E + e];
    const int32_t here = x;
    x = before, before += here;
  }
  if (threadIdx.y == 31) total_E[e] = before;
}

__global__ void share_counts_kernel(const int32_t* line, const __grid_constant__ Peers<int32_t> counts, int me, int width) {
  int32_t* to = counts.base[blockIdx.x] + static_cast<int64_t>(me) * width;
  for (int e = threadIdx.x; e < width; e += blockDim.x) to[e] = line[e];
}

// ---- meet
// Peers are other processes, on this GPU or another: system scope. Release is cumulative, so it covers what earlier kernels of
// the stream wrote, to whomever; acquire covers what later ones read.
__device__ __forceinline__ void store_release(int32_t* to, int32_t value) { asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory"); }
__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// One block, thread p looks after peer p. One block only, so that it runs beside whatever else is on the card.
__global__ void __launch_bounds__(kMaxRanks) meet_kernel(const __grid_constant__ Meet args) {
  const int p = threadIdx.x;
  if (load_acquire(args.report)) return;
  int32_t seen = args.epoch;
  bool failed = false;
  if (p < args.P) {
    store_release(args.flags.base[p] + args.me, args.epoch);
    const uint64_t begin = now_ns();
    while ((seen = load_acquire(args.flags.base[args.me] + p)) < args.epoch) {
      if (seen == kGaveUp || now_ns() - begin > args.timeout_ns) {
        failed = true;
        break;
      }
      __nanosleep(100);
    }
  }
  if (!__syncthreads_or(failed)) return;
  if (p < args.P) {
    store_release(args.flags.base[p] + args.me, kGaveUp);
    args.report[2 + p] = seen;
  }
  if (p == 0) args.report[1] = args.epoch;
  __threadfence_system();
  __syncthreads();
  if (p == 0) store_release(args.report, 1);
}

// ---- place
// start_E[e] = rows of the owner's earlier experts, over all sources, + rows of e from ranks before me. One block per owner.
__global__ void __launch_bounds__(1024) place_experts(Place args) {
  __shared__ int32_t lanes[32];
  __shared__ int32_t carried;
  const int owned = args.E / args.P, first = blockIdx.x * owned, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) carried = 0;
  __syncthreads();
  for (int base = 0; base < owned; base += 1024) {
    const int local = base + threadIdx.x, e = first + local;
    int32_t total = 0, before_me = 0;
    if (local < owned) {
      for (int p = 0; p < args.P; ++p) {
        const int32_t n = args.counts_PE[static_cast<int64_t>(p) * args.E + e];
        total += n;
        if (p < args.me) before_me += n;
      }
    }
    int32_t through = total;  // inclusive scan over the block
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int32_t x = __shfl_up_sync(~0u, through, offset);
      if (lane >= offset) through += x;
    }
    if (lane == 31) lanes[warp] = through;
    __syncthreads();
    int32_t earlier = carried;
    for (int w = 0; w < warp; ++w) earlier += lanes[w];
    if (local < owned) {
      args.start_E[e] = earlier + through - total + before_me;
      if (blockIdx.x == args.me) args.count_e[local] = total;
    }
    __syncthreads();
    if (threadIdx.x == 1023) carried = earlier + through;
    __syncthreads();
  }
  if (threadIdx.x == 0 && blockIdx.x == args.me) *args.received = carried;
}

__global__ void place_slots(Place args) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= args.N * args.A) return;
  const int64_t n = slot / args.A;
  const int a = static_cast<int>(slot - n * args.A);
  const int64_t* ids = args.idx + n * args.A;
  const int e = static_cast<int>(ids[a]);
  int place = 0;  // among the token's slots by id, empty ones behind in their own order
  for (int b = 0; b < args.A; ++b) {
    const int other = static_cast<int>(ids[b]);
    place += e >= 0 ? (other >= 0 && other < e) : (other >= 0 || b < a);
  }
  const int64_t at = n * args.A + place;
  args.source_NA[at] = static_cast<uint8_t>(a);
  if (e < 0) {
    args.row_NA[at] = -1, args.owner_NA[at] = 0, args.weight_NA[at] = 0.f;
    return;
  }
  args.row_NA[at] = args.start_E[e] + args.scratch.chunk_CE[n / kChunk * args.E + e] + args.scratch.rank_NA[slot];
  args.owner_NA[at] = static_cast<uint8_t>(e / (args.E / args.P));
  args.weight_NA[at] = args.weight[slot];
}

// ---- payload: one warp per token
struct Slots {
  int row, owner;  // lane a holds slot a
  __device__ Slots(const int32_t* row_NA, const uint8_t* owner_NA, int64_t n, int A, int lane) {
    row = lane < A ? row_NA[n * A + lane] : -1;
    owner = lane < A ? owner_NA[n * A + lane] : 0;
  }
};

constexpr int kSendBatch = 8;

__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ Send args) {
  const int lane = threadIdx.x % 32, vectors = args.D / 8;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= args.N) return;
  const Slots slots(args.row_NA, args.owner_NA, n, args.A, lane);
  // The first slot of each owner carries the payload; owners of a token ascend with its expert ids.
  const int previous = __shfl_up_sync(~0u, slots.owner, 1);
  const bool carries = slots.row >= 0 && (!args.deduplicate || lane == 0 || slots.owner != previous);
  const uint32_t carriers = __ballot_sync(~0u, carries);
  if (args.deduplicate) {
    const int leader = 31 - __clz((carriers & ((2u << lane) - 1)) | 1u);  // nearest carrier at or before this lane
    const int source = __shfl_sync(~0u, slots.row, leader);
    if (slots.row >= 0) args.copy_of.base[slots.owner][slots.row] = source;
  }
  const __nv_bfloat16* x = args.x + n * args.D;
  for (int base = 0; base < vectors; base += 32 * kSendBatch) {
    uint4 piece[kSendBatch];
#pragma unroll
    for (int i = 0; i < kSendBatch; ++i)
      if (base + i * 32 + lane < vectors) piece[i] = load(x, base + i * 32 + lane);
    for (uint32_t left = carriers; left; left &= left - 1) {
      const int a = __ffs(left) - 1;
      const int64_t row = __shfl_sync(~0u, slots.row, a);
      __nv_bfloat16* to = args.rows.base[__shfl_sync(~0u, slots.owner, a)] + row * args.D;
#pragma unroll
      for (int i = 0; i < kSendBatch; ++i)
        if (base + i * 32 + lane < vectors) store(to, base + i * 32 + lane, piece[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) expand_kernel(__nv_bfloat16* rows, const int32_t* copy_of, const int32_t* received, int D) {
  const int lane = threadIdx.x % 32, vectors = D / 8;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= *received) return;
  const int64_t source = copy_of[row];
  if (source == row) return;
#pragma unroll 8
  for (int v = lane; v < vectors; v += 32) store(rows + row * D, v, load(rows + source * D, v));
}

__global__ void __launch_bounds__(kThreads) zero_rest_kernel(__nv_bfloat16* rows, const int32_t* received, int64_t R, int D) {
  const int lane = threadIdx.x % 32, vectors = D / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = *received + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < R; row += step)
    for (int v = lane; v < vectors; v += 32) store(rows + row * D, v, uint4{});
}

constexpr int kCombineVectors = 2, kCombineRows = 8;

// One warp per token and piece of 64 vectors (512 columns): enough warps, and 16 loads in flight in each.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combine args) {
  const int lane = threadIdx.x % 32, vectors = args.D / 8, first = blockIdx.y * 32 * kCombineVectors;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= args.N) return;
  const Slots slots(args.row_NA, args.owner_NA, n, args.A, lane);
  const float weight = args.weight_NA ? (lane < args.A ? args.weight_NA[n * args.A + lane] : 0.f) : 1.f;
  const int filled = __popc(__ballot_sync(~0u, slots.row >= 0));  // filled slots come first
  float sum[kCombineVectors][8] = {};
  for (int base = 0; base < filled; base += kCombineRows) {
    uint4 piece[kCombineRows][kCombineVectors];
#pragma unroll
    for (int a = 0; a < kCombineRows; ++a) {
      const int64_t row = __shfl_sync(~0u, slots.row, (base + a) & 31);
      const __nv_bfloat16* from = args.rows.base[__shfl_sync(~0u, slots.owner, (base + a) & 31)] + row * args.D;
#pragma unroll
      for (int i = 0; i < kCombineVectors; ++i)
        piece[a][i] = base + a < filled && first + i * 32 + lane < vectors ? load(from, first + i * 32 + lane) : uint4{};
    }
#pragma unroll
    for (int a = 0; a < kCombineRows; ++a) {
      const float w = __shfl_sync(~0u, weight, (base + a) & 31);
      if (base + a >= filled) continue;
#pragma unroll
      for (int i = 0; i < kCombineVectors; ++i) {
        float x[8];
        unpack(piece[a][i], x);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[i][c] = fmaf(w, x[c], sum[i][c]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCombineVectors; ++i)
    if (first + i * 32 + lane < vectors) store(args.y + n * args.D, first + i * 32 + lane, pack(sum[i]));
}

constexpr int kWeightedBatch = 7;

// One warp per slot: a token's slots are neighbours, so its dy comes from L1 for all but the first.
__global__ void __launch_bounds__(kThreads) send_weighted_kernel(const __grid_constant__ SendWeighted args) {
  const int lane = threadIdx.x % 32, vectors = args.D / 8;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (slot >= args.N * args.A) return;
  const int64_t n = slot / args.A, row = args.row_NA[slot];
  float dot = 0.f;
  if (row >= 0) {
    const int owner = args.owner_NA[slot];
    const float w = args.weight_NA[slot];
    const __nv_bfloat16* dy = args.dy + n * args.D;
    const __nv_bfloat16* from = args.rows.base[owner] + row * args.D;
    __nv_bfloat16* to = args.d_rows.base[owner] + row * args.D;
    for (int base = lane; base < vectors; base += 32 * kWeightedBatch) {
      uint4 x[kWeightedBatch], d[kWeightedBatch];
#pragma unroll
      for (int i = 0; i < kWeightedBatch; ++i) {
        x[i] = base + i * 32 < vectors ? load(from, base + i * 32) : uint4{};
        d[i] = base + i * 32 < vectors ? load(dy, base + i * 32) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kWeightedBatch; ++i) {
        float xs[8], ds[8];
        unpack(x[i], xs), unpack(d[i], ds);
#pragma unroll
        for (int c = 0; c < 8; ++c) dot = fmaf(xs[c], ds[c], dot), ds[c] *= w;
        if (base + i * 32 < vectors) store(to, base + i * 32, pack(ds));
      }
    }
  }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) dot += __shfl_xor_sync(~0u, dot, offset);
  if (lane == 0) args.d_weight[n * args.A + args.source_NA[slot]] = dot;
}

int blocks_of(int64_t items, int each) { return static_cast<int>((items + each - 1) / each); }
bool fits(int A, int D) { return A >= 1 && A <= kMaxSlotsPerToken && D > 0 && D % 8 == 0; }

}  // namespace

cudaError_t count(const Count& args, cudaStream_t stream) {
  if (args.E < 1 || args.E > kMaxExperts || args.A < 1 || args.A > kMaxSlotsPerToken) return cudaErrorInvalidValue;
  const int chunks = blocks_of(args.N, kChunk), bytes = args.E * 4 * static_cast<int>(sizeof(uint32_t));
  if (chunks) {
    if (cudaError_t error = cudaFuncSetAttribute(count_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    count_chunks<<<chunks, kThreads, bytes, stream>>>(args);
  }
  scan_chunks<<<blocks_of(args.E, 32), dim3(32, 32), 0, stream>>>(args.scratch.chunk_CE, args.total_E, chunks, args.E);
  return cudaGetLastError();
}

cudaError_t share_counts(const int32_t* line, const Peers<int32_t>& counts, int P, int me, int width, cudaStream_t stream) {
  if (P < 1 || P > kMaxRanks || me < 0 || me >= P) return cudaErrorInvalidValue;
  share_counts_kernel<<<P, 256, 0, stream>>>(line, counts, me, width);
  return cudaGetLastError();
}

cudaError_t meet(const Meet& args, cudaStream_t stream) {
  if (args.P < 1 || args.P > kMaxRanks || args.me < 0 || args.me >= args.P || args.epoch < 1) return cudaErrorInvalidValue;
  meet_kernel<<<1, kMaxRanks, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t place(const Place& args, cudaStream_t stream) {
  if (args.P < 1 || args.P > kMaxRanks || args.E % args.P || args.E > kMaxExperts || args.A > kMaxSlotsPerToken) return cudaErrorInvalidValue;
  place_experts<<<args.P, 1024, 0, stream>>>(args);
  if (args.N) place_slots<<<blocks_of(args.N * args.A, kThreads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t send(const Send& args, cudaStream_t stream) {
  if (!fits(args.A, args.D)) return cudaErrorInvalidValue;
  if (args.N) send_kernel<<<blocks_of(args.N, kWarps), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t expand(__nv_bfloat16* rows, const int32_t* copy_of, const int32_t* received, int64_t R, int D, cudaStream_t stream) {
  if (R) expand_kernel<<<blocks_of(R, kWarps), kThreads, 0, stream>>>(rows, copy_of, received, D);
  return cudaGetLastError();
}

cudaError_t zero_rest(__nv_bfloat16* rows, const int32_t* received, int64_t R, int D, cudaStream_t stream) {
  if (R) zero_rest_kernel<<<264, kThreads, 0, stream>>>(rows, received, R, D);
  return cudaGetLastError();
}

cudaError_t combine(const Combine& args, cudaStream_t stream) {
  if (!fits(args.A, args.D)) return cudaErrorInvalidValue;
  if (args.N) combine_kernel<<<dim3(blocks_of(args.N, kWarps), blocks_of(args.D / 8, 32 * kCombineVectors)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t send_weighted(const SendWeighted& args, cudaStream_t stream) {
  if (!fits(args.A, args.D)) return cudaErrorInvalidValue;
  if (args.N) send_weighted_kernel<<<blocks_of(args.N * args.A, kWarps), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace megamoe::dispatch
