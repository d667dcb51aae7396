// Torch side of the MoE and AttnRes kernels: schemas, host checks, allocation, the current stream. Same rules as csrc/ops.cpp:
// stable ABI, plain-pointer headers below, fakes and autograd beside the Python wrappers.
//
// Legend: N tokens, A experts per token, E experts, P ranks, D width, R rows, n rows of a mix.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attn_res_mix/attn_res_mix.h"
#include "moe_dispatch/moe_dispatch.h"
#include "moe_routing/moe_routing.h"
#include "moe_routing/plan.h"

// Absent from a CPU build of torch; weak, so that schemas and fakes load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

namespace attn_res = megamoe::attn_res;
namespace routing = megamoe::routing;
namespace moe = megamoe::dispatch;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Guard = torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(const Tensor& tensor) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "megamoe: this torch was built without CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == 0, "megamoe: no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

void check_launch(cudaError_t status, const char* op) { STD_TORCH_CHECK(status == cudaSuccess, op, ": ", cudaGetErrorString(status)); }

int num_sms(const Tensor& tensor) {
  int count = 0;
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, tensor.get_device_index()), "megamoe");
  return count;
}

Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), dtype);
}

constexpr int64_t kAny = -1;

// A contiguous, 16-byte aligned tensor on `like`'s device as a pointer.
template <typename T>
T* data(const Tensor& tensor, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name, ": expected a tensor on the CUDA device of the others");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": unexpected dtype");
  STD_TORCH_CHECK(tensor.dim() == int64_t(sizes.size()), name, ": has ", tensor.dim(), " dimensions, expected ", sizes.size());
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size == kAny || tensor.size(dim) == size, name, ": dimension ", dim, " is ", tensor.size(dim), ", expected ", size);
    ++dim;
  }
  STD_TORCH_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, name, ": expected a contiguous tensor with a 16-byte aligned start");
  return static_cast<T*>(tensor.data_ptr());
}
template <typename T>
T* data(const OptionalTensor& tensor, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes, const Tensor& like) {
  return tensor.has_value() ? data<T>(*tensor, name, dtype, sizes, like) : nullptr;
}

// ---- attn_res_mix

attn_res::Mix mix_of(const Tensors& rows, const Tensor& u, double eps, bool backward) {
  STD_TORCH_CHECK(!rows.empty() && rows[0].dim() == 2, "attn_res_mix: expected one or more (T, D) rows");
  const int64_t T = rows[0].size(0), D = rows[0].size(1), most = attn_res::most_rows(int(D), backward);
  STD_TORCH_CHECK(int64_t(rows.size()) <= most, "attn_res_mix: ", rows.size(), " rows of width ", D, " do not fit, at most ", most);
  attn_res::Mix mix{};
  for (size_t i = 0; i < rows.size(); ++i) mix.row[i] = data<__nv_bfloat16>(rows[i], "row", ScalarType::BFloat16, {T, D}, rows[0]);
  mix.u = data<float>(u, "u", ScalarType::Float, {D}, rows[0]);
  mix.T = T, mix.D = int(D), mix.n = int(rows.size()), mix.eps = float(eps), mix.num_sms = num_sms(rows[0]);
  return mix;
}

std::tuple<Tensor, Tensor> attn_res_mix_fwd(Tensors rows, Tensor u, double eps) {
  const attn_res::Mix mix = mix_of(rows, u, eps, false);
  const Guard guard(u.get_device_index());
  Tensor out = empty(u, {mix.T, mix.D}, ScalarType::BFloat16), rv = empty(u, {2, mix.n, mix.T}, ScalarType::Float);
  check_launch(attn_res::forward(mix, static_cast<__nv_bfloat16*>(out.data_ptr()), static_cast<float*>(rv.data_ptr()), current_stream(u)), "attn_res_mix_fwd");
  return {out, rv};
}

