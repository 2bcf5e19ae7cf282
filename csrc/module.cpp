// What Python asks of the library besides the ops: plain C functions for ctypes (fastcl/_kernels.py). No header of Python
// is used, so that one build serves every Python. Must not handle tensors: the ops register themselves with torch when
// the library is loaded.
#include <exception>
#include <string>

#include "cpu/isa.h"

#if defined(_WIN32)
#define FASTCL_EXPORT extern "C" __declspec(dllexport)
#else
#define FASTCL_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

thread_local std::string answer;  // what a function returned last, until the thread's next call

const char* names(const std::vector<const fastcl::Isa*>& isas) {
  answer.clear();
  for (const fastcl::Isa* isa : isas) answer += (answer.empty() ? "" : " ") + std::string(isa->name);
  return answer.c_str();
}

}  // namespace

// Names with a space between them, slowest instruction set first.
FASTCL_EXPORT const char* fastcl_compiled_isas() { return names(fastcl::compiled_isas()); }
FASTCL_EXPORT const char* fastcl_usable_isas() { return names(fastcl::usable_isas()); }

FASTCL_EXPORT const char* fastcl_active_isa() { return fastcl::active_isa().name; }

// The previous choice. `name` must be one of the usable sets or "auto".
FASTCL_EXPORT const char* fastcl_set_isa(const char* name) {
  answer = fastcl::set_isa(name);
  return answer.c_str();
}

// Null, or what is wrong with the environment variable FASTCL_ISA, which is read at the first use of any of these.
FASTCL_EXPORT const char* fastcl_refusal() {
  try {
    fastcl::active_isa();
    return nullptr;
  } catch (const std::exception& error) {
    answer = error.what();
    return answer.c_str();
  }
}
