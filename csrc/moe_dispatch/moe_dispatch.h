// Plain-pointer interface of dispatch and combine. Nothing here knows torch, NCCL or processes: where the ranks' buffers
// come from (one process that plays all ranks, CUDA IPC, …) is the caller's affair, and so is the order of the phases.
//
// Legend: N tokens of this rank, A experts per token, E experts over all P ranks (rank p owns E/P consecutive ones), D width,
// R rows. Rows of a rank are grouped by its experts, within an expert by source rank, then by token: the order of the
// reference backend. A "slot" is one (token, expert); slots of a token are kept in ascending expert id, empty ones last.
//
// Phases, each complete on every rank before the next reads what peers wrote (between processes `meet` sees to that):
//   1 count    counts_PE[me] on every rank        4 expand   (deduplicated sends only) copies inside the receiver
//   2 place    where each of my slots goes        5 combine  pulls the rows of my tokens from their owners and sums them
//   3 send     rows into the owners' buffers
// Backward of send is `combine` without weights on the row gradients; backward of combine is `send_weighted`.
//
// Functions enqueue on `stream` and return the launch status; none allocates or synchronises. No atomics but integer OR
// in shared memory: same inputs, same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace megamoe::dispatch {

constexpr int kMaxRanks = 64, kMaxExperts = 4096, kMaxSlotsPerToken = 32, kChunk = 128;

// One address per rank. For the calling rank's own buffers an ordinary pointer, for peers a mapped one.
template <class T>
struct Peers {
  T* base[kMaxRanks];
};

// Scratch of `count` that `place` reads: per chunk of kChunk tokens and expert, slots before it; each slot's rank in it.
struct Scratch {
  int32_t* chunk_CE;   // (ceil(N / kChunk), E)
  uint8_t* rank_NA;    // (N, A)
};

struct Count {
  const int64_t* idx;  // (N, A), -1 for an empty slot; no id twice in a row
  int64_t N;
  int A, E;
  Scratch scratch;
  int32_t* total_E;    // (E,) slots of this rank per expert
};
cudaError_t count(const Count& args, cudaStream_t stream);

// Store this rank's line of the counts (`width` integers) on every rank.
cudaError_t share_counts(const int32_t* line, const Peers<int32_t>& counts, int P, int me, int width, cudaStream_t stream);

// Where ranks meet: what each of them enqueued before is visible to all behind it.
constexpr int32_t kGaveUp = INT32_MIN;
struct Meet {
  Peers<int32_t> flags;     // per rank (P,): the last meeting of each of its peers, written by that peer; zero at first
  int P, me;
  int32_t epoch;            // of this meeting, from 1, one more each time
  uint64_t timeout_ns;
  // (2 + P,) that the host sees too, zero at first: 1 once a meeting failed, its epoch, what flags[me] was then. A rank whose
  // meeting failed tells its peers (kGaveUp), skips all later ones, and never traps.
  int32_t* report;
};
cudaError_t meet(const Meet& args, cudaStream_t stream);

struct Place {
  const int64_t* idx;
  const float* weight;      // (N, A) in the order of idx
  const int32_t* counts_PE; // (P, E) complete
  int64_t N;
  int A, E, P, me;
  Scratch scratch;
  int32_t* start_E;         // (E,) scratch: row at the owner of this rank's first slot of the expert
  // out
  int32_t* row_NA;          // row at the owner, -1 for an empty slot; slots in ascending expert id
  uint8_t* owner_NA;        // owning rank of each slot
  float* weight_NA;         // in the same order, 0 for an empty slot
  uint8_t* source_NA;       // for each sorted slot, its column in idx
  int32_t* count_e;         // (E/P,) rows of each expert this rank owns, over all sources
  int32_t* received;        // (1,) their sum
};
cudaError_t place(const Place& args, cudaStream_t stream);

struct Send {
  const __nv_bfloat16* x;   // (N, D), D a multiple of 8, 16-byte aligned
  const int32_t* row_NA;
  const uint8_t* owner_NA;
  int64_t N;
  int A, D;
  bool deduplicate;         // one payload per (token, owner); other rows there are made by `expand`
  Peers<__nv_bfloat16> rows;
  Peers<int32_t> copy_of;   // per row: the row at the same owner that holds its payload; unused unless deduplicating
};
cudaError_t send(const Send& args, cudaStream_t stream);

// rows[i] = rows[copy_of[i]] for i < *received; leaves rows that are their own source alone.
cudaError_t expand(__nv_bfloat16* rows, const int32_t* copy_of, const int32_t* received, int64_t R, int D, cudaStream_t stream);
// Zero rows[*received … R).
cudaError_t zero_rest(__nv_bfloat16* rows, const int32_t* received, int64_t R, int D, cudaStream_t stream);

struct Combine {
  Peers<const __nv_bfloat16> rows;
  const int32_t* row_NA;
  const uint8_t* owner_NA;
  const float* weight_NA;   // nullptr: plain sum (backward of send)
  int64_t N;
  int A, D;
  __nv_bfloat16* y;         // (N, D): products and sum in fp32, slots in order, rounded once; exact zero with no slot
};
cudaError_t combine(const Combine& args, cudaStream_t stream);

struct SendWeighted {
  const __nv_bfloat16* dy;               // (N, D)
  Peers<const __nv_bfloat16> rows;       // what combine read
  Peers<__nv_bfloat16> d_rows;           // weight * dy, rounded once
  const int32_t* row_NA;
  const uint8_t* owner_NA;
  const float* weight_NA;
  const uint8_t* source_NA;
  int64_t N;
  int A, D;
  float* d_weight;                       // (N, A) in the order of idx: <row, dy>, 0 for an empty slot
};
cudaError_t send_weighted(const SendWeighted& args, cudaStream_t stream);

}  // namespace megamoe::dispatch
