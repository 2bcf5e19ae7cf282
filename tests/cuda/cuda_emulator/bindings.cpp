// The launchers behind C names, for tests that load them with ctypes and run them on memory of the CPU.
#include "cuda/launch.h"
#include "cuda_emu.h"

using namespace fastcl::cuda;

extern "C" {

size_t forward_bytes(const Problem* p, const Outputs* o) { return forward_workspace(*p, *o); }
size_t backward_bytes(const Problem* p, const Gradients* g) { return backward_workspace(*p, *g); }
const char* run_forward(const Problem* p, const Outputs* o, void* workspace) {
  return cudaGetErrorString(forward(*p, *o, workspace, nullptr));
}
const char* run_backward(const Problem* p, const Gradients* g, void* workspace) {
  return cudaGetErrorString(backward(*p, *g, workspace, nullptr));
}
const char* run_forward_chunk(const Problem* p, const Outputs* o, const Chunk* c) {
  return cudaGetErrorString(forward_chunk(*p, *o, *c, nullptr));
}
const char* run_backward_chunk(const Problem* p, const Gradients* g, const Chunk* c) {
  return cudaGetErrorString(backward_chunk(*p, *g, *c, nullptr));
}
int64_t most_features(int32_t dtype) { return largest_features(static_cast<fastcl::DType>(dtype)); }
void set_schedule(uint64_t seed) { emu::seed = seed; }
uint64_t bank_conflicts() { return emu::stats.ldmatrix_phases - emu::stats.ldmatrix; }
uint64_t launches() { return emu::stats.launches; }
}
