// The consumer half of KDA forward: the state and the serial chain (see sm90_kda_chunk_fwd.cuh for the algebra).
//
// A warpgroup holds the transposed state of 64 value rows: state[4 * tile + e], tile = 8 channels; in lane 4*r + c,
// e = 0, 1 is row r, channels 8 * tile + 2c, + 1 and e = 2, 3 the same of row r + 8. It never leaves fp32 there; only its
// bf16 copy feeds the products, once a group.
#pragma once

#include "sm90_kda_chunk_fwd.cuh"

namespace megamoe::kda {

struct StatePlace {  // which (channel, value) elements of a (K, V) state this thread holds
  int row, column;   // value row of e = 0, 1; channel of tile 0, e = 0
  __device__ __forceinline__ int offset(int i) const { return (column + (i >> 2) * 8 + (i & 1)) * kWidth + row + (i & 2) * 4; }
};

__device__ __forceinline__ void load_state(float (&state)[64], const float* source, const StatePlace& place) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = source ? exp2f(-kShift) * source[place.offset(i)] : 0.0f;
}

__device__ __forceinline__ void store_state(const float (&state)[64], float* destination, const StatePlace& place) {
#pragma unroll
  for (int i = 0; i < 64; ++i) destination[place.offset(i)] = exp2f(kShift) * state[i];
}

// A map, whose value index is the channel that enters, as chain_segments wants it: [channel that enters][channel].
__device__ __forceinline__ void store_map(const float (&state)[64], float* destination, const StatePlace& place) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int at = place.offset(i);
    destination[at % kWidth * kWidth + at / kWidth] = exp2f(kShift) * state[i];
  }
}

template <Mode MODE>
__device__ __forceinline__ void consume(const Arguments& args, int head, int number, int identity, int count, uint32_t stages, uint32_t full, uint32_t empty,
                                        int thread) {
  const Inputs& in = args.in;
  const int lane = thread & 31, warp = (thread >> 5) & 3, group_of_warps = thread >> 7, r = lane >> 2, c = lane & 3;
  const StatePlace place{group_of_warps * 64 + warp * 16 + r, 2 * c};
  constexpr int64_t kState = kWidth * kWidth;
  float state[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = MODE == Mode::kMap && identity && place.offset(i) % (kWidth + 1) == 0 ? exp2f(-kShift) : 0.0f;
  // This warp's 16 tokens x 16 value rows of the stage's v; o takes the same place.
  const int chunk = (group_of_warps * 64 + warp * 16) >> 3, token = (lane & 7) + ((lane >> 4) << 3);
  const uint32_t v_at = kValues + token * 256 + (((chunk + ((lane >> 3) & 1)) ^ (token & 7)) << 4);
  const uint32_t o_at = kValues + (lane & 15) * 256 + (((chunk + (lane >> 4)) ^ (lane & 7)) << 4);
  __nv_bfloat16* o = nullptr;
  if constexpr (MODE == Mode::kOutput) o = args.o + (int64_t(lane & 15) * in.H + head) * kWidth + (chunk + (lane >> 4)) * 8;

  Stage at;
  for (int m = 0; m < count; ++m) {
    const uint32_t stage = stages + at.index * kStageBytes;
    const ptx::Descriptor swizzled = ptx::descriptor(stage, 16, 1024, ptx::Swizzle::k128B), tiles = ptx::descriptor(stage, 128, 256, ptx::Swizzle::kNone);
    ptx::mbarrier_wait(full + at.index * 8, at.parity);
    const uint4 entry = ptx::load_shared_128(stage + kGroup);
    const Group group{int32_t(entry.x), int32_t(entry.y), int32_t(entry.z), int32_t(entry.w)};
    if (group.first() || (MODE == Mode::kOutput && args.borders && group.index() % kSegmentGroups == 0)) {
      const float* states = group.first() ? in.initial_state : args.borders;
      const int64_t at = group.first() ? group.document : group.token / kForwardSegment - 1;
      load_state(state, states ? states + (at * in.H + head) * (group.first() ? kState : 2 * kState) : nullptr, place);
    }

    // [k~ S^ | q~ S^] for this warpgroup's value rows: (64 x 128) (128 x 32), the state as register operand.
    uint32_t a[8][4];
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) a[step][e] = ptx::pack_bf16(state[8 * step + 2 * e], state[8 * step + 2 * e + 1]);
    float read[16];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      ptx::wgmma_n32(read, a[step], swizzled + (kKq + (step >> 2) * kHalf + (step & 3) * 32), step > 0);
    ptx::wgmma_commit();
    uint32_t v[4] = {};
    if (MODE == Mode::kOutput || !identity) ptx::ldmatrix_x4_trans(v, stage + v_at);
    float rk[4], rq[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 k_pair = ptx::load_shared_64(stage + kScalars + half * 32 + c * 8), q_pair = ptx::load_shared_64(stage + kScalars + 64 + half * 32 + c * 8);
      rk[2 * half] = __uint_as_float(k_pair.x), rk[2 * half + 1] = __uint_as_float(k_pair.y);
      rq[2 * half] = __uint_as_float(q_pair.x), rq[2 * half + 1] = __uint_as_float(q_pair.y);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(read);

    // Copied apart: ptxas serialises every product when one goes on with a slice of another's accumulators.
    float out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = ptx::opaque_copy(read[8 + i]);
    uint32_t residual[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = e >> 1;
      residual[e] = ptx::pack_bf16(fmaf(-rk[2 * half], read[2 * e], ptx::low_bf16(v[e])), fmaf(-rk[2 * half + 1], read[2 * e + 1], ptx::high_bf16(v[e])));
    }
    float u[8];
    ptx::wgmma_fence();
    ptx::wgmma_n16(u, residual, tiles + kZ, 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(u);

    uint32_t u_packed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) u_packed[e] = ptx::pack_bf16(u[2 * e], u[2 * e + 1]);
    ptx::wgmma_fence();
    if constexpr (MODE == Mode::kOutput) {
      ptx::wgmma_n16(out, u_packed, tiles + kQK, 1);
      ptx::wgmma_commit();
    }
    ptx::wgmma_n128(state, u_packed, ptx::descriptor(stage, 128, kInverseStride, ptx::Swizzle::kNone) + kInverse, 1);
    ptx::wgmma_commit();
    if constexpr (MODE == Mode::kOutput) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_hold(out);
      uint32_t packed[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1;
        packed[e] = ptx::pack_bf16(rq[2 * half] * out[2 * e], rq[2 * half + 1] * out[2 * e + 1]);
      }
      ptx::stmatrix_x4_trans(stage + v_at, packed);
      __syncwarp();
      const uint4 row = ptx::load_shared_128(stage + o_at);
      if ((lane & 15) < group.rows) *reinterpret_cast<uint4*>(o + int64_t(group.token) * in.H * kWidth) = row;
    }
    uint2 decay[16];
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) decay[tile] = ptx::load_shared_64(stage + kDecay + tile * 32 + c * 8);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(state);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty + at.index * 8);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= __uint_as_float(i & 1 ? decay[i >> 2].y : decay[i >> 2].x);
    if (MODE == Mode::kOutput && args.final_state && group.last())
      store_state(state, args.final_state + (int64_t(group.document) * in.H + head) * kState, place);
    at.advance(1);
  }
  if constexpr (MODE == Mode::kMap) {
    float* destination = args.borders + (int64_t(number - 1) * in.H + head) * 2 * kState;
    if (identity) store_map(state, destination + kState, place); else store_state(state, destination, place);
  }
}

}  // namespace megamoe::kda
