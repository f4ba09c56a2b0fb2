// Collectives through ring entries, which are used again, each posted before the one before it has ended:
// ShmCollective::post, run_inline, and may_post's wait for the ring.
#include "protocol.h"

enum { operations = 3, ring_size = 2 };

static struct {
  Word finished;
  struct {
    Word sequence;
    int payload;
  } ring[ring_size];
} slot[2];

static void post(int me, uint64_t number) {
  slot[me].ring[number % ring_size].payload = (int)(10 * number) + me;
  publish_post(&slot[me].ring[number % ring_size].sequence, number);
}

static void* rank(void* argument) {
  const int me = (int)(intptr_t)argument, peer = 1 - me;
  int got[operations + 1];
  post(me, 1);
  for (uint64_t number = 1; number <= operations; ++number) {
    const uint64_t next = number + 1;
    if (next > ring_size && next <= operations) await(&slot[peer].finished, next - ring_size);
    if (next <= operations) post(me, next);
    await(&slot[peer].ring[number % ring_size].sequence, number);
    got[number] = slot[peer].ring[number % ring_size].payload;
    publish(&slot[me].finished);
  }
  for (int number = 1; number <= operations; ++number) assert(got[number] == 10 * number + peer);
  return 0;
}

int main(void) {
  pthread_t threads[2];
  for (intptr_t r = 0; r < 2; ++r) pthread_create(&threads[r], 0, rank, (void*)r);
  for (int r = 0; r < 2; ++r) pthread_join(threads[r], 0);
}
