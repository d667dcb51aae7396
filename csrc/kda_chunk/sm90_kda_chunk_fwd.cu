// KDA forward on Hopper: launches. Device code: sm90_kda_chunk_fwd_prep.cuh (producers), sm90_kda_chunk_fwd_scan.cuh
// (consumers); the algebra and the layouts are at the top of sm90_kda_chunk_fwd.cuh.
//
// Many heads: one block a head over the whole stream; documents restart the state and nothing else. Few heads: the stream
// is cut into segments, each block computes the affine map of one segment (kMap), a small kernel chains the maps in
// fp32, and the segments run at once from their exact entering states. The same maps serve context parallelism.
#include "sm90_kda_chunk_fwd.cuh"
#include "sm90_kda_chunk_fwd_prep.cuh"
#include "sm90_kda_chunk_fwd_scan.cuh"

namespace megamoe::kda {
namespace {

template <Mode MODE>
__global__ void __launch_bounds__(kThreads, 1) sm90_kda_chunk_fwd(const __grid_constant__ Arguments args) {
  const uint32_t stages = (ptx::smem_address(ptx::dynamic_shared()) + 1023) & ~1023u;
  const uint32_t full = stages + kStages * kStageBytes, empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i * 8, 1);
      ptx::mbarrier_init(empty + i * 8, kConsumerThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const int head = blockIdx.x % args.in.H, work = blockIdx.x / args.in.H;
  // kMap: first S0 of segments 0 .. n-2, then M of segments 1 .. n-2 (nothing enters segment 0).
  const int identity = MODE == Mode::kMap && work >= args.segments - 1;
  const int segment = identity ? work - (args.segments - 1) + 1 : work;
  const int total = num_groups(args), size = (total + args.segments - 1) / args.segments;
  const int first = min(segment * size, total), count = min(size, total - first);
  if (threadIdx.x >= kConsumerThreads) {
    ptx::register_decrease<kProducerRegisters>();
    produce<MODE>(args, head, first, count, stages, full, empty, (threadIdx.x - kConsumerThreads) / 32, threadIdx.x % 32);
  } else {
    ptx::register_increase<kConsumerRegisters>();
    consume<MODE>(args, head, segment, identity, first, count, stages, full, empty, threadIdx.x);
  }
}

// entering[s] = M[s-1] entering[s-1] + S0[s-1], fp32 throughout. One block: one head, 16 of the 128 value columns.
constexpr int kChainColumns = 16;
__global__ void __launch_bounds__(kWidth) sm90_kda_chain_segments(const float* maps, float* entering, int segments) {
  constexpr int kState = kWidth * kWidth, kTile = 32;
  __shared__ float state[kWidth][kChainColumns];
  __shared__ float map_tile[kWidth][kTile + 1];
  const int head = blockIdx.x, column = blockIdx.y * kChainColumns, row = threadIdx.x;
  float sum[kChainColumns] = {};
  for (int segment = 1; segment < segments; ++segment) {
    const float* map = maps + (int64_t(head) * segments + segment - 1) * 2 * kState;
    float* destination = entering + (int64_t(head) * segments + segment) * kState;
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      state[row][i] = sum[i];
      sum[i] = map[row * kWidth + column + i];
    }
    for (int tile = 0; segment > 1 && tile < kWidth; tile += kTile) {  // nothing enters segment 0: its M was never computed
      __syncthreads();
      for (int i = threadIdx.x; i < kWidth * kTile; i += kWidth) map_tile[i / kTile][i % kTile] = map[kState + (i / kTile) * kWidth + tile + i % kTile];
      __syncthreads();
#pragma unroll 8
      for (int k = 0; k < kTile; ++k)
#pragma unroll
        for (int i = 0; i < kChainColumns; ++i) sum[i] = fmaf(map_tile[row][k], state[tile + k][i], sum[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) destination[row * kWidth + column + i] = sum[i];
  }
}

// An empty document runs through no group: its final state is its initial state. cu_seqlens nullptr: one empty document.
__global__ void copy_states_of_empty_documents(const int32_t* cu_seqlens, const float* initial_state, float* final_state, int H) {
  const int document = blockIdx.x, head = blockIdx.y;
  if (cu_seqlens && cu_seqlens[document] != cu_seqlens[document + 1]) return;
  const int64_t at = (int64_t(document) * H + head) * kWidth * kWidth;
  for (int i = threadIdx.x; i < kWidth * kWidth; i += blockDim.x) final_state[at + i] = initial_state ? initial_state[at + i] : 0.0f;
}

// Two passes over a segment and a chain against one pass over everything: worth it only when heads leave most SMs idle.
int num_segments(int64_t T, int H, int num_sms) {
  const int fit = H > 0 ? num_sms / H : 1;
  const int64_t groups = T / kRows;
  if (fit < 4 || groups < 64) return 1;
  return int(groups / 16 < fit ? groups / 16 : fit);
}

size_t align256(size_t bytes) { return (bytes + 255) & ~size_t(255); }

struct Layout {
  size_t first_group, table, maps, entering, total;
  Layout(int64_t T, int H, int N, int segments) {
    const size_t states = segments > 1 ? size_t(H) * segments * kWidth * kWidth * sizeof(float) : 0;
    first_group = 0;
    table = align256((size_t(N) + 1) * sizeof(int32_t));
    maps = table + align256(size_t(max_groups(T, N, kRows)) * sizeof(Group));
    entering = maps + 2 * states;
    total = entering + states;
  }
};

#ifdef MEGAMOE_SIMT_EMULATION
template <class... Parameters, class... Values>
cudaError_t enqueue(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t, const Values&... values) {
  simt::launch(grid, threads, shared, [&] { kernel(values...); });
  return 0;
}
#else
template <class... Parameters, class... Values>
cudaError_t enqueue(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream, const Values&... values) {
  if (shared > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (status != cudaSuccess) return status;
  }
  kernel<<<grid, threads, shared, stream>>>(values...);
  return cudaGetLastError();
}
#endif

}  // namespace

size_t forward_workspace_bytes(int64_t T, int H, int N, int num_sms) { return Layout(T, H, N, num_segments(T, H, num_sms)).total; }

cudaError_t forward(const Forward& forward, cudaStream_t stream) {
  const Inputs& in = forward.in;
  const int segments = num_segments(in.T, in.H, forward.num_sms);
  const Layout layout(in.T, in.H, in.N, segments);
  uint8_t* workspace = static_cast<uint8_t*>(forward.workspace);
  Arguments args{in, forward.o, forward.final_state, nullptr, nullptr, reinterpret_cast<float*>(workspace + layout.maps),
                 reinterpret_cast<float*>(workspace + layout.entering), segments};
  cudaError_t status{};
  if (in.H == 0) return status;
  if (forward.final_state && (in.cu_seqlens || in.T == 0))
    status = enqueue(copy_states_of_empty_documents, dim3(in.N, in.H), 256, 0, stream, in.cu_seqlens, in.initial_state, forward.final_state, in.H);
  if (status != cudaError_t{} || in.T == 0) return status;
  if (in.cu_seqlens) {
    int32_t* first_group = reinterpret_cast<int32_t*>(workspace + layout.first_group);
    Group* table = reinterpret_cast<Group*>(workspace + layout.table);
    status = enqueue(build_group_table<kRows>, dim3(1), 1024, 0, stream, in.cu_seqlens, in.T, in.N, first_group, table);
    args.first_group = first_group;
    args.table = table;
  }
  if (segments > 1 && status == cudaError_t{}) {
    status = enqueue(sm90_kda_chunk_fwd<Mode::kMap>, dim3(in.H * (2 * segments - 3)), kThreads, kSharedBytes, stream, args);
    if (status == cudaError_t{}) status = enqueue(sm90_kda_chain_segments, dim3(in.H, kWidth / kChainColumns), kWidth, 0, stream, args.maps, args.entering, segments);
  }
  return status != cudaError_t{} ? status : enqueue(sm90_kda_chunk_fwd<Mode::kOutput>, dim3(in.H * segments), kThreads, kSharedBytes, stream, args);
}

}  // namespace megamoe::kda
