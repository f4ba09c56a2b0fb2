// The texts of a flight record, which other processes read at any moment: Ring.add_text, GroupRecord.note and Ring.read
// of distopt/recorder/ring.py. Who finds a record finds the text that it refers to, whole. All are ordinary memory in
// the code; here they are relaxed, since they are read while they change.
#include "protocol.h"

enum { texts = 2 };

static Word text[texts], end, record;

static void* notes(void* unused) {
  (void)unused;
  for (uint64_t number = 1; number <= texts; ++number) {
    atomic_store_explicit(&text[number - 1], number, memory_order_relaxed);
    fence();
    atomic_store_explicit(&end, number, memory_order_relaxed);
    fence();
    atomic_store_explicit(&record, number, memory_order_relaxed);
  }
  return 0;
}

static void* reads(void* unused) {
  (void)unused;
  const uint64_t noted = atomic_load_explicit(&record, memory_order_relaxed);
  fence();
  const uint64_t counted = atomic_load_explicit(&end, memory_order_relaxed);
  fence();
  assert(noted <= counted);
  for (uint64_t number = 1; number <= counted; ++number) {
    const uint64_t found = atomic_load_explicit(&text[number - 1], memory_order_relaxed);
    assert(found == number);
  }
  return 0;
}

int main(void) {
  pthread_t threads[2];
  pthread_create(&threads[0], 0, notes, 0);
  pthread_create(&threads[1], 0, reads, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
}
