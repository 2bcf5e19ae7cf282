// Chooses the instruction set at the first use: FASTCL_ISA if it is set, otherwise the fastest that the processor
// supports. Tests and benchmarks change the choice with set_isa.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace fastcl {

extern const Isa isa_baseline;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
#elif defined(__aarch64__)
extern const Isa isa_bf16;
#endif
#if defined(__x86_64__) && defined(__linux__)
extern const Isa isa_amx;
#endif

std::vector<const Isa*> compiled_isas() {
#if defined(__x86_64__) && defined(__linux__)
  return {&isa_baseline, &isa_avx2, &isa_avx512, &isa_amx};
#elif defined(__x86_64__)
  return {&isa_baseline, &isa_avx2, &isa_avx512};
#elif defined(__aarch64__)
  return {&isa_baseline, &isa_bf16};
#else
  return {&isa_baseline};
#endif
}

std::vector<const Isa*> usable_isas() {
  std::vector<const Isa*> usable;
  for (const Isa* isa : compiled_isas()) {
    if (isa->supported()) usable.push_back(isa);
  }
  return usable;
}

// Null stands for "auto". Throws std::invalid_argument for a name that is unknown or unusable here.
static const Isa* find(const std::string& name) {
  if (name == "auto") return nullptr;
  std::string choices = "auto";
  for (const Isa* isa : usable_isas()) {
    if (name == isa->name) return isa;
    choices += std::string(", ") + isa->name;
  }
  throw std::invalid_argument("FASTCL_ISA: expected one of " + choices +
                              " (compiled and supported by this processor), got " + name);
}

static std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa = [] {
    const char* wanted = std::getenv("FASTCL_ISA");
    return wanted != nullptr && *wanted != '\0' ? find(wanted) : nullptr;
  }();
  return isa;
}

const Isa& active_isa() {
  static const Isa* const fastest = usable_isas().back();
  const Isa* isa = chosen().load(std::memory_order_relaxed);
  return isa != nullptr ? *isa : *fastest;
}

bool isa_is_automatic() { return chosen().load(std::memory_order_relaxed) == nullptr; }

std::string set_isa(const std::string& name) {
  const Isa* before = chosen().exchange(find(name));
  return before != nullptr ? before->name : "auto";
}

}  // namespace fastcl
