// Peers::wake against Peers::sleep: nobody may sleep on when the word has come. The futex is what the kernel promises:
// under a lock, FUTEX_WAIT compares and joins the queue, and FUTEX_WAKE takes out all who are in it.
#include "protocol.h"

enum { sleeping_ranks = 2 };

static Word word;
static _Atomic uint32_t sleepers;
static pthread_mutex_t bucket = PTHREAD_MUTEX_INITIALIZER;
static int queued[sleeping_ranks];  // protected by the bucket's lock
static int written;                 // what the word announces

static void* owner(void* unused) {
  (void)unused;
  written = 1;
  publish(&word);
  fence();
  if (atomic_load_explicit(&sleepers, memory_order_relaxed) != 0) {
    pthread_mutex_lock(&bucket);
    for (int i = 0; i < sleeping_ranks; ++i) queued[i] = 0;
    pthread_mutex_unlock(&bucket);
  }
  return 0;
}

static void* sleeper(void* argument) {
  const int me = (int)(intptr_t)argument;
  atomic_fetch_add_explicit(&sleepers, 1, memory_order_relaxed);
  fence();
  const uint64_t seen = atomic_load_explicit(&word, SEEN);
  if (seen >= 1) {
    assert(written == 1);
  } else {
    pthread_mutex_lock(&bucket);
    if (atomic_load_explicit(&word, memory_order_relaxed) == seen) queued[me] = 1;
    pthread_mutex_unlock(&bucket);
  }
  // It stays counted until it is awake. One that is in the queue now is so until FUTEX_WAKE.
  return 0;
}

int main(void) {
  pthread_t threads[1 + sleeping_ranks];
  pthread_create(&threads[0], 0, owner, 0);
  for (intptr_t r = 0; r < sleeping_ranks; ++r) pthread_create(&threads[1 + r], 0, sleeper, (void*)r);
  for (int i = 0; i < 1 + sleeping_ranks; ++i) pthread_join(threads[i], 0);
  for (int i = 0; i < sleeping_ranks; ++i) assert(!queued[i]);
}