// Bit i of `wanted` asks for row i's gradient; the others come back empty.
std::tuple<Tensors, Tensor> attn_res_mix_bwd(Tensor d_out, Tensors rows, Tensor u, Tensor rv, int64_t wanted) {
  const attn_res::Mix mix = mix_of(rows, u, 0.0, true);
  const Guard guard(u.get_device_index());
  attn_res::Backward args{};
  args.d_out = data<__nv_bfloat16>(d_out, "d_out", ScalarType::BFloat16, {mix.T, mix.D}, u);
  args.rv = data<float>(rv, "rv", ScalarType::Float, {2, mix.n, mix.T}, u);
  Tensors d_rows;
  for (int i = 0; i < mix.n; ++i) {
    const bool want = wanted >> i & 1;
    d_rows.push_back(want ? empty(u, {mix.T, mix.D}, ScalarType::BFloat16) : empty(u, {0}, ScalarType::BFloat16));
    args.d_row[i] = want ? static_cast<__nv_bfloat16*>(d_rows.back().data_ptr()) : nullptr;
  }
  Tensor parts = empty(u, {mix.num_sms, mix.D}, ScalarType::Float), du = empty(u, {mix.D}, ScalarType::Float);
  args.du_parts = static_cast<float*>(parts.data_ptr()), args.du = static_cast<float*>(du.data_ptr());
  check_launch(attn_res::backward(mix, args, current_stream(u)), "attn_res_mix_bwd");
  return {d_rows, du};
}

// ---- moe_routing

// Returns idx (N, A) int64, weight (N, A), cutoff (N,), count (E,) int64.
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_route(Tensor logits, Tensor bias, OptionalTensor real, int64_t A, double scale, bool select_on_logits) {
  routing::Route args{};
  args.logits = data<float>(logits, "logits", ScalarType::Float, {kAny, kAny}, logits);
  const int64_t N = logits.size(0), E = logits.size(1);
  args.bias = data<float>(bias, "bias", ScalarType::Float, {E}, logits);
  args.real = data<uint8_t>(real, "real", ScalarType::Bool, {N}, logits);
  STD_TORCH_CHECK(E <= routing::kMaxExperts && A >= 1 && A <= routing::kMaxChosen && A <= E, "moe_route: serves up to ", routing::kMaxExperts, " experts and ", routing::kMaxChosen, " chosen, got ", E, " and ", A);
  const Guard guard(logits.get_device_index());
  Tensor idx = empty(logits, {N, A}, ScalarType::Long), weight = empty(logits, {N, A}, ScalarType::Float), cutoff = empty(logits, {N}, ScalarType::Float);
  const int64_t experts[1] = {E};
  Tensor count = torch::stable::new_zeros(logits, torch::headeronly::IntHeaderOnlyArrayRef(experts, 1), ScalarType::Long);
  args.N = N, args.E = int(E), args.A = int(A), args.scale = float(scale), args.select_on_logits = select_on_logits;
  args.idx = static_cast<int64_t*>(idx.data_ptr()), args.weight = static_cast<float*>(weight.data_ptr());
  args.cutoff = static_cast<float*>(cutoff.data_ptr()), args.count = static_cast<unsigned long long*>(count.data_ptr());
  check_launch(routing::route(args, current_stream(logits)), "moe_route");
  return {idx, weight, cutoff, count};
}

// idx as chosen, before padding is marked, or after: a slot of -1 hands no gradient on.
Tensor moe_route_bwd(Tensor d_weight, Tensor logits, Tensor idx, double scale) {
  routing::RouteBackward args{};
  args.logits = data<float>(logits, "logits", ScalarType::Float, {kAny, kAny}, logits);
  args.N = logits.size(0), args.E = int(logits.size(1)), args.A = int(idx.size(1)), args.scale = float(scale);
  args.idx = data<int64_t>(idx, "idx", ScalarType::Long, {args.N, args.A}, logits);
  args.d_weight = data<float>(d_weight, "d_weight", ScalarType::Float, {args.N, args.A}, logits);
  const Guard guard(logits.get_device_index());
  Tensor d_logits = empty(logits, {args.N, args.E}, ScalarType::Float);
  args.d_logits = static_cast<float*>(d_logits.data_ptr());
  check_launch(routing::route_backward(args, current_stream(logits)), "moe_route_bwd");
  return d_logits;
}

