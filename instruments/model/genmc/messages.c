// A channel between two ranks, whose ring of bytes is used again: Messages::push and pull. The receiver may read only
// what was written, and the sender may write only where all has been read.
#include "protocol.h"

enum { messages = 3, ring_bytes = 2 };

static struct {
  Word written, taken;
  int ring[ring_bytes];
} channel;

static void* sends(void* unused) {
  (void)unused;
  for (int number = 0; number < messages; ++number) {
    const uint64_t written = atomic_load_explicit(&channel.written, memory_order_relaxed);
    const uint64_t taken = atomic_load_explicit(&channel.taken, SEEN);
    __VERIFIER_assume(ring_bytes - (written - taken) >= 1);  // or push would return, to be called again
    channel.ring[written % ring_bytes] = 10 + number;
    atomic_store_explicit(&channel.written, written + 1, PUBLISHED);
  }
  return 0;
}

static void* receives(void* unused) {
  (void)unused;
  int got[messages], number = 0;
  while (number < messages) {
    const uint64_t taken = atomic_load_explicit(&channel.taken, memory_order_relaxed);
    const uint64_t there = atomic_load_explicit(&channel.written, SEEN) - taken;
    __VERIFIER_assume(there >= 1);
    for (uint64_t i = 0; i < there; ++i) got[number++] = channel.ring[(taken + i) % ring_bytes];
    atomic_store_explicit(&channel.taken, taken + there, PUBLISHED);
  }
  for (int i = 0; i < messages; ++i) assert(got[i] == 10 + i);
  return 0;
}

int main(void) {
  pthread_t threads[2];
  pthread_create(&threads[0], 0, sends, 0);
  pthread_create(&threads[1], 0, receives, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
}
