#include "base/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <stdexcept>

#include "base/tick.h"

namespace distopt {

void (*tick_listener)() = nullptr;

namespace {

#if defined(__x86_64__)
// XCR0: the registers that the operating system saves when it switches threads. Instructions on others are illegal.
unsigned saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Not __builtin_cpu_supports: in builds by Zig's Clang, which are the wheels, it finds no set at all.
Isa detect() {
  constexpr unsigned ymm = 0x6, zmm = 0xe6;  // with the registers that they extend, and the masks
  constexpr unsigned avx2_1c = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  constexpr unsigned avx512_7b = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const auto all = [](unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, avx2_1c) || !all(saved_registers(), ymm)) return Isa::portable;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !all(b, bit_AVX2)) return Isa::portable;
  return all(b, avx512_7b) && all(saved_registers(), zmm) ? Isa::avx512 : Isa::avx2;
}
#elif defined(__aarch64__)
Isa detect() { return Isa::neon; }  // part of every such processor; the portable set uses its registers, too
#else
Isa detect() { return Isa::portable; }
#endif

#define DISTOPT_NAME_SET(set, ...) #set,
constexpr const char* set_names[] = {DISTOPT_SETS(DISTOPT_NAME_SET, )};

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

std::string isa_name(Isa isa) { return set_names[static_cast<int>(isa)]; }

std::vector<std::string> supported_isas() { return {set_names, set_names + 1 + static_cast<int>(best_isa())}; }

void set_isa(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i)
    if (set_names[i] == name) return chosen().store(static_cast<Isa>(i));
  throw std::invalid_argument("this processor does not run the instruction set '" + name + "'");
}

}  // namespace distopt
