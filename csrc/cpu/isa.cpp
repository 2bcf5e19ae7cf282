// Chooses the instruction set at the first use: FASTCL_ISA if it is set, otherwise the fastest that the processor
// supports. Tests and benchmarks change the choice with set_isa.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/features_x86.h"

namespace fastcl {

extern const Isa isa_baseline;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
#if defined(FASTCL_AVX512_BF16)
extern const Isa isa_avx512_bf16;
#endif
#elif defined(__aarch64__)
extern const Isa isa_bf16;
#endif
#if defined(__x86_64__) && defined(__linux__)
extern const Isa isa_amx;
#endif

std::vector<const Isa*> compiled_isas() {
  std::vector<const Isa*> compiled{&isa_baseline};
#if defined(__x86_64__)
  compiled.insert(compiled.end(), {&isa_avx2, &isa_avx512});
#if defined(FASTCL_AVX512_BF16)
  compiled.push_back(&isa_avx512_bf16);
#endif
#if defined(__linux__)
  compiled.push_back(&isa_amx);
#endif
#elif defined(__aarch64__)
  compiled.push_back(&isa_bf16);
#endif
  return compiled;
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
  static const Isa* const fastest = [] {
    const Isa* found = &isa_baseline;
    for (const Isa* isa : usable_isas()) {
      if (isa->pays == nullptr || isa->pays()) found = isa;
    }
    return found;
  }();
  const Isa* isa = chosen().load(std::memory_order_relaxed);
  return isa != nullptr ? *isa : *fastest;
}

bool isa_is_automatic() { return chosen().load(std::memory_order_relaxed) == nullptr; }

std::string set_isa(const std::string& name) {
  const Isa* before = chosen().exchange(find(name));
  return before != nullptr ? before->name : "auto";
}

}  // namespace fastcl
