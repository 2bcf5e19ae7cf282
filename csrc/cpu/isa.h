// Lists the instruction sets that this build has kernels for, and sets the one in use. No kernel and no tensor here.
#pragma once
#include <string>
#include <vector>

#include "contrast.h"

namespace fastcl {

std::vector<const Isa*> compiled_isas();  // slowest first
std::vector<const Isa*> usable_isas();    // those of compiled_isas() that this processor supports, slowest first
const Isa& active_isa();  // the last of usable_isas() that pays here, unless FASTCL_ISA or set_isa chose another
// Whether neither FASTCL_ISA nor set_isa chose: host code may then use slower kernels where they suit the problem
// better.
bool isa_is_automatic();
// Takes a name of usable_isas() or "auto", and returns the previous choice in the same form. Any other name is a
// std::invalid_argument that lists the choices.
std::string set_isa(const std::string& name);

}  // namespace fastcl
