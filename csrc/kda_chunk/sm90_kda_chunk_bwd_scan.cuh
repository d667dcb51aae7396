// KDA backward, second kernel: the forward state recompute and the reverse gradient scan, side by side in one grid.
//
// A warp owns 16 value columns of one head and carries the transposed state [16 v][128 c] in its fp32 accumulators. Products are
// arranged so that each result, packed to bf16, is the next product's A operand without leaving the warp's registers:
//   forward   x^T = v^T - S^T ke^T  ->  v~^T = x^T A'^T  ->  S^T = S^T e^(G_C) + v~^T kg
//   reverse   dv~^T = do^T P + dS^T kg^T  ->  dv^T = dv~^T A'  ->  dS^T = dS^T e^(G_C) + do^T qg - dv^T ke
// so warps share only the operand tiles in shared memory: two stages, filled by bulk copies (images) and cp.async (v, do).
#pragma once
#include "sm90_kda_chunk_bwd_common.cuh"

namespace megamoe::kda_bwd {

constexpr int kScanWarps = 4, kScanThreads = kScanWarps * 32, kScanV = kScanWarps * 16, kScanSplits = kDim / kScanV;
constexpr int kDvLd = 48;  // bytes of a token's row in the dv staging: 32 used, 48 apart to miss bank conflicts

struct ScanSmem {
  // One stage.
  static constexpr int ke = 0, kg = ke + kImage128, a = kg + kImage128, x = a + kImage64, decay = x + kChunk * kScanV * 2;
  static constexpr int fwd_stage = decay + kDim * 4, qg = fwd_stage, p = qg + kImage128, rev_stage = p + kImage64;
  // Behind two stages.
  static constexpr int state_out = 2 * rev_stage, row_out = state_out + kScanWarps * 16 * kDim * 2, bars = row_out + kScanWarps * kChunk * kDvLd;
  static constexpr int bytes = bars + 16;
};

struct ScanBlock {
  int tid, lane, warp, hl, head, doc, v0, chunk0, num_chunks;  // v0: first value column of the block
  int64_t token0, num_tokens;                                  // of the document
  uint32_t base;
  const uint16_t* x;  // this thread's first 16 bytes of v or do
  int64_t x_step;     // elements from one chunk to the next, in scan order
};

template <bool kReverse>
__device__ __forceinline__ void scan_issue(const Args& p, const ScanBlock& b, int step) {
  if (step < b.num_chunks) {
    const int chunk = b.chunk0 + (kReverse ? b.num_chunks - 1 - step : step), stage = step & 1;
    const uint32_t s = b.base + stage * ScanSmem::rev_stage, bar = b.base + ScanSmem::bars + stage * 8;
    if (b.tid == 0) {
      const size_t i = static_cast<size_t>(chunk) * p.heads + b.hl;
      mbar_expect(bar, 2 * kImage128 + kImage64 + kDim * 4 + (kReverse ? kImage128 + kImage64 : 0));
      bulk_load(s + ScanSmem::kg, p.kg + i * kImage128, kImage128, bar);
      bulk_load(s + ScanSmem::ke, p.ke + i * kImage128, kImage128, bar);
      bulk_load(s + ScanSmem::a, p.a + i * kImage64, kImage64, bar);
      bulk_load(s + ScanSmem::decay, p.decay + i * kDim, kDim * 4, bar);
      if (kReverse) {
        bulk_load(s + ScanSmem::qg, p.qg + i * kImage128, kImage128, bar);
        bulk_load(s + ScanSmem::p, p.p + i * kImage64, kImage64, bar);
      }
    }
    // 8 threads a row of 64 values; 16 rows a pass.
    const int row = b.tid >> 3;
    const int64_t left = b.num_tokens - static_cast<int64_t>(chunk - b.chunk0) * kChunk;
    const uint16_t* from = b.x + step * b.x_step;
    const int64_t rows16 = 16 * (kReverse ? p.dout.token_stride : p.v.token_stride);
    const uint32_t to = s + ScanSmem::x + off64(row, b.tid & 7);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      cp_async16(to + i * 2048, from, row + i * 16 < left);
      from += rows16;
    }
  }
  cp_async_commit();  // an empty group when there is nothing left: the waits count groups
}

