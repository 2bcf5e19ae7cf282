// Declares the functions of LibTorch's stable C ABI (torch >= 2.11) that fastcl calls, and a few RAII types on top of
// them. Building needs no torch: the symbols are resolved from the torch that the process has loaded.
// tests/core/check_shim.cpp compiles this file beside torch's own headers, where a differing signature is a compile
// error. Nothing here may know what an op computes.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;

#define FASTCL_SHIM __attribute__((__visibility__("default")))
extern "C" {
FASTCL_SHIM int32_t aoti_torch_device_type_cpu();
FASTCL_SHIM int32_t aoti_torch_device_type_cuda();
FASTCL_SHIM int32_t aoti_torch_dtype_uint8();
FASTCL_SHIM int32_t aoti_torch_dtype_float32();
FASTCL_SHIM int32_t aoti_torch_dtype_float64();
FASTCL_SHIM int32_t aoti_torch_dtype_bfloat16();
FASTCL_SHIM int32_t aoti_torch_dtype_float16();
FASTCL_SHIM int32_t aoti_torch_dtype_int32();
FASTCL_SHIM int32_t aoti_torch_dtype_int64();
FASTCL_SHIM AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
FASTCL_SHIM AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void**);
FASTCL_SHIM AOTITorchError torch_get_const_data_ptr(AtenTensorHandle, const void**);
FASTCL_SHIM AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_size(AtenTensorHandle, int64_t, int64_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle, int64_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle, int64_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t*);
FASTCL_SHIM AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t*);
FASTCL_SHIM AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle, bool*);
FASTCL_SHIM AOTITorchError aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                                                    AtenTensorHandle*);
FASTCL_SHIM AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle*);
FASTCL_SHIM AOTITorchError torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);
FASTCL_SHIM AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                                        TorchLibraryHandle*);
FASTCL_SHIM AOTITorchError torch_library_impl(TorchLibraryHandle, const char*,
                                              void (*)(StableIValue*, uint64_t, uint64_t), uint64_t);
FASTCL_SHIM void aoti_torch_check(bool, const char*, const char*, uint32_t, const char*);
FASTCL_SHIM AOTITorchError torch_get_num_threads(uint32_t*);
FASTCL_SHIM AOTITorchError torch_parallel_for(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
FASTCL_SHIM AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*);
FASTCL_SHIM AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle);
// Defined in libtorch_cuda, which a CPU build of torch lacks; only the CUDA module may call it.
FASTCL_SHIM AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
}

namespace fastcl {

inline void torch_ok(AOTITorchError error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string("fastcl: LibTorch call failed: ") + call);
}
#define FASTCL_OK(call) ::fastcl::torch_ok((call), #call)

// Owns one tensor handle.
class Tensor {
 public:
  explicit Tensor(StableIValue value) { std::memcpy(&handle_, &value, sizeof handle_); }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  static Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype,
                      int32_t device_type = aoti_torch_device_type_cpu(), int32_t device_index = 0) {
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= sizes.begin()[i];
    }
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype, device_type,
                                 device_index, &handle) != 0) {
      // Sizes and types are right by then; torch's own message does not come through.
      throw std::runtime_error("fastcl: out of memory: no room for a result of " + std::to_string(stride) + " numbers");
    }
    return Tensor(handle);
  }

  template <class T>
  const T* read() const {
    const void* p = nullptr;
    FASTCL_OK(torch_get_const_data_ptr(handle_, &p));
    return static_cast<const T*>(p);
  }
  template <class T>
  T* write() const {
    void* p = nullptr;
    FASTCL_OK(aoti_torch_get_data_ptr(handle_, &p));
    return static_cast<T*>(p);
  }
  int64_t dim() const {
    int64_t v = 0;
    FASTCL_OK(aoti_torch_get_dim(handle_, &v));
    return v;
  }
  int64_t size(int64_t d) const {
    int64_t v = 0;
    FASTCL_OK(aoti_torch_get_size(handle_, d, &v));
    return v;
  }
  // Bytes of the tensor's storage. They may be fewer than the shape needs: FSDP, for one, frees storages of live
  // tensors.
  int64_t storage_bytes() const {
    int64_t v = 0;
    FASTCL_OK(aoti_torch_get_storage_size(handle_, &v));
    return v;
  }
  int64_t storage_offset() const {  // in elements
    int64_t v = 0;
    FASTCL_OK(aoti_torch_get_storage_offset(handle_, &v));
    return v;
  }
  int32_t dtype() const {
    int32_t v = 0;
    FASTCL_OK(aoti_torch_get_dtype(handle_, &v));
    return v;
  }
  int32_t device_type() const {
    int32_t v = 0;
    FASTCL_OK(aoti_torch_get_device_type(handle_, &v));
    return v;
  }
  int32_t device_index() const {
    int32_t v = 0;
    FASTCL_OK(aoti_torch_get_device_index(handle_, &v));
    return v;
  }
  bool contiguous() const {
    bool v = false;
    FASTCL_OK(aoti_torch_is_contiguous(handle_, &v));
    return v;
  }
  // A second handle to the same tensor.
  Tensor share() const {
    AtenTensorHandle handle = nullptr;
    FASTCL_OK(aoti_torch_new_tensor_handle(handle_, &handle));
    return Tensor(handle);
  }
  StableIValue release() {
    StableIValue value = 0;
    AtenTensorHandle handle = std::exchange(handle_, nullptr);
    std::memcpy(&value, &handle, sizeof handle);
    return value;
  }

 private:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  AtenTensorHandle handle_ = nullptr;
};

