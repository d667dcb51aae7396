// KDA backward on the host: workspace layout, passes over groups of heads, the order of launches.
//
// Independent of how a kernel is started (a CUDA stream, or the CPU emulation), so both run the same plan.
#pragma once
#include "sm90_kda_chunk_bwd_grad.cuh"
#include "sm90_kda_chunk_bwd_prep.cuh"
#include "sm90_kda_chunk_bwd_scan.cuh"

namespace megamoe::kda_bwd {

struct Plan {
  int max_chunks, heads, num_sms, num_borders;  // heads of one pass
  size_t doc_chunk, chunks, da_part, dbias_part, ke, kg, qg, a, p, vt, s, ds, decay, borders, bytes;
};

// Cutting documents costs three more walks (S0, M, the reverse from zero) beside the two that write, each a little cheaper than those:
// the walks must have 2.4 times the SMs that 2 directions x kScanSplits blocks a head fill, and 2.75 leaves a gain. A function of H and
// the device alone: a choice that saw T would let appended tokens change earlier bits.
inline bool segmented(int num_heads, int num_sms) { return num_heads > 0 && num_sms >= 11 * num_heads; }

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
  plan.num_borders = segmented(num_heads, num_sms) ? static_cast<int>(num_tokens / kSegment) : 0;
  plan.borders = take(size_t(plan.num_borders) * num_heads * 4 * kDim * kDim * sizeof(float));
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
  args.borders = reinterpret_cast<float*>(w + plan.borders), args.num_borders = plan.num_borders;
  args.s = w + plan.s, args.ds = w + plan.ds, args.decay = reinterpret_cast<float*>(w + plan.decay);
  launch(sm90_kda_bwd_meta, 1u, kMetaThreads, size_t{2 * kMetaThreads * sizeof(int)}, args);
  for (int head = 0; head < args.num_heads; head += plan.heads) {
    args.head0 = head, args.heads = args.num_heads - head < plan.heads ? args.num_heads - head : plan.heads;
    const unsigned chunk_blocks = static_cast<unsigned>(plan.max_chunks) * args.heads;
    launch(sm90_kda_bwd_prep, chunk_blocks, kPrepThreads, size_t{PrepSmem::bytes}, args);
    if (plan.num_borders) {
      launch(sm90_kda_bwd_scan<true>, static_cast<unsigned>(3 * kScanSplits) * args.heads * plan.num_borders, kScanThreads, size_t{ScanSmem::bytes}, args);
      launch(sm90_kda_bwd_chain, 2u * (kDim / kda::kChainColumns) * args.heads, kda::kChainThreads, size_t{0}, args);
    }
    launch(sm90_kda_bwd_scan<false>, static_cast<unsigned>(2 * kScanSplits) * args.heads * (args.num_docs + plan.num_borders), kScanThreads, size_t{ScanSmem::bytes}, args);
    launch(sm90_kda_bwd_grad, chunk_blocks < static_cast<unsigned>(plan.num_sms) ? chunk_blocks : plan.num_sms, kGradThreads, size_t{GradSmem::bytes}, args);
  }
  launch(sm90_kda_bwd_sum, static_cast<unsigned>(args.num_heads), kSumThreads, size_t{(kSumThreads + 8) * sizeof(float)}, args);
}

}  // namespace megamoe::kda_bwd
