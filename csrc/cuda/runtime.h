// CUDA's types for streams and errors: the real ones, or the emulator's stand-ins where kernels run on the CPU.
#pragma once
#ifdef FASTCL_EMULATED
#include "emu_runtime.h"
#else
#include <cuda_runtime_api.h>
#endif
