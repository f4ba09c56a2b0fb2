// The instruction set of the kernels: detected once; tests can override it.
#pragma once

#include <string>
#include <vector>

namespace distopt {

// The sets that this build has, each better than those before it.
#if defined(__x86_64__)
#define DISTOPT_SETS(X, ...) X(portable, __VA_ARGS__) X(avx2, __VA_ARGS__) X(avx512, __VA_ARGS__)
#elif defined(__aarch64__)
#define DISTOPT_SETS(X, ...) X(portable, __VA_ARGS__) X(neon, __VA_ARGS__)
#else
#define DISTOPT_SETS(X, ...) X(portable, __VA_ARGS__)
#endif

#define DISTOPT_NAME_SET(set, ...) set,
enum class Isa { DISTOPT_SETS(DISTOPT_NAME_SET, ) };
#undef DISTOPT_NAME_SET

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
#define DISTOPT_DECLARE_IN_SET(set, Table, name) \
  namespace set {                                \
  const Table& name();                           \
  }
#define DISTOPT_TABLE_OF_SET(set, name) \
  case Isa::set:                        \
    return set::name();
#define DISTOPT_DECLARE_KERNELS(Table, name)                            \
  DISTOPT_SETS(DISTOPT_DECLARE_IN_SET, Table, name)                     \
  static inline const Table& name() {                                   \
    switch (current_isa()) { DISTOPT_SETS(DISTOPT_TABLE_OF_SET, name) } \
    __builtin_unreachable();                                            \
  }