Tensor moe_histogram(Tensor logits, Tensor bias, Tensor cutoff, OptionalTensor real, int64_t bins) {
  routing::Histogram args{};
  args.logits = data<float>(logits, "logits", ScalarType::Float, {kAny, kAny}, logits);
  args.N = logits.size(0), args.E = int(logits.size(1)), args.B = int(bins), args.num_sms = num_sms(logits);
  args.bias = data<float>(bias, "bias", ScalarType::Float, {args.E}, logits);
  args.cutoff = data<float>(cutoff, "cutoff", ScalarType::Float, {args.N}, logits);
  args.real = data<uint8_t>(real, "real", ScalarType::Bool, {args.N}, logits);
  STD_TORCH_CHECK(bins >= 2 && bins <= routing::kMaxBins, "moe_histogram: serves 2 to ", routing::kMaxBins, " bins, got ", bins);
  const Guard guard(logits.get_device_index());
  const int64_t shape[2] = {args.E, bins};
  Tensor histogram = torch::stable::new_zeros(logits, torch::headeronly::IntHeaderOnlyArrayRef(shape, 2), ScalarType::Int);
  args.histogram = static_cast<int32_t*>(histogram.data_ptr());
  check_launch(routing::histogram(args, current_stream(logits)), "moe_histogram");
  return histogram;
}

// Returns share (E, P), borrowed (P, E/P).
std::tuple<Tensor, Tensor> moe_plan(Tensor count, int64_t P) {
  const auto* counts = data<int32_t>(count, "count", ScalarType::Int, {kAny}, count);
  const int64_t E = count.size(0);
  STD_TORCH_CHECK(P >= 1 && P <= routing::kMaxPlanRanks && E >= 1 && E <= routing::kMaxPlanExperts && E % P == 0, "moe_plan: ", E, " experts on ", P, " ranks are not served");
  const Guard guard(count.get_device_index());
  Tensor share = empty(count, {E, P}, ScalarType::Int), borrowed = empty(count, {P, E / P}, ScalarType::Int);
  check_launch(routing::plan(counts, int(E), int(P), static_cast<int32_t*>(share.data_ptr()), static_cast<int32_t*>(borrowed.data_ptr()), current_stream(count)), "moe_plan");
  return {share, borrowed};
}

// ---- moe_dispatch

// A peer's buffer may lie on another device: each is only asked to be on one.
template <typename T>
moe::Peers<T> peers(const Tensors& buffers, const char* name, ScalarType dtype, int64_t D) {
  STD_TORCH_CHECK(buffers.size() <= size_t(moe::kMaxRanks), name, ": at most ", moe::kMaxRanks, " ranks");
  moe::Peers<T> table{};
  for (size_t p = 0; p < buffers.size(); ++p)
    table.base[p] = D ? data<std::remove_const_t<T>>(buffers[p], name, dtype, {kAny, D}, buffers[p]) : data<std::remove_const_t<T>>(buffers[p], name, dtype, {kAny}, buffers[p]);
  return table;
}

// Returns total (E,) int32, and the scratch that moe_place reads.
std::tuple<Tensor, Tensor, Tensor> moe_count(Tensor idx, int64_t E) {
  moe::Count args{};
  args.idx = data<int64_t>(idx, "idx", ScalarType::Long, {kAny, kAny}, idx);
  args.N = idx.size(0), args.A = int(idx.size(1)), args.E = int(E);
  STD_TORCH_CHECK(E >= 1 && E <= moe::kMaxExperts && args.A >= 1 && args.A <= moe::kMaxSlotsPerToken, "moe_count: ", E, " experts or ", args.A, " slots per token are not served");
  const Guard guard(idx.get_device_index());
  const int64_t chunks = (args.N + moe::kChunk - 1) / moe::kChunk;
  Tensor total = empty(idx, {E}, ScalarType::Int), chunk = empty(idx, {chunks, E}, ScalarType::Int), rank = empty(idx, {args.N, args.A}, ScalarType::Byte);
  args.scratch = {static_cast<int32_t*>(chunk.data_ptr()), static_cast<uint8_t*>(rank.data_ptr())};
  args.total_E = static_cast<int32_t*>(total.data_ptr());
  check_launch(moe::count(args, current_stream(idx)), "moe_count");
  return {total, chunk, rank};
}

