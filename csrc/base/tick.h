// Progress during a computation: long kernels call tick() between pieces of their work, and a transport that has to be
// called for bytes to move registers as listener. A separate thread would take the core from the kernel.
#pragma once

namespace distopt {

// nullptr without a listener. Any thread may call it at any time, without Python's lock; it must not throw.
extern void (*tick_listener)();

// No inline function of external linkage, for the reason that base/isa.h gives.
static inline void tick() {
  if (auto listener = __atomic_load_n(&tick_listener, __ATOMIC_ACQUIRE)) listener();
}

}  // namespace distopt
