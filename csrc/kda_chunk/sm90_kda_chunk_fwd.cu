// KDA forward on Hopper: launches. Device code: sm90_kda_chunk_fwd_prep.cuh (producers), sm90_kda_chunk_fwd_scan.cuh
// (consumers); the algebra and the layouts are at the top of sm90_kda_chunk_fwd.cuh.
//
// Many heads: one block a head over the whole stream; documents restart the state and nothing else. Few heads: documents are
// cut into segments (segments.cuh), each block computes the affine map of one segment (kMap), a small kernel chains the maps
// in fp32, and the segments run at once from their exact entering states.
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
  int first = 0, count = 0, number = 0, identity = 0;
  if constexpr (MODE == Mode::kOutput) {
    const int total = num_groups(args);
    if (args.runs == 1) {
      count = total;
    } else {  // whole segments, as even as they come: which block runs a segment changes no bit of it
      first = segment_from(args, int(int64_t(total) * work / args.runs), total);
      count = segment_from(args, int(int64_t(total) * (work + 1) / args.runs), total) - first;
    }
  } else {
    number = work / 2 + 1, identity = work % 2;
    const DocumentStart start{args.in.cu_seqlens, int32_t(args.in.T)};
    const Border border = border_at(start, args.in.N, kForwardSegment, number);
    if (border.index == 0 || (identity && border.index == 1)) return;  // nothing but its own state enters a first segment
    first = (args.first_group ? args.first_group[border.document] : 0) + (border.index - 1) * kSegmentGroups;
    count = kSegmentGroups;
  }
  if (threadIdx.x >= kConsumerThreads) {
    ptx::register_decrease<kProducerRegisters>();
    produce<MODE>(args, head, first, count, stages, full, empty, (threadIdx.x - kConsumerThreads) / 32, threadIdx.x % 32);
  } else {
    ptx::register_increase<kConsumerRegisters>();
    consume<MODE>(args, head, number, identity, count, stages, full, empty, threadIdx.x);
  }
}

__global__ void __launch_bounds__(kChainThreads) sm90_kda_chunk_fwd_chain(const __grid_constant__ Arguments args) {
  const DocumentStart start{args.in.cu_seqlens, int32_t(args.in.T)};
  chain_segments<2>(args.borders, args.in.H, blockIdx.x, blockIdx.y * kChainColumns, false, start, args.in.N, kForwardSegment, args.num_borders);
}

// An empty document runs through no group: its final state is its initial state. cu_seqlens nullptr: one empty document.
__global__ void copy_states_of_empty_documents(const int32_t* cu_seqlens, const float* initial_state, float* final_state, int H) {
  const int document = blockIdx.x, head = blockIdx.y;
  if (cu_seqlens && cu_seqlens[document] != cu_seqlens[document + 1]) return;
  const int64_t at = (int64_t(document) * H + head) * kWidth * kWidth;
  for (int i = threadIdx.x; i < kWidth * kWidth; i += blockDim.x) final_state[at + i] = initial_state ? initial_state[at + i] : 0.0f;
}

// Two passes over a segment and a chain against one pass over everything: worth it only when heads leave most SMs idle. A
// function of H and the device alone: a choice that saw T would let appended tokens change earlier bits.
bool segmented(int H, int num_sms) { return H > 0 && num_sms / H >= 4; }

size_t align256(size_t bytes) { return (bytes + 255) & ~size_t(255); }

struct Layout {
  int num_borders;
  size_t first_group, table, borders, total;
  Layout(int64_t T, int H, int N, int num_sms) {
    num_borders = segmented(H, num_sms) ? int(T / kForwardSegment) : 0;
    first_group = 0;
    table = align256((size_t(N) + 1) * sizeof(int32_t));
    borders = table + align256(size_t(max_groups(T, N, kRows)) * sizeof(Group));
    total = borders + size_t(num_borders) * H * 2 * kWidth * kWidth * sizeof(float);
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

size_t forward_workspace_bytes(int64_t T, int H, int N, int num_sms) { return Layout(T, H, N, num_sms).total; }

cudaError_t forward(const Forward& forward, cudaStream_t stream) {
  const Inputs& in = forward.in;
  const Layout layout(in.T, in.H, in.N, forward.num_sms);
  uint8_t* workspace = static_cast<uint8_t*>(forward.workspace);
  Arguments args{in, forward.o, forward.final_state, nullptr, nullptr, nullptr, layout.num_borders, 1};
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
  if (segmented(in.H, forward.num_sms)) {
    const int64_t most = int64_t(layout.num_borders) + in.N, fit = forward.num_sms / in.H;
    args.runs = int(most < fit ? most : fit);
  }
  if (layout.num_borders > 0 && status == cudaError_t{}) {
    args.borders = reinterpret_cast<float*>(workspace + layout.borders);
    status = enqueue(sm90_kda_chunk_fwd<Mode::kMap>, dim3(in.H * 2 * layout.num_borders), kThreads, kSharedBytes, stream, args);
    if (status == cudaError_t{}) status = enqueue(sm90_kda_chunk_fwd_chain, dim3(in.H, kWidth / kChainColumns), kChainThreads, 0, stream, args);
  }
  return status != cudaError_t{} ? status : enqueue(sm90_kda_chunk_fwd<Mode::kOutput>, dim3(in.H * args.runs), kThreads, kSharedBytes, stream, args);
}

}  // namespace megamoe::kda
