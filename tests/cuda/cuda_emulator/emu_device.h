// The stand-in for csrc/cuda/device.h where kernels run in the emulator: the CPU's memory, under the CPU's dispatch key.
// Chunks are small, so that small problems have several.
#pragma once
#include <cstdlib>
#include <cstring>

namespace fastcl::cuda {

constexpr const char* kDispatchKey = "CPU";
constexpr int64_t kChunkElements = 2048;
constexpr int64_t kChunkLines = 16;
constexpr bool kWideProducts = false;

inline bool tf32_allowed() { return std::getenv("FASTCL_EMULATED_TF32") != nullptr; }

class Device {
 public:
  explicit Device(const Tensor&) {}

  cudaStream_t stream() const { return nullptr; }
  bool holds(const Tensor& t) const { return t.device_type() == aoti_torch_device_type_cpu(); }
  Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) const { return Tensor::empty(sizes, dtype); }
  int32_t multiprocessors() const { return 4; }
  void fill_nan(const Tensor& t, int64_t bytes) const {
    if (bytes != 0) std::memset(t.write<void>(), 0xff, static_cast<size_t>(bytes));
  }
};

}  // namespace fastcl::cuda
