// Where an op runs: torch's current device and stream, held for one call, and what of the machine the host code asks
// for. Allocates through torch; launches nothing but a fill.
#pragma once
#include "checks.h"
#include "cuda/runtime.h"

namespace fastcl::cuda {

inline void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastcl: CUDA: ") + cudaGetErrorString(error));
}

// Whether torch's settings let a float32 matrix product be made of one TF32 product.
bool tf32_allowed();

}  // namespace fastcl::cuda

#ifdef FASTCL_EMULATED
#include "emu_device.h"
#else

namespace fastcl::cuda {

constexpr const char* kDispatchKey = "CUDA";
// The logits that are in memory at once where there are too many features for one kernel: 32 MiB, which stay in the
// second-level cache, and more where that would be less than kChunkLines lines of them.
constexpr int64_t kChunkElements = int64_t{1} << 23;
constexpr int64_t kChunkLines = 64;
// Whether torch multiplies 16-bit matrices into a float32 one.
constexpr bool kWideProducts = true;

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) { FASTCL_OK(aoti_torch_create_device_guard(index, &handle_)); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(handle_); }

 private:
  DeviceGuardHandle handle_ = nullptr;
};

class Device {
 public:
  explicit Device(const Tensor& t) : index_(index_of(t)), guard_(index_) {
    ok(cudaSetDevice(index_));  // our runtime is linked statically: another one than torch's
    FASTCL_OK(aoti_torch_get_current_cuda_stream(index_, reinterpret_cast<void**>(&stream_)));
  }

  cudaStream_t stream() const { return stream_; }
  bool holds(const Tensor& t) const {
    return t.device_type() == aoti_torch_device_type_cuda() && t.device_index() == index_;
  }
  Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return Tensor::empty(sizes, dtype, aoti_torch_device_type_cuda(), index_);
  }
  int32_t multiprocessors() const {
    int count = 0;
    ok(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_));
    return count;
  }
  void fill_nan(const Tensor& t, int64_t bytes) const {
    ok(cudaMemsetAsync(t.write<void>(), 0xff, static_cast<size_t>(bytes), stream_));
  }

 private:
  static int32_t index_of(const Tensor& t) {
    check(t.device_type() == aoti_torch_device_type_cuda(), "query: expected a tensor on a CUDA device");
    return t.device_index();
  }

  int32_t index_;
  DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace fastcl::cuda
#endif
