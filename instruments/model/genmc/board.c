// The board beside NCCL: Board::post writes an entry that a peer may be reading in Board::mismatch. What the peer takes
// for a description must be whole. The fields are ordinary memory in the code, of at most 8 bytes each; here they are
// relaxed, since they are read while they change.
#include "protocol.h"

enum { posts = 2 };

static struct {
  Word sequence;
  _Atomic uint64_t count, label;
} entry;

static void* posts_entries(void* unused) {
  (void)unused;
  for (uint64_t number = 1; number <= posts; ++number) {
    atomic_store_explicit(&entry.sequence, 0, memory_order_relaxed);
    fence();
    atomic_store_explicit(&entry.count, number, memory_order_relaxed);
    atomic_store_explicit(&entry.label, number, memory_order_relaxed);
    publish_post(&entry.sequence, number);
  }
  return 0;
}

static void* looks(void* unused) {
  (void)unused;
  for (uint64_t number = 1; number <= posts; ++number) {
    if (atomic_load_explicit(&entry.sequence, SEEN) != number) continue;
    const uint64_t count = atomic_load_explicit(&entry.count, memory_order_relaxed);
    const uint64_t label = atomic_load_explicit(&entry.label, memory_order_relaxed);
    fence();
    if (atomic_load_explicit(&entry.sequence, memory_order_relaxed) != number) continue;
    assert(count == number && label == number);
  }
  return 0;
}

int main(void) {
  pthread_t threads[2];
  pthread_create(&threads[0], 0, posts_entries, 0);
  pthread_create(&threads[1], 0, looks, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
}
