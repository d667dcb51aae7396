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

template <Mode MODE>
__device__ __forceinline__ void consume(const Arguments& args, int head, int segment, int identity, int first, int count, uint32_t stages,
                                        const Barriers& barriers, int thread) {
  const Inputs& in = args.in;
  const int lane = thread & 31, warp = (thread >> 5) & 3, group_of_warps = thread >> 7, r = lane >> 2, c = lane & 3;
  const StatePlace place{group_of_warps * 64 + warp * 16 + r, 2 * c};
  constexpr int64_t kState = kWidth * kWidth;
  float state[64];
  if constexpr (MODE == Mode::kOutput) {
    load_state(state, segment ? args.entering + (int64_t(head) * args.segments + segment) * kState : nullptr, place);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = identity && place.offset(i) % (kWidth + 1) == 0 ? exp2f(-kShift) : 0.0f;
  }
  // This warp's 16 tokens x 16 value rows of the stage's v. Its o of the same shape waits, packed, until the next group's read
  // is under way, and goes out through 512 bytes of its own: rows of 32 bytes, the two chunks swapped in rows 4-7, 12-15.
  const int chunk = (group_of_warps * 64 + warp * 16) >> 3, token = (lane & 7) + ((lane >> 4) << 3);
  const uint32_t v_at = kValues + token * 256 + (((chunk + ((lane >> 3) & 1)) ^ (token & 7)) << 4);
  const uint32_t o_base = stages + kStages * kStageBytes + kBarrierBytes + (thread >> 5) * kOutputBytes;
  const uint32_t o_in = o_base + token * 32 + ((((lane >> 3) ^ (token >> 2)) & 1) << 4);
  const uint32_t o_out = o_base + (lane & 15) * 32 + ((((lane >> 4) ^ (lane >> 2)) & 1) << 4);
  __nv_bfloat16* o = nullptr;
  if constexpr (MODE == Mode::kOutput) o = args.o + (int64_t(lane & 15) * in.H + head) * kWidth + (chunk + (lane >> 4)) * 8;
  uint32_t o_packed[4] = {};
  int o_token = 0, o_rows = 0;
  const auto flush_o = [&] {
    ptx::stmatrix_x4_trans(o_in, o_packed);
    __syncwarp();
    const uint4 row = ptx::load_shared_128(o_out);
    if ((lane & 15) < o_rows) *reinterpret_cast<uint4*>(o + int64_t(o_token) * in.H * kWidth) = row;
  };

  for (int m = 0; m < count; ++m) {
    const Stage at = Stage::of(m);
    const uint32_t stage = stages + at.index * kStageBytes;
    const ptx::Descriptor swizzled = ptx::descriptor(stage, 16, 1024, ptx::Swizzle::k128B);
    ptx::mbarrier_wait(barriers.full + at.index * 8, at.parity);
    const uint4 entry = ptx::load_shared_128(stage + kGroup);
    const Group group{int32_t(entry.x), int32_t(entry.y), int32_t(entry.z), int32_t(entry.w)};
    uint32_t v[4] = {};
    if (MODE == Mode::kOutput || !identity) ptx::ldmatrix_x4_trans(v, stage + v_at);
    uint32_t a[8][4];
    const auto pack_state = [&] {
#pragma unroll
      for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[step][e] = ptx::pack_bf16(state[8 * step + 2 * e], state[8 * step + 2 * e + 1]);
    };
    pack_state();  // before looking at the entry, whose load it covers
    if (group.first()) {
      const bool given = in.initial_state && !identity;
      load_state(state, given ? in.initial_state + (int64_t(group.document) * in.H + head) * kState : nullptr, place);
      pack_state();
    }

    // [u | o / rq] = [Z | Z'] v + [W | W'] S^ for this warpgroup's value rows: (64 x 16 + 128) (144 x 32), v and the state as
    // register operands. The map of a segment has no use for o, that of the state itself none for v.
    float read[16];
    ptx::wgmma_fence();
    ptx::wgmma_n32(read, v, ptx::descriptor(stage, kTileStride, 2 * kTileStride, ptx::Swizzle::kNone) + kZ, 0);
#pragma unroll
    for (int step = 0; step < 8; ++step) ptx::wgmma_n32(read, a[step], swizzled + (kKq + (step >> 2) * kHalf + (step & 3) * 32), 1);
    ptx::wgmma_commit();
    float rq[4];
    if constexpr (MODE == Mode::kOutput) {
      flush_o();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 pair = ptx::load_shared_64(stage + kScalars + 64 + half * 32 + c * 8);
        rq[2 * half] = __uint_as_float(pair.x), rq[2 * half + 1] = __uint_as_float(pair.y);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(read);

    uint32_t u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) u[e] = ptx::pack_bf16(read[2 * e], read[2 * e + 1]);
    ptx::wgmma_fence();
    ptx::wgmma_n128(state, u, ptx::descriptor(stage, 128, kInverseStride, ptx::Swizzle::kNone) + kInverse, 1);
    ptx::wgmma_commit();
    uint4 decay[8];
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) decay[pair] = ptx::load_shared_128(stage + kDecay + pair * 64 + c * 16);
    if constexpr (MODE == Mode::kOutput) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1;
        o_packed[e] = ptx::pack_bf16(rq[2 * half] * read[8 + 2 * e], rq[2 * half + 1] * read[8 + 2 * e + 1]);
      }
      o_token = group.token, o_rows = group.rows;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(state);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty + at.index * 8);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const uint4& pair = decay[i >> 3];
      state[i] *= __uint_as_float(i & 4 ? (i & 1 ? pair.w : pair.z) : (i & 1 ? pair.y : pair.x));
    }
    if (MODE == Mode::kOutput && args.final_state && group.last())
      store_state(state, args.final_state + (int64_t(group.document) * in.H + head) * kState, place);
  }
  if constexpr (MODE == Mode::kOutput) flush_o();
  if constexpr (MODE == Mode::kMap) store_state(state, args.maps + ((int64_t(head) * args.segments + segment) * 2 + identity) * kState, place);
}

}  // namespace megamoe::kda