// counts: one (P, width) int32 table per rank; this rank's line goes into each.
void moe_share_counts(Tensor line, Tensors counts, int64_t me) {
  const int64_t P = int64_t(counts.size());
  const auto* from = data<int32_t>(line, "line", ScalarType::Int, {kAny}, line);
  STD_TORCH_CHECK(P >= 1 && me >= 0 && me < P, "moe_share_counts: rank ", me, " of ", P);
  const auto table = peers<int32_t>(counts, "counts", ScalarType::Int, line.size(0));
  for (const Tensor& c : counts) STD_TORCH_CHECK(c.size(0) == P, "moe_share_counts: tables of ", c.size(0), " lines for ", P, " ranks");
  const Guard guard(line.get_device_index());
  check_launch(moe::share_counts(from, table, int(P), int(me), int(line.size(0)), current_stream(line)), "moe_share_counts");
}

// flags: one (P,) int32 per rank. report: (2 + P,) int32 in pinned host memory (or on the device, in tests).
void moe_meet(Tensors flags, int64_t me, int64_t epoch, double timeout_s, Tensor report) {
  const int64_t P = int64_t(flags.size());
  STD_TORCH_CHECK(P >= 1 && me >= 0 && me < P, "moe_meet: rank ", me, " of ", P);
  STD_TORCH_CHECK(epoch >= 1 && epoch < INT32_MAX && timeout_s > 0, "moe_meet: meeting ", epoch, " with ", timeout_s, " s");
  STD_TORCH_CHECK(report.scalar_type() == ScalarType::Int && report.dim() == 1 && report.size(0) == 2 + P && report.is_contiguous(), "moe_meet: report must be (2 + P,) int32");
  const Tensor& mine = flags[size_t(me)];
  moe::Meet args{};
  args.flags = peers<int32_t>(flags, "flags", ScalarType::Int, 0);
  for (const Tensor& f : flags) STD_TORCH_CHECK(f.size(0) == P, "moe_meet: ", f.size(0), " flags for ", P, " ranks");
  args.P = int(P), args.me = int(me), args.epoch = int32_t(epoch), args.timeout_ns = uint64_t(timeout_s * 1e9);
  args.report = static_cast<int32_t*>(report.data_ptr());
  const Guard guard(mine.get_device_index());
  check_launch(moe::meet(args, current_stream(mine)), "moe_meet");
}

// Returns row, owner, weight, source of the sorted slots (N, A), count (E/P,), received (1,).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_place(Tensor idx, Tensor weight, Tensor counts_PE, int64_t me, Tensor chunk, Tensor rank) {
  moe::Place args{};
  args.idx = data<int64_t>(idx, "idx", ScalarType::Long, {kAny, kAny}, idx);
  args.N = idx.size(0), args.A = int(idx.size(1));
  args.weight = data<float>(weight, "weight", ScalarType::Float, {args.N, args.A}, idx);
  args.counts_PE = data<int32_t>(counts_PE, "counts", ScalarType::Int, {kAny, kAny}, idx);
  args.P = int(counts_PE.size(0)), args.E = int(counts_PE.size(1)), args.me = int(me);
  STD_TORCH_CHECK(args.P >= 1 && args.P <= moe::kMaxRanks && args.E % args.P == 0 && me >= 0 && me < args.P, "moe_place: rank ", me, " of ", args.P, " with ", args.E, " experts");
  args.scratch = {data<int32_t>(chunk, "chunk", ScalarType::Int, {kAny, args.E}, idx), data<uint8_t>(rank, "rank", ScalarType::Byte, {args.N, args.A}, idx)};
  const Guard guard(idx.get_device_index());
  Tensor start = empty(idx, {args.E}, ScalarType::Int), row = empty(idx, {args.N, args.A}, ScalarType::Int), owner = empty(idx, {args.N, args.A}, ScalarType::Byte);
  Tensor sorted = empty(idx, {args.N, args.A}, ScalarType::Float), source = empty(idx, {args.N, args.A}, ScalarType::Byte);
  Tensor count = empty(idx, {args.E / args.P}, ScalarType::Int), received = empty(idx, {1}, ScalarType::Int);
  args.start_E = static_cast<int32_t*>(start.data_ptr()), args.row_NA = static_cast<int32_t*>(row.data_ptr()), args.owner_NA = static_cast<uint8_t*>(owner.data_ptr());
  args.weight_NA = static_cast<float*>(sorted.data_ptr()), args.source_NA = static_cast<uint8_t*>(source.data_ptr());
  args.count_e = static_cast<int32_t*>(count.data_ptr()), args.received = static_cast<int32_t*>(received.data_ptr());
  check_launch(moe::place(args, current_stream(idx)), "moe_place");
  return {row, owner, sorted, source, count, received};
}

