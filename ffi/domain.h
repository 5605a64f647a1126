// What the CUDA kernels can run, for Python: part of the module _cpu, which every machine has.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxconv {

void BindDomain(nanobind::module_& m);

}  // namespace jaxconv
