// The Python module: build facts and control of the instruction set. Tensors do not pass through here; ops register
// themselves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/isa.h"

namespace {
std::vector<std::string> names(const std::vector<const fastcl::Isa*>& isas) {
  std::vector<std::string> out;
  for (const fastcl::Isa* isa : isas) out.emplace_back(isa->name);
  return out;
}
}  // namespace

PYBIND11_MODULE(_C, m) {
  fastcl::active_isa();  // a wrong FASTCL_ISA is reported at import, not at the first loss
  m.def("compiled_isas", [] { return names(fastcl::compiled_isas()); });
  m.def("usable_isas", [] { return names(fastcl::usable_isas()); });
  m.def("active_isa", [] { return std::string(fastcl::active_isa().name); });
  m.def("set_isa", &fastcl::set_isa);
}
