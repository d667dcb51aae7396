// KDA forward, what its two halves share: the algebra, the shared-memory stage, the kernel's arguments.
//
// One block walks one head over a run of 16-token groups. Producer warps turn the raw rows of a group into operands,
// each warp a whole group by itself; two consumer warpgroups carry the transposed state in fp32 WGMMA accumulators,
// 64 of the 128 value rows each, and do nothing but the serial part.
//
// Algebra of a group (rows i, j = 0..15; G_i the inclusive cumulative log2-decay from the group's start; q, k RAW):
//   k~_i = k_i 2^(G_i + s)    q~_i = q_i 2^(G_i + s)    k^_j = k_j 2^(-G_j - s)       s = 22, a constant
//   KK_ij = k~_i . k^_j       QK_ij = q~_i . k^_j (j <= i)                             the decay between i and j
//   rk_i = 1/|k_i|, rq_i = scale/|q_i|                                                 the norms enter as scalars only
//   L_ij = beta_i rk_i rk_j KK_ij (j < i)       Z = diag(rk) (I + L)^-1 diag(beta)
// With S^ = 2^-s S entering the group, the consumers compute
//   u = Z (v - rk (k~ S^))                   o = rq (q~ S^ + QK u)                     S^ <- 2^(G_15) (S^ + k^T u)
// Everything a group adds is anchored at its start by a constant, so no token changes the bits of an earlier one; every
// exponent stays within 16 * 5 * log2(e) - s = 93.4 < 127, which is what the lower bound of -5 is for (design D13).
// Keeping the norms out of the operands spares a pass over the row before it can be used.
#pragma once

#include "../common/ptx.cuh"
#include "kda_chunk.h"
#include "segments.cuh"

namespace megamoe::kda {

constexpr int kRows = 16;              // tokens of a group
constexpr int kStages = 12;            // groups in flight in shared memory
constexpr int kProducerWarps = 8;      // each owns every eighth group
constexpr int kConsumerThreads = 256;  // two warpgroups
constexpr int kThreads = kConsumerThreads + 32 * kProducerWarps;
constexpr int kConsumerRegisters = 144, kProducerRegisters = 112;  // 256 * (144 + 112) = the register file
constexpr float kShift = 22.0f;
constexpr float kLog2e = 1.4426950408889634f;

// A stage, byte offsets. `kq` holds rows k~ 0-15 then q~ 0-15 in two halves of 64 channels, 128-byte swizzle (K-major B of
// the state reads); raw k and q arrive in the very places that their images take. `k_inverse` is k^ transposed, channels x
// tokens, in 8x8 core matrices (K-major B of the update); groups of 8 channels are 272 bytes apart so that the transposing
// stores spread over the banks. Raw g arrives there and is read into registers before k^ overwrites it.
constexpr uint32_t kKq = 0, kHalf = 4096, kQueryRows = 2048;
constexpr uint32_t kInverse = 8192, kInverseStride = 272;
constexpr uint32_t kValues = kInverse + 16 * kInverseStride;  // v, rows of 256 bytes, chunks XORed with row % 8; then o in its place
constexpr uint32_t kZ = kValues + 4096;                       // Z and QK as B operands; before that L in fp32
constexpr uint32_t kQK = kZ + 512;
constexpr uint32_t kDecay = kQK + 512;    // 2^(G_15), 128 fp32
constexpr uint32_t kScalars = kDecay + 512;  // rk, rq: 32 fp32
constexpr uint32_t kGroup = kScalars + 128;  // the Group entry
constexpr uint32_t kStageBytes = 18432;
static_assert(kGroup + 16 <= kStageBytes && kStageBytes % 1024 == 0 && kValues % 128 == 0);
constexpr uint32_t kSharedBytes = 1024 + kStages * kStageBytes + 256;  // alignment, stages, barriers
static_assert(kSharedBytes <= 232448 && 2 * kStages * 8 <= 256);

// kOutput writes o (and final states). kMap computes what the segment before a border does to the state entering it:
// S -> M S + S0, with two blocks a segment, one started from zero (the document's first: its initial state) with the real
// values (S0), one from the identity with zero values (M).
enum class Mode { kOutput, kMap };

struct Arguments {
  Inputs in;
  __nv_bfloat16* o;
  float* final_state;
  const Group* table;          // nullptr: one document
  const int32_t* first_group;  // [N] is the number of groups; nullptr: one document
  float* borders;              // (num_borders, H, 2, K, V): see chain_segments; nullptr: no document is cut
  int num_borders;
  int runs;                    // kOutput: blocks a head, each a run of whole segments
};

constexpr int kSegmentGroups = kForwardSegment / kRows;
static_assert(kForwardSegment % kRows == 0);

struct DocumentStart {
  const int32_t* cu_seqlens;
  int32_t T;
  __device__ __forceinline__ int32_t operator()(int n) const { return cu_seqlens ? cu_seqlens[n] : (n ? T : 0); }
};

__device__ __forceinline__ int num_groups(const Arguments& args) { return args.table ? args.first_group[args.in.N] : int((args.in.T + kRows - 1) / kRows); }

__device__ __forceinline__ Group group_at(const Arguments& args, int index) {
  if (args.table) return args.table[index];
  const int64_t left = args.in.T - int64_t(index) * kRows;
  return {index * kRows, left < kRows ? int(left) : kRows, 0, index * 2 + (left <= kRows)};
}

// The first group at `index` or after it that starts a segment; the end of the table when there is none.
__device__ __forceinline__ int segment_from(const Arguments& args, int index, int total) {
  if (index >= total) return total;
  const Group group = group_at(args, index);
  const int ahead = (kSegmentGroups - group.index() % kSegmentGroups) % kSegmentGroups, end = args.table ? args.first_group[group.document + 1] : total;
  return min(index + ahead, end);
}

struct Stage {
  uint32_t index = 0, parity = 0;
  __device__ __forceinline__ void advance(uint32_t by) {
    index += by;
    if (index >= kStages) { index -= kStages; parity ^= 1; }
  }
};

}  // namespace megamoe::kda
