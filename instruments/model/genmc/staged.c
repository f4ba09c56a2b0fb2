// A staged all_gather and reduce_scatter in one: what is copied in is read by the peer; the staging buffers are used
// again. ShmCollective::advance_staged, of which the stages that touch other memory are left out.
#include "protocol.h"

enum { chunks = 5, staging_buffers = 3 };

static struct {
  Word copied_in, copied_out;
  int staging[staging_buffers];
} slot[2];

static void* rank(void* argument) {
  const int me = (int)(intptr_t)argument, peer = 1 - me;
  for (uint64_t iteration = 0; iteration < chunks + 2; ++iteration) {
    if (iteration < chunks) {
      const uint64_t number = iteration + 1;
      if (number > staging_buffers) await(&slot[peer].copied_out, number - staging_buffers);
      slot[me].staging[iteration % staging_buffers] = 10 * (int)number + me;
      publish(&slot[me].copied_in);
    }
    if (iteration >= 2) {
      const uint64_t chunk = iteration - 2;
      await(&slot[peer].copied_in, chunk + 1);
      assert(slot[peer].staging[chunk % staging_buffers] == 10 * (int)(chunk + 1) + peer);
      publish(&slot[me].copied_out);
    }
  }
  return 0;
}

int main(void) {
  pthread_t threads[2];
  for (intptr_t r = 0; r < 2; ++r) pthread_create(&threads[r], 0, rank, (void*)r);
  for (int r = 0; r < 2; ++r) pthread_join(threads[r], 0);
}