// state *= e^(G_C): columns are channels.
__device__ __forceinline__ void decay_state(float (&state)[16][4], const unsigned char* decay, int t) {
#pragma unroll
  for (int n = 0; n < 16; n++) {
    const float2 d = *reinterpret_cast<const float2*>(decay + (n * 8 + 2 * t) * 4);
    state[n][0] *= d.x, state[n][1] *= d.y, state[n][2] *= d.x, state[n][3] *= d.y;
  }
}
// state += a · rows[64][128], a = four fragments over the chunk's 64 rows; lane_rows: straight lane offset into the image.
__device__ __forceinline__ void add_rank64(float (&state)[16][4], const uint32_t (&a)[4][4], uint32_t lane_rows) {
#pragma unroll
  for (int kb = 0; kb < 4; kb++)
#pragma unroll
    for (int nb = 0; nb < 8; nb++) {
      uint32_t b[4];
      ldsm4_t(b, block128(lane_rows, kb, nb));
      mma(state[2 * nb], a[kb], b[0], b[1]);
      mma(state[2 * nb + 1], a[kb], b[2], b[3]);
    }
}
// acc[16 v][64 rows] += sign · state[16 v][128 c] · rows[64][128]^T; the packed state also goes to `out` (this warp's [16][128] image).
// lane_rows: crossed lane offset into the image, lane_out: straight lane offset into `out`.
template <bool kNegate>
__device__ __forceinline__ void state_times_rows(float (&acc)[8][4], const float (&state)[16][4], uint32_t lane_rows, uint32_t lane_out) {
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    uint32_t a[4];
    pack_a(a, state[2 * ks], state[2 * ks + 1]);
    stsm4(block128(lane_out, 0, ks), a);
    if (kNegate) negate_a(a, a);
#pragma unroll
    for (int nb = 0; nb < 4; nb++) {
      uint32_t b[4];
      ldsm4(b, block128(lane_rows, nb, ks));
      mma(acc[2 * nb], a, b[0], b[1]);
      mma(acc[2 * nb + 1], a, b[2], b[3]);
    }
  }
}
__device__ __forceinline__ void pack_rows(uint32_t (&a)[4][4], const float (&acc)[8][4]) {
#pragma unroll
  for (int kb = 0; kb < 4; kb++) pack_a(a[kb], acc[2 * kb], acc[2 * kb + 1]);
}

// One lane sends this warp's staging out; the next use waits for the copy engine to have read it.
__device__ __forceinline__ void send(int lane, unsigned char* dst, uint32_t src, uint32_t bytes) {
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    bulk_store(dst, src, bytes);
    bulk_commit();
  }
}

__device__ __forceinline__ void load_state(float (&state)[16][4], const float* src, int v, int t) {
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) state[n][e] = src ? src[(n * 8 + 2 * t + (e & 1)) * kDim + v + (e >> 1) * 8] : 0.f;
}

__device__ void scan_forward(const Args& p, const ScanBlock& b, unsigned char* sm) {
  const int g = b.lane >> 2, t = b.lane & 3, v = b.v0 + b.warp * 16;
  const LaneBlock straight = lane_straight(b.lane), crossed = lane_crossed(b.lane);
  const uint32_t straight128 = lane_off128(straight), crossed128 = lane_off128(crossed), straight64 = lane_off64(straight), crossed64 = lane_off64(crossed);
  const uint32_t state_out = b.base + ScanSmem::state_out + b.warp * 16 * kDim * 2, row_out = b.base + ScanSmem::row_out + b.warp * kChunk * kDvLd;
  float state[16][4];
  load_state(state, p.initial_state ? p.initial_state + (static_cast<size_t>(b.doc) * p.num_heads + b.head) * kDim * kDim : nullptr, v + g, t);
  scan_issue<false>(p, b, 0);
  scan_issue<false>(p, b, 1);
  for (int step = 0; step < b.num_chunks; step++) {
    const size_t image = static_cast<size_t>(b.chunk0 + step) * p.heads + b.hl;
    const int stage = step & 1;
    const uint32_t s = b.base + stage * ScanSmem::rev_stage;
    cp_async_wait<1>();
    mbar_wait(b.base + ScanSmem::bars + stage * 8, (step >> 1) & 1);
    if (b.lane == 0) bulk_wait_read<0>();
    __syncthreads();

    // x^T starts as v^T: a transposed read of [token][v] is the packed form of this accumulator.
    float x[8][4];
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      uint32_t a[4];
      ldsm4_t(a, block64(s + ScanSmem::x + crossed64, kb, b.warp));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float* c = x[2 * kb + (i >> 1)] + (i & 1) * 2;
        c[0] = bf_lo(a[i]), c[1] = bf_hi(a[i]);
      }
    }
    state_times_rows<true>(x, state, s + ScanSmem::ke + crossed128, state_out + straight128);
    send(b.lane, p.s + image * kImageState + v * 256, state_out, 16 * 256);

    uint32_t xa[4][4], va[4][4];
    pack_rows(xa, x);
    float vn[8][4] = {};
