// Compiled, never run: every declaration of csrc/torch_shim.h must agree with torch's own headers, for a function
// declared twice with different types is a compile error. It must not include anything else of csrc.
#define USE_CUDA  // declares what only a CUDA build of torch has
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch_shim.h"
