// One C entry over the KDA decode step for tests that want no torch extension (see ../kda_chunk/sm90_kda_chunk_fwd_driver.cu).
#include "smxx_kda_decode.cu"

extern "C" int64_t kda_decode_struct_bytes() { return sizeof(megamoe::kda::Decode); }  // the caller lays the struct out itself
extern "C" int kda_decode(const megamoe::kda::Decode* args, void* stream) { return static_cast<int>(megamoe::kda::decode(*args, static_cast<cudaStream_t>(stream))); }
