// The instruction sets this build has kernels for, and the one in use. No kernel and no tensor here.
#pragma once
#include <string>
#include <vector>

#include "contrast.h"

namespace fastcl {

std::vector<const Isa*> compiled_isas();       // slowest first
std::vector<const Isa*> usable_isas();         // those this processor runs
const Isa& active_isa();                       // the fastest usable one, unless FASTCL_ISA or set_isa chose another
bool isa_is_automatic();                       // nobody chose: host code may take a lesser one where that is faster
std::string set_isa(const std::string& name);  // returns the choice before, "auto" where there was none, and takes it
                                               // too; std::invalid_argument names the choices

}  // namespace fastcl