// rows: one (R_p, D) buffer per rank. copy_of: one (R_p,) int32 buffer per rank to deduplicate, or empty.
void moe_send(Tensor x, Tensor row, Tensor owner, Tensors rows, Tensors copy_of) {
  moe::Send args{};
  args.x = data<__nv_bfloat16>(x, "x", ScalarType::BFloat16, {kAny, kAny}, x);
  args.N = x.size(0), args.D = int(x.size(1)), args.A = int(row.size(1)), args.deduplicate = !copy_of.empty();
  args.row_NA = data<int32_t>(row, "row", ScalarType::Int, {args.N, args.A}, x);
  args.owner_NA = data<uint8_t>(owner, "owner", ScalarType::Byte, {args.N, args.A}, x);
  args.rows = peers<__nv_bfloat16>(rows, "rows", ScalarType::BFloat16, args.D);
  STD_TORCH_CHECK(copy_of.empty() || copy_of.size() == rows.size(), "moe_send: one copy_of per rank, or none");
  args.copy_of = peers<int32_t>(copy_of, "copy_of", ScalarType::Int, 0);
  const Guard guard(x.get_device_index());
  check_launch(moe::send(args, current_stream(x)), "moe_send");
}

void moe_expand(Tensor rows, Tensor copy_of, Tensor received) {
  auto* to = data<__nv_bfloat16>(rows, "rows", ScalarType::BFloat16, {kAny, kAny}, rows);
  const auto* from = data<int32_t>(copy_of, "copy_of", ScalarType::Int, {rows.size(0)}, rows);
  const auto* count = data<int32_t>(received, "received", ScalarType::Int, {1}, rows);
  const Guard guard(rows.get_device_index());
  check_launch(moe::expand(to, from, count, rows.size(0), int(rows.size(1)), current_stream(rows)), "moe_expand");
}

void moe_zero_rest(Tensor rows, Tensor received) {
  auto* to = data<__nv_bfloat16>(rows, "rows", ScalarType::BFloat16, {kAny, kAny}, rows);
  const auto* count = data<int32_t>(received, "received", ScalarType::Int, {1}, rows);
  const Guard guard(rows.get_device_index());
  check_launch(moe::zero_rest(to, count, rows.size(0), int(rows.size(1)), current_stream(rows)), "moe_zero_rest");
}

Tensor moe_combine(Tensors rows, Tensor row, Tensor owner, OptionalTensor weight) {
  STD_TORCH_CHECK(!rows.empty() && rows[0].dim() == 2, "moe_combine: expected one (R, D) buffer per rank");
  moe::Combine args{};
  args.N = row.size(0), args.A = int(row.size(1)), args.D = int(rows[0].size(1));
  args.rows = peers<const __nv_bfloat16>(rows, "rows", ScalarType::BFloat16, args.D);
  args.row_NA = data<int32_t>(row, "row", ScalarType::Int, {args.N, args.A}, row);
  args.owner_NA = data<uint8_t>(owner, "owner", ScalarType::Byte, {args.N, args.A}, row);
  args.weight_NA = data<float>(weight, "weight", ScalarType::Float, {args.N, args.A}, row);
  const Guard guard(row.get_device_index());
  Tensor y = empty(row, {args.N, args.D}, ScalarType::BFloat16);
  args.y = static_cast<__nv_bfloat16*>(y.data_ptr());
  check_launch(moe::combine(args, current_stream(row)), "moe_combine");
  return y;
}

