// Stand-ins for the few names of the CUDA runtime that host code uses, where kernels run in the emulator: a stream is
// nothing, a launch is done when it returns, an error carries the emulator's own words.
#pragma once
#include <string>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

namespace emu {
inline std::string last_error;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess             ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : emu::last_error.c_str();
}
