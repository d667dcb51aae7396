// KDA backward, second kernel: the forward state recompute and the reverse gradient scan, side by side in one grid.
//
// A warp owns 16 value columns of one head and carries the transposed state [16 v][128 c] in its fp32 accumulators. Products are
// arranged so that each result, packed to bf16, is the next product's A operand without leaving the warp's registers:
//   forward   x^T = v^T - S^T ke^T  ->  v~^T = x^T A'^T  ->  S^T = S^T e^(G_C) + v~^T kg
//   reverse   dv~^T = do^T P + dS^T kg^T  ->  dv^T = dv~^T A'  ->  dS^T = dS^T e^(G_C) + do^T qg - dv^T ke
// so the four consumer warps share only the operand tiles in shared memory and never wait for one another. Two producer warps fill
// them: what a step reads first (X) three steps deep, what it reads last (Y) two deep; each slot has a full and an empty barrier.
//
// Few heads: a walk covers one segment (segment_maps.cuh). The same kernel first computes the segments' maps (kMaps: nothing leaves but
// the state at the end of the walk), then runs all segments from the states that the chain has put at their borders.
#pragma once
#include "sm90_kda_chunk_bwd_common.cuh"

namespace megamoe::kda_bwd {

constexpr int kScanWarps = 4, kScanThreads = (kScanWarps + 2) * 32, kScanV = kScanWarps * 16, kScanSplits = kDim / kScanV;
constexpr int kDvLd = 48;  // bytes of a token's row in the dv staging: 32 used, 48 apart to miss bank conflicts
constexpr int kDepthX = 3, kDepthY = 2;

struct ScanSmem {
  // A slot of X: the image multiplied with the state (forward ke, reverse kg), A', v or do, P (reverse).
  static constexpr int first = 0, a = first + kImage128, x = a + kImage64, p = x + kChunk * kScanV * 2, slot_x = p + kImage64;
  // A slot of Y: the images of the update (forward kg, reverse ke and qg), the decay.
  static constexpr int last = 0, qg = last + kImage128, decay = qg + kImage128, slot_y = decay + kDim * 4;
  static constexpr int y = kDepthX * slot_x, state_out = y + kDepthY * slot_y, row_out = state_out + kScanWarps * 16 * kDim * 2;
  static constexpr int bars = row_out + kScanWarps * kChunk * kDvLd;  // full and empty of each slot of X, then of Y
  static constexpr int bytes = bars + 16 * (kDepthX + kDepthY);
};
static_assert(ScanSmem::slot_x % 256 == 0 && ScanSmem::slot_y % 256 == 0, "block addresses flip bits 5-7");
static_assert(ScanSmem::bytes <= 227 * 1024, "one block per SM");

struct ScanBlock {
  int tid, lane, warp, hl, head, v0;           // v0: first value column of the block
  int chunk0, num_chunks, token0, num_tokens;  // of the walk: its chunks, its first token, tokens from there to the document's end
  bool reverse, identity;                      // identity: from the identity with values zero, a map's linear part
  const float* source;                         // (K, V) state at the walk's start, null: zero
  float* destination;                          // where the state at its end goes, null: nowhere
  uint32_t base;
};

// A ring position: slot and the parity of its current round.
template <int kDepth>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kDepth) slot = 0, parity ^= 1;
  }
};
__device__ __forceinline__ uint32_t full_x(const ScanBlock& b, int slot) { return b.base + ScanSmem::bars + slot * 16; }
__device__ __forceinline__ uint32_t full_y(const ScanBlock& b, int slot) { return b.base + ScanSmem::bars + (kDepthX + slot) * 16; }

