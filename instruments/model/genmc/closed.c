// A rank that counts, says why it fails, and leaves; and a peer that finds it gone: ShmCommunicator::close and
// check_peers, Peers::presence and failure. Who finds it gone must find its last count and its whole failure. The lock
// of the file is what the kernel promises: who finds it free sees all that was stored before.
#include "protocol.h"

static Word reduced;
static _Atomic uint32_t closed, state;
static _Atomic int locked = 1;
static int text, result;
static const uint32_t record_valid = UINT32_MAX;

static int holds_lock(void) { return atomic_load_explicit(&locked, memory_order_acquire); }

static void* leaves(void* unused) {
  (void)unused;
  result = 1;
  publish(&reduced);
  uint32_t none = 0;
  if (atomic_compare_exchange_strong(&state, &none, 1)) {
    text = 1;
    atomic_store_explicit(&state, record_valid, PUBLISHED);
  }
  atomic_store_explicit(&closed, 1, PUBLISHED);
  atomic_store_explicit(&locked, 0, memory_order_release);
  return 0;
}

static int is_gone(void) { return atomic_load_explicit(&closed, SEEN) != 0 || !holds_lock(); }

static void* waits(void* unused) {
  (void)unused;
  if (atomic_load_explicit(&reduced, SEEN) == 0) {
    if (!is_gone()) return 0;
    const int reached = atomic_load_explicit(&reduced, SEEN) != 0;  // needs no order: is_gone has one
    assert(reached);
  }
  assert(result == 1);
  return 0;
}

static void* reads(void* unused) {
  (void)unused;
  const uint32_t first_seen = atomic_load_explicit(&state, SEEN);
  if (first_seen == 0) return 0;
  if (first_seen != record_valid) {
    if (holds_lock()) return 0;
    const int is_whole = atomic_load_explicit(&state, SEEN) == record_valid;  // needs no order: holds_lock has one
    assert(is_whole);
  }
  assert(text == 1);
  return 0;
}

int main(void) {
  pthread_t threads[3];
  pthread_create(&threads[0], 0, leaves, 0);
  pthread_create(&threads[1], 0, waits, 0);
  pthread_create(&threads[2], 0, reads, 0);
  for (int i = 0; i < 3; ++i) pthread_join(threads[i], 0);
}