Tensor moe_send_weighted(Tensor dy, Tensors rows, Tensors d_rows, Tensor row, Tensor owner, Tensor weight, Tensor source) {
  STD_TORCH_CHECK(rows.size() == d_rows.size(), "moe_send_weighted: rows and d_rows per rank");
  moe::SendWeighted args{};
  args.dy = data<__nv_bfloat16>(dy, "dy", ScalarType::BFloat16, {kAny, kAny}, dy);
  args.N = dy.size(0), args.D = int(dy.size(1)), args.A = int(row.size(1));
  args.rows = peers<const __nv_bfloat16>(rows, "rows", ScalarType::BFloat16, args.D);
  args.d_rows = peers<__nv_bfloat16>(d_rows, "d_rows", ScalarType::BFloat16, args.D);
  args.row_NA = data<int32_t>(row, "row", ScalarType::Int, {args.N, args.A}, dy);
  args.owner_NA = data<uint8_t>(owner, "owner", ScalarType::Byte, {args.N, args.A}, dy);
  args.weight_NA = data<float>(weight, "weight", ScalarType::Float, {args.N, args.A}, dy);
  args.source_NA = data<uint8_t>(source, "source", ScalarType::Byte, {args.N, args.A}, dy);
  const Guard guard(dy.get_device_index());
  Tensor d_weight = empty(dy, {args.N, args.A}, ScalarType::Float);
  args.d_weight = static_cast<float*>(d_weight.data_ptr());
  check_launch(moe::send_weighted(args, current_stream(dy)), "moe_send_weighted");
  return d_weight;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megamoe, m) {
  m.def("attn_res_mix_fwd(Tensor[] rows, Tensor u, float eps) -> (Tensor, Tensor)");
  m.def("attn_res_mix_bwd(Tensor d_out, Tensor[] rows, Tensor u, Tensor rv, int wanted) -> (Tensor[], Tensor)");
  m.def("moe_route(Tensor logits, Tensor bias, Tensor? real, int A, float scale, bool select_on_logits) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("moe_route_bwd(Tensor d_weight, Tensor logits, Tensor idx, float scale) -> Tensor");
  m.def("moe_histogram(Tensor logits, Tensor bias, Tensor cutoff, Tensor? real, int bins) -> Tensor");
  m.def("moe_plan(Tensor count, int P) -> (Tensor, Tensor)");
  m.def("moe_count(Tensor idx, int E) -> (Tensor, Tensor, Tensor)");
  m.def("moe_place(Tensor idx, Tensor weight, Tensor counts_PE, int me, Tensor chunk, Tensor rank) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("moe_share_counts(Tensor line, Tensor(a!)[] counts, int me) -> ()");
  m.def("moe_meet(Tensor(a!)[] flags, int me, int epoch, float timeout_s, Tensor(b!) report) -> ()");
  m.def("moe_send(Tensor x, Tensor row, Tensor owner, Tensor(a!)[] rows, Tensor(b!)[] copy_of) -> ()");
  m.def("moe_expand(Tensor(a!) rows, Tensor copy_of, Tensor received) -> ()");
  m.def("moe_zero_rest(Tensor(a!) rows, Tensor received) -> ()");
  m.def("moe_combine(Tensor[] rows, Tensor row, Tensor owner, Tensor? weight) -> Tensor");
  m.def("moe_send_weighted(Tensor dy, Tensor[] rows, Tensor(a!)[] d_rows, Tensor row, Tensor owner, Tensor weight, Tensor source) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CUDA, m) {
  m.impl("attn_res_mix_fwd", TORCH_BOX(&attn_res_mix_fwd));
  m.impl("attn_res_mix_bwd", TORCH_BOX(&attn_res_mix_bwd));
  m.impl("moe_route", TORCH_BOX(&moe_route));
  m.impl("moe_route_bwd", TORCH_BOX(&moe_route_bwd));
  m.impl("moe_histogram", TORCH_BOX(&moe_histogram));
  m.impl("moe_plan", TORCH_BOX(&moe_plan));
  m.impl("moe_count", TORCH_BOX(&moe_count));
  m.impl("moe_place", TORCH_BOX(&moe_place));
  m.impl("moe_share_counts", TORCH_BOX(&moe_share_counts));
  m.impl("moe_meet", TORCH_BOX(&moe_meet));
  m.impl("moe_send", TORCH_BOX(&moe_send));
  m.impl("moe_expand", TORCH_BOX(&moe_expand));
  m.impl("moe_zero_rest", TORCH_BOX(&moe_zero_rest));
  m.impl("moe_combine", TORCH_BOX(&moe_combine));
  m.impl("moe_send_weighted", TORCH_BOX(&moe_send_weighted));
}