template <bool kReverse>
__device__ __forceinline__ void produce_x(const Args& p, const ScanBlock& b) {
  const Rows& src = kReverse ? p.dout : p.v;
  const int first_chunk = kReverse ? b.num_chunks - 1 : 0, row = b.lane >> 3;
  const uint16_t* from = src.at(b.token0 + first_chunk * kChunk + row, b.head) + b.v0 + (b.lane & 7) * 8;
  const int64_t step_rows = (kReverse ? -kChunk : kChunk) * static_cast<int64_t>(src.token_stride), rows4 = 4 * static_cast<int64_t>(src.token_stride);
  // Rows 4 apart alternate between two swizzles.
  const uint32_t to_even = off64(row, b.lane & 7), to_odd = off64(row + 4, b.lane & 7);
  size_t image = static_cast<size_t>(b.chunk0 + first_chunk) * p.heads + b.hl;
  int left = b.num_tokens - first_chunk * kChunk - row;
  Ring<kDepthX> ring;
  for (int step = 0; step < b.num_chunks; step++) {
    const uint32_t s = b.base + ring.slot * ScanSmem::slot_x, full = full_x(b, ring.slot);
    mbar_wait(full + 8, ring.parity ^ 1);
    if (b.lane == 0) {
      mbar_expect(full, kImage128 + kImage64 + (kReverse ? kImage64 : 0));
      bulk_load(s + ScanSmem::first, (kReverse ? p.kg : p.ke) + image * kImage128, kImage128, full);
      if (kReverse) bulk_load(s + ScanSmem::p, p.p + image * kImage64, kImage64, full);
      bulk_load(s + ScanSmem::a, p.a + image * kImage64, kImage64, full);
    }
    const uint16_t* row_from = from;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      cp_async16(s + ScanSmem::x + (i & 1 ? to_odd : to_even) + (i >> 1) * 1024, row_from, i * 4 < left);
      row_from += rows4;
    }
    mbar_arrive_after_cp_async(full);
    from += step_rows, left += kReverse ? kChunk : -kChunk;
    image += kReverse ? -static_cast<size_t>(p.heads) : static_cast<size_t>(p.heads);
    ring.next();
  }
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kReverse>
__device__ __forceinline__ void produce_y(const Args& p, const ScanBlock& b) {
  if (b.lane) return;
  size_t image = static_cast<size_t>(b.chunk0 + (kReverse ? b.num_chunks - 1 : 0)) * p.heads + b.hl;
  Ring<kDepthY> ring;
  for (int step = 0; step < b.num_chunks; step++) {
    const uint32_t s = b.base + ScanSmem::y + ring.slot * ScanSmem::slot_y, full = full_y(b, ring.slot);
    mbar_wait(full + 8, ring.parity ^ 1);
    mbar_expect(full, kImage128 + kDim * 4 + (kReverse ? kImage128 : 0));
    bulk_load(s + ScanSmem::decay, p.decay + image * kDim, kDim * 4, full);
    if (kReverse) bulk_load(s + ScanSmem::qg, p.qg + image * kImage128, kImage128, full);
    bulk_load(s + ScanSmem::last, (kReverse ? p.ke : p.kg) + image * kImage128, kImage128, full);
    image += kReverse ? -static_cast<size_t>(p.heads) : static_cast<size_t>(p.heads);
    ring.next();
  }
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
// acc[16 v][64 rows] += sign · state[16 v][128 c] · rows[64][128]^T; kKeep: the packed state also goes to `out` (this warp's two [16][64]
// images). lane_rows: crossed lane offset into the image, lane_out: straight lane offset into `out`.
template <bool kNegate, bool kKeep>
__device__ __forceinline__ void state_times_rows(float (&acc)[8][4], const float (&state)[16][4], uint32_t lane_rows, uint32_t lane_out) {
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    uint32_t a[4];
    pack_a(a, state[2 * ks], state[2 * ks + 1]);
    if (kKeep) stsm4(block64(lane_out, ks >> 2, ks & 3), a);  // 16 rows of 128 bytes, twice
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

// Copies this warp's staging out, 16 bytes a lane.
template <int kBytes>
__device__ __forceinline__ void send(int lane, unsigned char* dst, const unsigned char* src) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBytes / 512; i++) reinterpret_cast<uint4*>(dst)[i * 32 + lane] = reinterpret_cast<const uint4*>(src)[i * 32 + lane];
  __syncwarp();  // the staging may be written again
}
// The last read of a slot by this warp.
__device__ __forceinline__ void release(int lane, uint32_t full) {
  __syncwarp();
  if (lane == 0) mbar_arrive(full + 8);
}

__device__ __forceinline__ void load_state(float (&state)[16][4], const float* src, int v, int t) {
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) state[n][e] = src ? src[(n * 8 + 2 * t + (e & 1)) * kDim + v + (e >> 1) * 8] : 0.f;
}

__device__ __forceinline__ void store_state(const float (&state)[16][4], float* dst, int v, int t) {
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dst[(n * 8 + 2 * t + (e & 1)) * kDim + v + (e >> 1) * 8] = state[n][e];
}

