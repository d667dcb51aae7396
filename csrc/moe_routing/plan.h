// Plain-pointer interface of the balanced-placement planner. Nothing here knows torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megamoe::routing {

constexpr int kMaxPlanRanks = 64, kMaxPlanExperts = 1024;

// share (E, P) int32, borrowed (P, E/P) int32 with -1 behind the last. Same inputs, same bits. No allocation, no host sync.
cudaError_t plan(const int32_t* count_E, int E, int P, int32_t* share_EP, int32_t* borrowed_Pe, cudaStream_t stream);

}  // namespace megamoe::routing
