// The instruction set of the kernels: detected once; tests can override it.
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

// The kernels of a family, for float and for double.
template <template <class> class Table>
struct Both {
  Table<float> f32;
  Table<double> f64;
};

}  // namespace distopt

// A kernel family declares `struct FooKernels { function pointers };` and DISTOPT_DECLARE_KERNELS(FooKernels,
// foo_kernels) in its header, which gives distopt::foo_kernels(), the table of the current set. A source that
// CMakeLists.txt compiles once per set defines `const FooKernels& foo_kernels()` inside namespace distopt::DISTOPT_ISA.
// Static: the linker keeps one copy of an inline function, perhaps with instructions that the
// processor lacks.
#if defined(__x86_64__)
#define DISTOPT_DECLARE_KERNELS(Table, name)                   \
  namespace portable {                                         \
  const Table& name();                                         \
  }                                                            \
  namespace avx2 {                                             \
  const Table& name();                                         \
  }                                                            \
  namespace avx512 {                                           \
  const Table& name();                                         \
  }                                                            \
  static inline const Table& name() {                          \
    const Isa isa = current_isa();                             \
    if (isa == Isa::avx512) return avx512::name();             \
    return isa == Isa::avx2 ? avx2::name() : portable::name(); \
  }
#else
#define DISTOPT_DECLARE_KERNELS(Table, name) \
  namespace portable {                       \
  const Table& name();                       \
  }                                          \
  static inline const Table& name() { return portable::name(); }
#endif
