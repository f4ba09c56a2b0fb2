// The states that a rank keeps with its agent, which sends them to another node while the rank goes on: StateSlot.write
// of distopt/checkpoint/state_files.py, and Sender of distopt/launch/agents/courier.py. States that the agent takes for
// those of a step must be of that step. The words and the states are ordinary memory in the code; here they are
// relaxed, since they are read while they change.
#include "protocol.h"

enum { steps = 2, parts = 2 };

static Word valid;
static _Atomic uint64_t states[parts];

static void* writes(void* unused) {
  (void)unused;
  for (uint64_t step = 1; step <= steps; ++step) {
    atomic_store_explicit(&valid, 0, memory_order_relaxed);
    fence();
    for (int part = 0; part < parts; ++part) atomic_store_explicit(&states[part], step, memory_order_relaxed);
    fence();
    atomic_store_explicit(&valid, step, memory_order_relaxed);
  }
  return 0;
}

static void* sends(void* unused) {
  (void)unused;
  uint64_t sent[parts];
  const uint64_t step = atomic_load_explicit(&valid, memory_order_relaxed);
  if (step == 0) return 0;
  fence();
  for (int part = 0; part < parts; ++part) sent[part] = atomic_load_explicit(&states[part], memory_order_relaxed);
  fence();
  if (atomic_load_explicit(&valid, memory_order_relaxed) != step) return 0;
  for (int part = 0; part < parts; ++part) assert(sent[part] == step);
  return 0;
}

int main(void) {
  pthread_t threads[2];
  pthread_create(&threads[0], 0, writes, 0);
  pthread_create(&threads[1], 0, sends, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
}
