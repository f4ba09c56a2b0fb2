// Which instruction set the kernels run on: detected once, overridable by tests.
#pragma once

#include <string>
#include <vector>

namespace distopt {

enum class Isa { portable, avx2, avx512 };

// The best set that both this build and this processor have.
Isa best_isa();
// The set in force; best_isa() unless set_isa() chose another.
Isa current_isa();
// Chooses one of supported_isas(); throws std::invalid_argument otherwise.
void set_isa(const std::string& name);
std::string isa_name(Isa isa);
std::vector<std::string> supported_isas();

}  // namespace distopt

// A kernel family declares `struct FooKernels { function pointers };` and, in foo_kernels.cpp, defines
// `const FooKernels& foo_kernels()` inside namespace distopt::DISTOPT_ISA. DISTOPT_DISPATCH(Foo, foo) in isa.cpp
// then gives distopt::foo_kernels(), the table of the current set.
#if defined(__x86_64__)
#define DISTOPT_DECLARE_KERNELS(Table, name) \
  namespace portable {                       \
  const Table& name();                       \
  }                                          \
  namespace avx2 {                           \
  const Table& name();                       \
  }                                          \
  namespace avx512 {                         \
  const Table& name();                       \
  }                                          \
  const Table& name();
#define DISTOPT_DISPATCH(Table, name) \
  const Table& name() {               \
    switch (current_isa()) {          \
      case Isa::avx512:               \
        return avx512::name();        \
      case Isa::avx2:                 \
        return avx2::name();          \
      default:                        \
        return portable::name();      \
    }                                 \
  }
#else
#define DISTOPT_DECLARE_KERNELS(Table, name) \
  namespace portable {                       \
  const Table& name();                       \
  }                                          \
  const Table& name();
#define DISTOPT_DISPATCH(Table, name) \
  const Table& name() { return portable::name(); }
#endif