inline double to_double(StableIValue value) {
  double x = 0;
  std::memcpy(&x, &value, sizeof x);
  return x;
}

inline bool to_bool(StableIValue value) { return (value & 0xff) != 0; }

inline int64_t threads() {
  uint32_t count = 1;
  FASTCL_OK(torch_get_num_threads(&count));
  return count;
}

// Calls f(begin, end) on torch's threads. f must not throw: the message would be lost in the C ABI.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  FASTCL_OK(torch_parallel_for(
      begin, end, grain, [](int64_t b, int64_t e, void* context) { (*static_cast<const F*>(context))(b, e); },
      const_cast<void*>(static_cast<const void*>(&f))));
}

constexpr uint64_t kAbiVersion = (2ull << 56) | (11ull << 48);

inline StableIValue argument(const Tensor& t) { return t.share().release(); }
inline StableIValue argument(int64_t value) { return static_cast<StableIValue>(value); }

// Calls an operator of torch that has one result: call("aten::mm", "out", a, b, c).
template <class... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  StableIValue stack[] = {argument(arguments)...};
  FASTCL_OK(torch_call_dispatcher(name, overload, stack, kAbiVersion));
  return Tensor(stack[0]);
}

using OpFunction = void (*)(StableIValue*, uint64_t, uint64_t);

// Whether the function threw; the message is then in `text`.
__attribute__((noinline)) inline bool failed(OpFunction function, StableIValue* stack, uint64_t inputs,
                                             uint64_t outputs, char (&text)[1024]) noexcept {
  try {
    function(stack, inputs, outputs);
    return false;
  } catch (const std::exception& error) {
    std::strncpy(text, error.what(), sizeof text - 1);
    text[sizeof text - 1] = '\0';
    return true;
  }
}

// An op as torch calls it, with the numbers of inputs and outputs that it reads and writes. No exception of ours may
// reach torch, which could not catch it where this library has a C++ runtime of its own (LLVM's beside torch's GNU,
// MinGW's beside Microsoft's). Torch throws one of its own instead, when the stack holds nothing of ours to unwind.
// Python declares the ops: a library of another version than the Python files would read past the stack.
template <OpFunction function, uint64_t reads, uint64_t writes>
void guarded(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  if (inputs != reads || outputs != writes) {
    aoti_torch_check(false, "fastcl", "fastcl", 0,
                     "fastcl: the compiled library is of another version than the Python files: build or install "
                     "fastcl again");
  }
  char text[1024];
  if (failed(function, stack, inputs, outputs, text)) aoti_torch_check(false, "fastcl", "fastcl", 0, text);
}

// Registers kernels for one dispatch key. The library handle is never freed: torch may call the kernels until the
// process ends.
inline bool register_ops(const char* key, std::initializer_list<std::pair<const char*, OpFunction>> ops) {
  TorchLibraryHandle library = nullptr;
  FASTCL_OK(aoti_torch_library_init_impl("fastcl", key, __FILE__, __LINE__, &library));
  for (const auto& [name, function] : ops) FASTCL_OK(torch_library_impl(library, name, function, kAbiVersion));
  return true;
}

}  // namespace fastcl
