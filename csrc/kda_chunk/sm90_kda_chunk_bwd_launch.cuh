// KDA backward on the host: workspace layout, passes over groups of heads, the order of launches.
//
// Independent of how a kernel is started (a CUDA stream, or the CPU emulation), so both run the same plan.
#pragma once
#include "sm90_kda_chunk_bwd_grad.cuh"
#include "sm90_kda_chunk_bwd_prep.cuh"
#include "sm90_kda_chunk_bwd_scan.cuh"

namespace megamoe::kda_bwd {

struct Plan {
  int max_chunks, heads, num_sms;  // heads of one pass
  size_t doc_chunk, chunks, da_part, dbias_part, ke, kg, qg, a, p, vt, s, ds, decay, bytes;
};

// A scan pass has 2 directions x kScanSplits blocks a head: passes are as many heads as fill the SMs once, evenly split.
// The workspace is that of one pass, so its size does not grow with the number of heads.
inline Plan make_plan(int64_t num_tokens, int num_heads, int num_docs, int num_sms) {
  Plan plan;
  plan.num_sms = num_sms;
  const int most = num_sms / (2 * kScanSplits) > 1 ? num_sms / (2 * kScanSplits) : 1;
  const int passes = (num_heads + most - 1) / most;
  plan.heads = (num_heads + passes - 1) / passes;
  plan.max_chunks = static_cast<int>(num_tokens / kChunk) + num_docs;
  size_t at = 0;
  auto take = [&at](size_t bytes) {
    size_t here = at;
    at += (bytes + 255) / 256 * 256;
    return here;
  };
  const size_t n = plan.max_chunks, images = n * plan.heads;
  plan.doc_chunk = take((num_docs + 1) * sizeof(int)), plan.chunks = take(n * sizeof(int4));
  plan.da_part = take(n * num_heads * sizeof(float)), plan.dbias_part = take(n * num_heads * kDim * sizeof(float));
  plan.ke = take(images * kImage128), plan.kg = take(images * kImage128), plan.qg = take(images * kImage128), plan.vt = take(images * kImage128);
  plan.a = take(images * kImage64), plan.p = take(images * kImage64);
  plan.s = take(images * kImageState), plan.ds = take(images * kImageState), plan.decay = take(images * kDim * sizeof(float));
  plan.bytes = at;
  return plan;
}

// launch(kernel, blocks, threads, shared bytes, args)
template <class Launch>
inline void run(Args args, const Plan& plan, void* workspace, Launch launch) {
  unsigned char* w = static_cast<unsigned char*>(workspace);
  args.max_chunks = plan.max_chunks;
  args.doc_chunk = reinterpret_cast<int*>(w + plan.doc_chunk), args.chunks = reinterpret_cast<int4*>(w + plan.chunks);
  args.da_part = reinterpret_cast<float*>(w + plan.da_part), args.dbias_part = reinterpret_cast<float*>(w + plan.dbias_part);
  args.ke = w + plan.ke, args.kg = w + plan.kg, args.qg = w + plan.qg, args.vt = w + plan.vt, args.a = w + plan.a, args.p = w + plan.p;
  args.s = w + plan.s, args.ds = w + plan.ds, args.decay = reinterpret_cast<float*>(w + plan.decay);
  launch(sm90_kda_bwd_meta, 1u, kMetaThreads, size_t{2 * kMetaThreads * sizeof(int)}, args);
  for (int head = 0; head < args.num_heads; head += plan.heads) {
    args.head0 = head, args.heads = args.num_heads - head < plan.heads ? args.num_heads - head : plan.heads;
    const unsigned chunk_blocks = static_cast<unsigned>(plan.max_chunks) * args.heads;
    launch(sm90_kda_bwd_prep, chunk_blocks, kPrepThreads, size_t{PrepSmem::bytes}, args);
    launch(sm90_kda_bwd_scan, static_cast<unsigned>(2 * kScanSplits) * args.heads * args.num_docs, kScanThreads, size_t{ScanSmem::bytes}, args);
    launch(sm90_kda_bwd_grad, chunk_blocks < static_cast<unsigned>(plan.num_sms) ? chunk_blocks : plan.num_sms, kGradThreads, size_t{GradSmem::bytes}, args);
  }
  launch(sm90_kda_bwd_sum, static_cast<unsigned>(args.num_heads), kSumThreads, size_t{(kSumThreads + 8) * sizeof(float)}, args);
}

}  // namespace megamoe::kda_bwd