#pragma unroll
    for (int nb = 0; nb < 4; nb++)
#pragma unroll
      for (int kb = 0; kb <= nb; kb++) {
        uint32_t f[4];
        ldsm4(f, block64(s + ScanSmem::a + crossed64, nb, kb));
        mma(vn[2 * nb], xa[kb], f[0], f[1]);
        mma(vn[2 * nb + 1], xa[kb], f[2], f[3]);
      }
    pack_rows(va, vn);
#pragma unroll
    for (int kb = 0; kb < 4; kb++) stsm4(block64(row_out + straight64, 0, kb), va[kb]);
    send(b.lane, p.vt + image * kImage128 + v * 128, row_out, 16 * 128);

    decay_state(state, sm + stage * ScanSmem::rev_stage + ScanSmem::decay, t);
    add_rank64(state, va, s + ScanSmem::kg + straight128);
    __syncthreads();
    scan_issue<false>(p, b, step + 2);
  }
}

__device__ void scan_reverse(const Args& p, const ScanBlock& b, unsigned char* sm) {
  const int g = b.lane >> 2, t = b.lane & 3, v = b.v0 + b.warp * 16;
  const LaneBlock straight = lane_straight(b.lane), crossed = lane_crossed(b.lane);
  const uint32_t straight128 = lane_off128(straight), crossed128 = lane_off128(crossed), straight64 = lane_off64(straight), crossed64 = lane_off64(crossed);
  const uint32_t state_out = b.base + ScanSmem::state_out + b.warp * 16 * kDim * 2;
  const int row_out_offset = ScanSmem::row_out + b.warp * kChunk * kDvLd;
  const size_t doc_state = (static_cast<size_t>(b.doc) * p.num_heads + b.head) * kDim * kDim;
  float state[16][4];
  load_state(state, p.dfinal_state ? p.dfinal_state + doc_state : nullptr, v + g, t);
  uint16_t* dv_out = p.dv.at(b.token0 + static_cast<int64_t>(b.num_chunks - 1) * kChunk + (b.lane >> 1), b.head) + v + (b.lane & 1) * 8;
  const int64_t dv_step = kChunk * p.dv.token_stride;
  scan_issue<true>(p, b, 0);
  scan_issue<true>(p, b, 1);
  for (int step = 0; step < b.num_chunks; step++) {
    const int chunk = b.chunk0 + b.num_chunks - 1 - step;
    const size_t image = static_cast<size_t>(chunk) * p.heads + b.hl;
    const int64_t left = b.num_tokens - static_cast<int64_t>(chunk - b.chunk0) * kChunk;
    const int stage = step & 1;
    const uint32_t s = b.base + stage * ScanSmem::rev_stage;
    cp_async_wait<1>();
    mbar_wait(b.base + ScanSmem::bars + stage * 8, (step >> 1) & 1);
    if (b.lane == 0) bulk_wait_read<0>();
    __syncthreads();

    float dvn[8][4] = {};
    uint32_t da[4][4];  // do^T over the chunk's rows
#pragma unroll
    for (int kb = 0; kb < 4; kb++) ldsm4_t(da[kb], block64(s + ScanSmem::x + crossed64, kb, b.warp));
#pragma unroll
    for (int kb = 0; kb < 4; kb++)
#pragma unroll
      for (int nb = 0; nb <= kb; nb++) {
        uint32_t f[4];
        ldsm4_t(f, block64(s + ScanSmem::p + straight64, kb, nb));
        mma(dvn[2 * nb], da[kb], f[0], f[1]);
        mma(dvn[2 * nb + 1], da[kb], f[2], f[3]);
      }
    state_times_rows<false>(dvn, state, s + ScanSmem::kg + crossed128, state_out + straight128);
    send(b.lane, p.ds + image * kImageState + v * 256, state_out, 16 * 256);

    uint32_t xa[4][4], va[4][4];
    pack_rows(xa, dvn);
    float dv[8][4] = {};
#pragma unroll
    for (int kb = 0; kb < 4; kb++)
#pragma unroll
      for (int nb = 0; nb <= kb; nb++) {
        uint32_t f[4];
        ldsm4_t(f, block64(s + ScanSmem::a + straight64, kb, nb));
        mma(dv[2 * nb], xa[kb], f[0], f[1]);
        mma(dv[2 * nb + 1], xa[kb], f[2], f[3]);
      }
    pack_rows(va, dv);
    // dv leaves through a [token][16 v] staging: a transposed store of the fragments, then 16 bytes a lane.
#pragma unroll
    for (int kb = 0; kb < 4; kb++) stsm4_t(b.base + row_out_offset + (kb * 16 + crossed.row) * kDvLd + crossed.unit * 16, va[kb]);
    __syncwarp();
    uint16_t* to = dv_out - step * dv_step;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = i * 16 + (b.lane >> 1);
      const uint4 x = *reinterpret_cast<const uint4*>(sm + row_out_offset + row * kDvLd + (b.lane & 1) * 16);
      if (row < left) *reinterpret_cast<uint4*>(to) = x;
      to += 16 * p.dv.token_stride;
    }
    decay_state(state, sm + stage * ScanSmem::rev_stage + ScanSmem::decay, t);
    add_rank64(state, da, s + ScanSmem::qg + straight128);
#pragma unroll
    for (int kb = 0; kb < 4; kb++) negate_a(va[kb], va[kb]);
    add_rank64(state, va, s + ScanSmem::ke + straight128);
    __syncthreads();
    scan_issue<true>(p, b, step + 2);
  }
  if (p.dinitial_state) {
    float* out = p.dinitial_state + doc_state;
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[(n * 8 + 2 * t + (e & 1)) * kDim + v + g + (e >> 1) * 8] = state[n][e];
  }
}