template <bool kMaps>
__device__ void scan_forward(const Args& p, const ScanBlock& b, unsigned char* sm) {
  const int g = b.lane >> 2, t = b.lane & 3, v = b.v0 + b.warp * 16;
  const LaneBlock straight = lane_straight(b.lane), crossed = lane_crossed(b.lane);
  const uint32_t straight128 = lane_off128(straight), crossed128 = lane_off128(crossed), straight64 = lane_off64(straight), crossed64 = lane_off64(crossed);
  const int state_out = ScanSmem::state_out + b.warp * 16 * kDim * 2, row_out = ScanSmem::row_out + b.warp * kChunk * kDvLd;
  float state[16][4];
  load_state(state, b.source, v + g, t);
  if (kMaps && b.identity)
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) state[n][e] = n * 8 + 2 * t + (e & 1) == v + g + (e >> 1) * 8 ? 1.f : 0.f;
  size_t image = static_cast<size_t>(b.chunk0) * p.heads + b.hl;
  Ring<kDepthX> rx;
  Ring<kDepthY> ry;
  for (int step = 0; step < b.num_chunks; step++, image += p.heads) {
    const uint32_t sx = b.base + rx.slot * ScanSmem::slot_x;
    mbar_wait(full_x(b, rx.slot), rx.parity);
    // x^T starts as v^T: a transposed read of [token][v] is the packed form of this accumulator.
    float x[8][4];
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      uint32_t a[4];
      ldsm4_t(a, block64(sx + ScanSmem::x + crossed64, kb, b.warp));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float* c = x[2 * kb + (i >> 1)] + (i & 1) * 2;
        c[0] = kMaps && b.identity ? 0.f : bf_lo(a[i]), c[1] = kMaps && b.identity ? 0.f : bf_hi(a[i]);
      }
    }
    state_times_rows<true, !kMaps>(x, state, sx + ScanSmem::first + crossed128, b.base + state_out + straight64);
    uint32_t xa[4][4], va[4][4];
    pack_rows(xa, x);
    float vn[8][4] = {};
#pragma unroll
    for (int nb = 0; nb < 4; nb++)
#pragma unroll
      for (int kb = 0; kb <= nb; kb++) {
        uint32_t f[4];
        ldsm4(f, block64(sx + ScanSmem::a + crossed64, nb, kb));
        mma(vn[2 * nb], xa[kb], f[0], f[1]);
        mma(vn[2 * nb + 1], xa[kb], f[2], f[3]);
      }
    release(b.lane, full_x(b, rx.slot));
    rx.next();
    pack_rows(va, vn);
    if constexpr (!kMaps) {
#pragma unroll
      for (int kb = 0; kb < 4; kb++) stsm4(block64(b.base + row_out + straight64, 0, kb), va[kb]);
      send<16 * 128>(b.lane, p.s + image * kImageState + v * 128, sm + state_out);
      send<16 * 128>(b.lane, p.s + image * kImageState + kImageState / 2 + v * 128, sm + state_out + 16 * 128);
      send<16 * 128>(b.lane, p.vt + image * kImage128 + v * 128, sm + row_out);
    }

    const int sy = ScanSmem::y + ry.slot * ScanSmem::slot_y;
    mbar_wait(full_y(b, ry.slot), ry.parity);
    decay_state(state, sm + sy + ScanSmem::decay, t);
    add_rank64(state, va, b.base + sy + ScanSmem::last + straight128);
    release(b.lane, full_y(b, ry.slot));
    ry.next();
  }
  if constexpr (kMaps) {
    float* out = b.destination + (b.identity ? 2 * kDim * kDim : 0);
    store_state(state, out, v + g, t);
    if (b.identity) {  // transposed beside it
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) b.destination[kDim * kDim + (v + g + (e >> 1) * 8) * kDim + n * 8 + 2 * t + (e & 1)] = state[n][e];
    }
  }
}

