// The one file that knows torch: schemas, host checks, allocation, the current stream.
//
// Written against LibTorch's stable ABI with 2.11 as its target, and Python's limited API: one binary loads on torch 2.11
// and every newer one, and this file compiles in seconds. Kernels are called through the plain-pointer headers of each op.
// Fakes and autograd stand beside the Python wrappers (megamoe/ops/<op>/cuda.py).
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kda_chunk/kda_chunk.h"
#include "kda_decode/kda_decode.h"

// Declared by torch's headers for CUDA builds only and absent from a CPU build of torch; weak, so that the extension, its
// schemas and its fakes load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

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

void check(const Tensor& tensor, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name, ": expected a tensor on q's CUDA device");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": unexpected dtype");
  STD_TORCH_CHECK(tensor.dim() == int64_t(sizes.size()), name, ": unexpected number of dimensions");
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(tensor.size(dim) == size, name, ": dimension ", dim, " is ", tensor.size(dim), ", expected ", size);
    ++dim;
  }
}

// An optional contiguous tensor as a pointer.
template <typename T>
const T* pointer(const OptionalTensor& tensor, const char* name, ScalarType dtype, std::initializer_list<int64_t> sizes, const Tensor& like) {
  if (!tensor.has_value()) return nullptr;
  check(*tensor, name, dtype, sizes, like);
  STD_TORCH_CHECK(tensor->is_contiguous(), name, ": expected a contiguous tensor");
  return static_cast<const T*>(tensor->data_ptr());
}

void check_aligned(const void* pointer, const char* name) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, name, ": expected a start on a 16-byte boundary, a view inside another tensor may lie off it: clone it");
}

// ---- kda_chunk

namespace kda = megamoe::kda;

kda::View view(const Tensor& tensor, const char* name, int64_t T, int64_t H, const Tensor& like) {
  check(tensor, name, ScalarType::BFloat16, {T, H, kda::kWidth}, like);
  const int64_t stride_t = tensor.stride(0), stride_h = tensor.stride(1);
  STD_TORCH_CHECK(tensor.stride(2) == 1 && stride_t % 8 == 0 && stride_h % 8 == 0 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, name,
                  ": expected a contiguous last dimension, strides that are multiples of 8 and a 16-byte aligned start");
  return {static_cast<const __nv_bfloat16*>(tensor.data_ptr()), stride_t, stride_h};
}

kda::Inputs kda_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& a_log, const OptionalTensor& dt_bias,
                       const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, double lower_bound, double scale) {
  STD_TORCH_CHECK(q.dim() == 3, "q: expected (T, H, 128)");
  const int64_t T = q.size(0), H = q.size(1);
  STD_TORCH_CHECK(lower_bound >= -5.0 && lower_bound < 0.0, "lower_bound ", lower_bound, " is outside [-5, 0)");
  STD_TORCH_CHECK(T < (int64_t(1) << 31), "T: more than 2^31 - 1 tokens in one stream");
  int64_t N = 1;
  if (cu_seqlens.has_value()) {
    STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 2, "cu_seqlens: expected (N + 1,) with N >= 1");
    N = cu_seqlens->size(0) - 1;
  }
  const bool bf16_beta = beta.scalar_type() == ScalarType::BFloat16;
  check(beta, "beta", bf16_beta ? ScalarType::BFloat16 : ScalarType::Float, {T, H}, q);
  kda::Inputs in{};
  in.q = view(q, "q", T, H, q);
  in.k = view(k, "k", T, H, q);
  in.v = view(v, "v", T, H, q);
  in.g = view(g, "g", T, H, q);
  in.beta = beta.data_ptr();
  in.beta_stride_t = beta.stride(0);
  in.beta_stride_h = beta.stride(1);
  in.beta_is_bf16 = bf16_beta;
  in.a_log = pointer<float>(a_log, "A_log", ScalarType::Float, {H}, q);
  in.dt_bias = pointer<float>(dt_bias, "dt_bias", ScalarType::Float, {H, kda::kWidth}, q);
  check_aligned(in.dt_bias, "dt_bias");
  in.initial_state = pointer<float>(initial_state, "initial_state", ScalarType::Float, {N, H, kda::kWidth, kda::kWidth}, q);
  in.cu_seqlens = pointer<int32_t>(cu_seqlens, "cu_seqlens", ScalarType::Int, {N + 1}, q);
  in.T = T;
  in.H = int(H);
  in.N = int(N);
  in.lower_bound = float(lower_bound);
  in.scale = float(scale);
  return in;
}

