#include "base/isa.h"

#include <atomic>
#include <stdexcept>

#include "base/tick.h"

namespace distopt {

void (*tick_listener)() = nullptr;

namespace {

Isa detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::avx2;
#endif
  return Isa::portable;
}

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