template <bool kMaps>
__device__ void scan_reverse(const Args& p, const ScanBlock& b, unsigned char* sm) {
  const int g = b.lane >> 2, t = b.lane & 3, v = b.v0 + b.warp * 16;
  const LaneBlock straight = lane_straight(b.lane), crossed = lane_crossed(b.lane);
  const uint32_t straight128 = lane_off128(straight), crossed128 = lane_off128(crossed), straight64 = lane_off64(straight), crossed64 = lane_off64(crossed);
  const int state_out = ScanSmem::state_out + b.warp * 16 * kDim * 2, row_out = ScanSmem::row_out + b.warp * kChunk * kDvLd;
  float state[16][4];
  load_state(state, b.source, v + g, t);
  const int last_token = (b.num_chunks - 1) * kChunk + (b.lane >> 1);
  uint16_t* dv_out = p.dv.at(b.token0 + last_token, b.head) + v + (b.lane & 1) * 8;
  int left = b.num_tokens - last_token;  // rows of the document from this lane's first one on
  size_t image = static_cast<size_t>(b.chunk0 + b.num_chunks - 1) * p.heads + b.hl;
  Ring<kDepthX> rx;
  Ring<kDepthY> ry;
  for (int step = 0; step < b.num_chunks; step++, image -= p.heads) {
    const uint32_t sx = b.base + rx.slot * ScanSmem::slot_x;
    mbar_wait(full_x(b, rx.slot), rx.parity);
    float dvn[8][4] = {};
    uint32_t da[4][4];  // do^T over the chunk's rows
#pragma unroll
    for (int kb = 0; kb < 4; kb++) ldsm4_t(da[kb], block64(sx + ScanSmem::x + crossed64, kb, b.warp));
#pragma unroll
    for (int kb = 0; kb < 4; kb++)
#pragma unroll
      for (int nb = 0; nb <= kb; nb++) {
        uint32_t f[4];
        ldsm4_t(f, block64(sx + ScanSmem::p + straight64, kb, nb));
        mma(dvn[2 * nb], da[kb], f[0], f[1]);
        mma(dvn[2 * nb + 1], da[kb], f[2], f[3]);
      }
    state_times_rows<false, !kMaps>(dvn, state, sx + ScanSmem::first + crossed128, b.base + state_out + straight64);
    uint32_t xa[4][4], va[4][4];
    pack_rows(xa, dvn);
    float dv[8][4] = {};
#pragma unroll
    for (int kb = 0; kb < 4; kb++)
#pragma unroll
      for (int nb = 0; nb <= kb; nb++) {
        uint32_t f[4];
        ldsm4_t(f, block64(sx + ScanSmem::a + straight64, kb, nb));
        mma(dv[2 * nb], xa[kb], f[0], f[1]);
        mma(dv[2 * nb + 1], xa[kb], f[2], f[3]);
      }
    release(b.lane, full_x(b, rx.slot));
    rx.next();
    pack_rows(va, dv);
    if constexpr (!kMaps) {
      // dv leaves through a [token][16 v] staging: a transposed store of the fragments, then 16 bytes a lane.
#pragma unroll
      for (int kb = 0; kb < 4; kb++) stsm4_t(b.base + row_out + (kb * 16 + crossed.row) * kDvLd + crossed.unit * 16, va[kb]);
      send<16 * 128>(b.lane, p.ds + image * kImageState + v * 128, sm + state_out);
      send<16 * 128>(b.lane, p.ds + image * kImageState + kImageState / 2 + v * 128, sm + state_out + 16 * 128);
      {
        uint16_t* to = dv_out;
        const unsigned char* from = sm + row_out + (b.lane >> 1) * kDvLd + (b.lane & 1) * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 x = *reinterpret_cast<const uint4*>(from + i * 16 * kDvLd);
          if (i * 16 < left) *reinterpret_cast<uint4*>(to) = x;
          to += 16 * static_cast<int64_t>(p.dv.token_stride);
        }
        dv_out -= kChunk * static_cast<int64_t>(p.dv.token_stride), left += kChunk;
      }
    }
    const int sy = ScanSmem::y + ry.slot * ScanSmem::slot_y;
    mbar_wait(full_y(b, ry.slot), ry.parity);
    decay_state(state, sm + sy + ScanSmem::decay, t);
    add_rank64(state, da, b.base + sy + ScanSmem::qg + straight128);
#pragma unroll
    for (int kb = 0; kb < 4; kb++) negate_a(va[kb], va[kb]);
    add_rank64(state, va, b.base + sy + ScanSmem::last + straight128);
    release(b.lane, full_y(b, ry.slot));
    ry.next();
  }
  if (b.destination) store_state(state, b.destination, v + g, t);
}

