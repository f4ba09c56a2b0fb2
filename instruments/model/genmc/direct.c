// An all_reduce in wire memory, twice: each rank writes its share into the memory of both, and the owner goes on with
// it. ShmCollective::post, run_direct, advance_direct; what an operation has found (`nonfinite`) is read once all have
// reduced.
#include "protocol.h"

enum { ranks = 2, operations = 2 };

static struct {
  Word posted, reduced, finished;
  int nonfinite;
  int wire[ranks];  // a share for each rank
} slot[ranks];

static void* rank(void* argument) {
  const int me = (int)(intptr_t)argument, peer = 1 - me;
  for (uint64_t number = 1; number <= operations; ++number) {
    for (int share = 0; share < ranks; ++share) slot[me].wire[share] = (int)number + me;
    publish_post(&slot[me].posted, number);
    await(&slot[peer].posted, number);
    const int sum = slot[me].wire[me] + slot[peer].wire[me];
    slot[me].wire[me] = slot[peer].wire[me] = sum;
    slot[me].nonfinite = (int)number;
    publish(&slot[me].reduced);
    await(&slot[peer].reduced, number);
    assert(slot[peer].nonfinite == (int)number);
    for (int share = 0; share < ranks; ++share) assert(slot[me].wire[share] == 2 * (int)number + 1);
    publish(&slot[me].finished);  // needs no order: inlined.c waits for it
  }
  return 0;
}

int main(void) {
  pthread_t threads[ranks];
  for (intptr_t r = 0; r < ranks; ++r) pthread_create(&threads[r], 0, rank, (void*)r);
  for (int r = 0; r < ranks; ++r) pthread_join(threads[r], 0);
}