// Blocks: value split fastest, then head, document, and direction last: the longer reverse scans are placed first.
__global__ void __launch_bounds__(kScanThreads, 1) sm90_kda_bwd_scan(const Args p) {
  unsigned char* sm = dynamic_smem();
  ScanBlock b;
  b.tid = threadIdx.x, b.lane = b.tid & 31, b.warp = warp_uniform(b.tid >> 5);
  unsigned i = blockIdx.x;
  b.v0 = static_cast<int>(i % kScanSplits) * kScanV, i /= kScanSplits;
  b.hl = static_cast<int>(i % p.heads), i /= p.heads;
  b.head = p.head0 + b.hl;
  b.doc = static_cast<int>(i % p.num_docs);
  const bool forward = i / p.num_docs;
  b.chunk0 = p.doc_chunk[b.doc], b.num_chunks = p.doc_chunk[b.doc + 1] - b.chunk0;
  b.token0 = doc_start(p, b.doc), b.num_tokens = doc_start(p, b.doc + 1) - b.token0;
  {
    const Rows& src = forward ? p.v : p.dout;
    const int64_t first = forward ? 0 : static_cast<int64_t>(b.num_chunks - 1) * kChunk;
    b.x = src.at(b.token0 + first + (b.tid >> 3), b.head) + b.v0 + (b.tid & 7) * 8;
    b.x_step = (forward ? kChunk : -kChunk) * src.token_stride;
  }
  b.base = smem_addr(sm);
  if (b.tid == 0) {
    mbar_init(b.base + ScanSmem::bars, 1);
    mbar_init(b.base + ScanSmem::bars + 8, 1);
    fence_mbar_init();
  }
  __syncthreads();
  if (forward)
    scan_forward(p, b, sm);
  else
    scan_reverse(p, b, sm);
  if (b.lane == 0) bulk_wait_all();  // shared memory must outlive the copies out of it
}

}  // namespace megamoe::kda_bwd