// Fills in the walk of a block from its number; false: it has none. Reverse walks, the longer ones, are placed first.
template <bool kMaps>
__device__ __forceinline__ bool place_walk(const Args& p, ScanBlock& b, unsigned i) {
  const int units = kMaps ? p.num_borders : p.num_docs + p.num_borders, unit = static_cast<int>(i % units), kind = static_cast<int>(i / units);
  b.reverse = kind == 0, b.identity = kind == 2;
  // kMaps: the segment after border `number` backward, the one before it forward. Else every document's first segment, then those
  // after borders.
  const int number = kMaps ? unit + 1 : unit - p.num_docs + 1;
  const DocumentStart start{p};
  int doc = unit, index = 0, after = 0;  // after: number of the border at the segment's end, 0 for the document's last segment
  if (kMaps || number > 0) {
    const kda::Border border = kda::border_at(start, p.num_docs, kSegment, number);
    if (border.index == 0) return false;
    doc = border.document, index = border.index, after = border.last ? 0 : number + 1;
    if (kMaps && kind != 0) index--, after = number;
  } else if (p.num_borders && start(doc + 1) - start(doc) > kSegment) {
    after = (start(doc) + kSegment) / kSegment;
  }
  if (kMaps && b.identity && index == 0) return false;  // nothing but its own state enters a document's first segment
  const int doc_chunk = p.doc_chunk[doc] + index * kSegmentChunks, left = p.doc_chunk[doc + 1] - doc_chunk;
  b.chunk0 = doc_chunk, b.num_chunks = after ? kSegmentChunks : left;
  b.token0 = start(doc) + index * kSegment, b.num_tokens = start(doc + 1) - b.token0;

  constexpr size_t kState = kDim * kDim;
  const auto at_document = [&](auto* states) { return states ? states + (static_cast<size_t>(doc) * p.num_heads + b.head) * kState : nullptr; };
  const auto at_border = [&](int n) { return p.borders + (static_cast<size_t>(n - 1) * p.num_heads + b.head) * 4 * kState; };
  if (b.reverse) {
    b.source = after == 0 ? at_document(p.dfinal_state) : kMaps ? nullptr : at_border(after) + kda::kGradient * kState;
    b.destination = kMaps ? at_border(number) + kda::kGradient * kState : index == 0 ? at_document(p.dinitial_state) : nullptr;
  } else {
    b.source = b.identity ? nullptr : index == 0 ? at_document(p.initial_state) : kMaps ? nullptr : at_border(number);
    b.destination = kMaps ? at_border(number) : nullptr;
  }
  return true;
}

// Blocks: value split fastest, then head, then what place_walk takes.
template <bool kMaps>
__global__ void __launch_bounds__(kScanThreads, 1) sm90_kda_bwd_scan(const Args p) {
  unsigned char* sm = dynamic_smem();
  ScanBlock b;
  b.tid = threadIdx.x, b.lane = b.tid & 31, b.warp = warp_uniform(b.tid >> 5);
  unsigned i = blockIdx.x;
  b.v0 = static_cast<int>(i % kScanSplits) * kScanV, i /= kScanSplits;
  b.hl = static_cast<int>(i % p.heads), i /= p.heads;
  b.head = p.head0 + b.hl;
  if (!place_walk<kMaps>(p, b, i)) return;
  b.base = smem_addr(sm);
  if (b.tid == 0) {
    for (int i = 0; i < kDepthX + kDepthY; i++) {
      const uint32_t full = b.base + ScanSmem::bars + i * 16;
      mbar_init(full, i < kDepthX ? 33 : 1);  // one arrival announces the bytes; in X each producer lane adds its own copies
      mbar_init(full + 8, kScanWarps);
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (b.warp == kScanWarps) {
    if (b.reverse)
      produce_x<true>(p, b);
    else
      produce_x<false>(p, b);
  } else if (b.warp == kScanWarps + 1) {
    if (b.reverse)
      produce_y<true>(p, b);
    else
      produce_y<false>(p, b);
  } else if (b.reverse) {
    scan_reverse<kMaps>(p, b, sm);
  } else {
    scan_forward<kMaps>(p, b, sm);
  }
}

// Blocks: 16 value columns fastest, then head, then direction.
__global__ void __launch_bounds__(kda::kChainThreads) sm90_kda_bwd_chain(const Args p) {
  constexpr unsigned kColumns = kDim / kda::kChainColumns;
  const unsigned i = blockIdx.x / kColumns;
  kda::chain_segments<4>(p.borders, p.num_heads, static_cast<int>(i % p.num_heads), static_cast<int>(blockIdx.x % kColumns) * kda::kChainColumns, i / p.num_heads == 0,
                         DocumentStart{p}, p.num_docs, kSegment, p.num_borders);
}

}  // namespace megamoe::kda_bwd
