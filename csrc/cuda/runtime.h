// CUDA's types for streams and errors: those of the CUDA runtime, or stand-ins where the emulator runs kernels on the
// CPU.
#pragma once
#ifdef FASTCL_EMULATED
#include "emu_runtime.h"
#else
#include <cuda_runtime_api.h>
#endif
