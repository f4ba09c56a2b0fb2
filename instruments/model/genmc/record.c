// The record of the first failure: Peers::fail on two ranks, and Peers::failure on a third.
#include "protocol.h"

static _Atomic uint32_t state;
static int text;
static const uint32_t record_valid = UINT32_MAX;

static void failure(void) {
  __VERIFIER_assume(atomic_load_explicit(&state, SEEN) == record_valid);
  assert(text == 1 || text == 2);
}

static void* fails(void* argument) {
  uint32_t none = 0;
  if (atomic_compare_exchange_strong(&state, &none, 1 + (uint32_t)(intptr_t)argument)) {
    text = 1 + (int)(intptr_t)argument;
    atomic_store_explicit(&state, record_valid, PUBLISHED);
  }
  failure();
  return 0;
}

static void* reads(void* unused) {
  (void)unused;
  if (atomic_load_explicit(&state, SEEN) != 0) failure();  // needs no order: failure has one
  return 0;
}

int main(void) {
  pthread_t threads[3];
  for (intptr_t r = 0; r < 2; ++r) pthread_create(&threads[r], 0, fails, (void*)r);
  pthread_create(&threads[2], 0, reads, 0);
  for (int i = 0; i < 3; ++i) pthread_join(threads[i], 0);
}