std::tuple<Tensor, Tensor> kda_chunk_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor a_log, OptionalTensor dt_bias, OptionalTensor initial_state,
                                         OptionalTensor cu_seqlens, double lower_bound, double scale, bool output_final_state) {
  kda::Forward args{};
  args.in = kda_inputs(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, lower_bound, scale);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const int64_t T = args.in.T, H = args.in.H, N = args.in.N, W = kda::kWidth;
  Tensor o = empty(q, {T, H, W}, ScalarType::BFloat16);
  Tensor final_state = output_final_state ? empty(q, {N, H, W, W}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  args.o = static_cast<__nv_bfloat16*>(o.data_ptr());
  args.final_state = output_final_state ? static_cast<float*>(final_state.data_ptr()) : nullptr;
  args.num_sms = num_sms(q);
  Tensor workspace = empty(q, {int64_t(kda::forward_workspace_bytes(T, H, N, args.num_sms))}, ScalarType::Byte);
  args.workspace = workspace.data_ptr();
  check_launch(kda::forward(args, current_stream(q)), "kda_chunk_fwd");
  return {o, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_chunk_bwd(Tensor d_o, OptionalTensor d_final_state, Tensor q, Tensor k, Tensor v, Tensor g,
                                                                                         Tensor beta, Tensor a_log, OptionalTensor dt_bias, OptionalTensor initial_state,
                                                                                         OptionalTensor cu_seqlens, double lower_bound, double scale) {
  kda::Backward args{};
  args.in = kda_inputs(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, lower_bound, scale);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const int64_t T = args.in.T, H = args.in.H, N = args.in.N, W = kda::kWidth;
  args.d_o = view(d_o, "d_o", T, H, q);
  args.d_final_state = pointer<float>(d_final_state, "d_final_state", ScalarType::Float, {N, H, W, W}, q);
  Tensor d_q = empty(q, {T, H, W}, ScalarType::BFloat16), d_k = empty(q, {T, H, W}, ScalarType::BFloat16);
  Tensor d_v = empty(q, {T, H, W}, ScalarType::BFloat16), d_g = empty(q, {T, H, W}, ScalarType::BFloat16);
  Tensor d_beta = empty(q, {T, H}, beta.scalar_type()), d_a_log = empty(q, {H}, ScalarType::Float);
  Tensor d_dt_bias = dt_bias.has_value() ? empty(q, {H, W}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  Tensor d_initial_state = initial_state.has_value() ? empty(q, {N, H, W, W}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  args.d_q = static_cast<__nv_bfloat16*>(d_q.data_ptr());
  args.d_k = static_cast<__nv_bfloat16*>(d_k.data_ptr());
  args.d_v = static_cast<__nv_bfloat16*>(d_v.data_ptr());
  args.d_g = static_cast<__nv_bfloat16*>(d_g.data_ptr());
  args.d_beta = d_beta.data_ptr();
  args.d_a_log = static_cast<float*>(d_a_log.data_ptr());
  args.d_dt_bias = dt_bias.has_value() ? static_cast<float*>(d_dt_bias.data_ptr()) : nullptr;
  args.d_initial_state = initial_state.has_value() ? static_cast<float*>(d_initial_state.data_ptr()) : nullptr;
  args.num_sms = num_sms(q);
  Tensor workspace = empty(q, {int64_t(kda::backward_workspace_bytes(T, H, N, args.num_sms))}, ScalarType::Byte);
  args.workspace = workspace.data_ptr();
  check_launch(kda::backward(args, current_stream(q)), "kda_chunk_bwd");
  return {d_q, d_k, d_v, d_g, d_beta, d_a_log, d_dt_bias, d_initial_state};
}

// ---- kda_decode

Tensor kda_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor a_log, OptionalTensor dt_bias, OptionalTensor slots, double lower_bound,
                  double scale) {
  STD_TORCH_CHECK(q.dim() == 3, "q: expected (B, H, 128)");
  STD_TORCH_CHECK(lower_bound >= -5.0 && lower_bound < 0.0, "lower_bound ", lower_bound, " is outside [-5, 0)");
  const int64_t B = q.size(0), H = q.size(1), W = kda::kWidth;
  kda::Decode args{};
  args.q = view(q, "q", B, H, q);
  args.k = view(k, "k", B, H, q);
  args.v = view(v, "v", B, H, q);
  args.g = view(g, "g", B, H, q);
  args.beta_is_bf16 = beta.scalar_type() == ScalarType::BFloat16;
  check(beta, "beta", args.beta_is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, {B, H}, q);
  args.beta = beta.data_ptr();
  args.beta_stride_b = beta.stride(0);
  args.beta_stride_h = beta.stride(1);
  args.a_log = pointer<float>(a_log, "A_log", ScalarType::Float, {H}, q);
  args.dt_bias = pointer<float>(dt_bias, "dt_bias", ScalarType::Float, {H, W}, q);
  args.slots = pointer<int32_t>(slots, "slots", ScalarType::Int, {B}, q);
  STD_TORCH_CHECK(state.dim() == 4 && (slots.has_value() || state.size(0) >= B), "state: expected (S, H, 128, 128), a row for each sequence");
  args.states = const_cast<float*>(pointer<float>(state, "state", ScalarType::Float, {state.size(0), H, W, W}, q));
  check_aligned(args.states, "state");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor o = empty(q, {B, H, W}, ScalarType::BFloat16);
  args.o = static_cast<__nv_bfloat16*>(o.data_ptr());
  args.B = B;
  args.H = int(H);
  args.lower_bound = float(lower_bound);
  args.scale = float(scale);
  check_launch(kda::decode(args, current_stream(q)), "kda_decode");
  return o;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megamoe, m) {
  m.def(
      "kda_chunk_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, "
      "float lower_bound, float scale, bool output_final_state) -> (Tensor, Tensor)");
  m.def(
      "kda_chunk_bwd(Tensor d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor? dt_bias, "
      "Tensor? initial_state, Tensor? cu_seqlens, float lower_bound, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "kda_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor A_log, Tensor? dt_bias, Tensor? slots, float lower_bound, "
      "float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CUDA, m) {
  m.impl("kda_chunk_fwd", TORCH_BOX(&kda_chunk_fwd));
  m.impl("kda_chunk_bwd", TORCH_BOX(&kda_chunk_bwd));
  m.impl("kda_decode", TORCH_BOX(&kda_decode));
}

// `import megamoe._C` loads the library, which registers the ops above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
