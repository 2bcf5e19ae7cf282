// Where an op runs: selects the device of a tensor and torch's current stream there for one call, and answers questions
// about the device. Allocates through torch; must not launch anything but a fill.
#pragma once
#include "checks.h"
#include "cuda/runtime.h"

namespace fastcl::cuda {

inline void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastcl: CUDA: ") + cudaGetErrorString(error));
}

// Whether torch's settings allow a float32 matrix product by one TF32 product.
bool tf32_allowed();

}  // namespace fastcl::cuda

#ifdef FASTCL_EMULATED
#include "emu_device.h"
#else

namespace fastcl::cuda {

constexpr const char* kDispatchKey = "CUDA";
// Logits of one chunk, where there are too many features for a walk: 32 MiB of float32, which stay in the second-level
// cache. A chunk has at least kChunkLines lines, even if they take more.
constexpr int64_t kChunkElements = int64_t{1} << 23;
constexpr int64_t kChunkLines = 64;
// Whether aten::mm can write the product of 16-bit matrices to a float32 matrix.
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
    ok(cudaSetDevice(index_));  // the guard sets torch's CUDA runtime; fastcl links a runtime of its own statically
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
