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
#else
Isa detect() { return Isa::portable; }
#endif

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

std::string isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
    if (isa <= best_isa()) names.push_back(isa_name(isa));
  return names;
}

void set_isa(const std::string& name) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (isa_name(isa) == name && isa <= best_isa()) {
      chosen().store(isa);
      return;
    }
  }
  throw std::invalid_argument("this processor does not run the instruction set '" + name + "'");
}

}  // namespace distopt
