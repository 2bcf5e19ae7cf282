// The Python module fastcl._C: lists the compiled instruction sets and switches between them. Must not handle tensors:
// the ops register themselves with torch when the module is loaded.
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
  fastcl::active_isa();  // reads FASTCL_ISA, so that a wrong value is an error of the import, not of the first loss
  m.def("compiled_isas", [] { return names(fastcl::compiled_isas()); });
  m.def("usable_isas", [] { return names(fastcl::usable_isas()); });
  m.def("active_isa", [] { return std::string(fastcl::active_isa().name); });
  m.def("set_isa", &fastcl::set_isa);
}
