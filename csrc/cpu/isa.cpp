// Chooses the instruction set once at start-up; tests and benchmarks may change it.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace fastcl {

extern const Isa isa_baseline;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
extern const Isa isa_amx;
#endif

std::vector<const Isa*> compiled_isas() {
#if defined(__x86_64__)
  return {&isa_baseline, &isa_avx2, &isa_avx512, &isa_amx};
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

static const Isa* find(const std::string& name) {
  std::string choices;
  for (const Isa* isa : usable_isas()) {
    if (name == isa->name) return isa;
    choices += std::string(choices.empty() ? "" : ", ") + isa->name;
  }
  throw std::invalid_argument("FASTCL_ISA: expected one of " + choices +
                              " (compiled and supported by this processor), got " + name);
}

static std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa = [] {
    const char* wanted = std::getenv("FASTCL_ISA");
    return wanted != nullptr && *wanted != '\0' ? find(wanted) : usable_isas().back();
  }();
  return isa;
}

const Isa& active_isa() { return *active().load(std::memory_order_relaxed); }

std::string set_isa(const std::string& name) { return active().exchange(find(name))->name; }

}  // namespace fastcl
