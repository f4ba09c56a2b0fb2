// Messages::ring against Messages::wait and listen: a rank may not sleep on when a message has come. The futex is what
// the kernel promises, as in sleep.c.
#include "protocol.h"

#ifdef NO_TOTAL_ORDER
#define CHANGED memory_order_acq_rel
#define LOOKED memory_order_acquire
#else
#define CHANGED memory_order_seq_cst
#define LOOKED memory_order_seq_cst
#endif

static Word written, rings;
static _Atomic uint32_t sleepers;
static pthread_mutex_t bucket = PTHREAD_MUTEX_INITIALIZER;
static int queued;   // protected by the bucket's lock
static int message;  // what `written` announces

static void* sends(void* unused) {
  (void)unused;
  message = 1;
  atomic_store_explicit(&written, 1, PUBLISHED);
  atomic_fetch_add_explicit(&rings, 1, CHANGED);
  if (atomic_load_explicit(&sleepers, LOOKED) != 0) {
    pthread_mutex_lock(&bucket);
    queued = 0;
    pthread_mutex_unlock(&bucket);
  }
  return 0;
}

// Whether the message has come.
static int advance(void) {
  if (atomic_load_explicit(&written, SEEN) == 0) return 0;
  assert(message == 1);
  return 1;
}

static void* receives(void* unused) {
  (void)unused;
  uint64_t heard = atomic_load_explicit(&rings, SEEN);
  if (advance()) return 0;
#ifdef HEARD_LATE
  heard = atomic_load_explicit(&rings, memory_order_acquire);
#endif
  atomic_fetch_add_explicit(&sleepers, 1, CHANGED);
  if (atomic_load_explicit(&rings, LOOKED) == heard) {
    pthread_mutex_lock(&bucket);
    const int sleeps = atomic_load_explicit(&rings, memory_order_relaxed) == heard;
    if (sleeps) queued = 1;
    pthread_mutex_unlock(&bucket);
    if (sleeps) return 0;  // until FUTEX_WAKE
  }
  // It has heard the bell, which rings after the message: the next look finds it.
  (void)atomic_load_explicit(&rings, SEEN);
  assert(advance());
  return 0;
}

int main(void) {
  pthread_t threads[2];
  pthread_create(&threads[0], 0, sends, 0);
  pthread_create(&threads[1], 0, receives, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
  assert(!queued);
}
