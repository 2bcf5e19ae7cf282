// Compiled, never run: every declaration of csrc/torch_shim.h must agree with torch's own headers, for a function
// declared twice with different types is a compile error. It must not include anything else of csrc.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch_shim.h"
