// Collectives through ring entries, which are used again: ShmCollective::post, run_inline, and may_post's wait for the
// ring.
#include "protocol.h"

enum { operations = 3, ring_size = 2 };

static struct {
  Word finished;
  struct {
    Word sequence;
    int payload;
  } ring[ring_size];
} slot[2];

static void* rank(void* argument) {
  const int me = (int)(intptr_t)argument, peer = 1 - me;
  for (uint64_t number = 1; number <= operations; ++number) {
    const int at = number % ring_size;
    if (number > ring_size) await(&slot[peer].finished, number - ring_size);
    slot[me].ring[at].payload = (int)(10 * number) + me;
    publish_post(&slot[me].ring[at].sequence, number);
    await(&slot[peer].ring[at].sequence, number);
    assert(slot[peer].ring[at].payload == (int)(10 * number) + peer);
    publish(&slot[me].finished);
  }
  return 0;
}

int main(void) {
  pthread_t threads[2];
  for (intptr_t r = 0; r < 2; ++r) pthread_create(&threads[r], 0, rank, (void*)r);
  for (int r = 0; r < 2; ++r) pthread_join(threads[r], 0);
}
