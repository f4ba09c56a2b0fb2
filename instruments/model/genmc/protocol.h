// The accesses of csrc/host/peers.cpp to shared words, with their memory orders, for GenMC. It explores all executions
// that a memory model allows, and reports a race of ordinary accesses or an assertion that fails. -DRELAXED=LINE
// takes away the order, or the fence, in one line of a program: see ../litmus.py.
#include <assert.h>
#include <genmc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#ifndef RELAXED
#define RELAXED 0
#endif
#define PUBLISHED (__LINE__ == RELAXED ? memory_order_relaxed : memory_order_release)
#define SEEN (__LINE__ == RELAXED ? memory_order_relaxed : memory_order_acquire)

typedef _Atomic uint64_t Word;

// Peers::publish, without the waking; see sleep.c.
#define publish(word) atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + 1, PUBLISHED)

// Peers::publish_post.
#define publish_post(word, sequence) atomic_store_explicit(word, sequence, PUBLISHED)

// Peers::reached, waited for.
#define await(word, target) __VERIFIER_assume(atomic_load_explicit(word, SEEN) >= (target))

// A full fence; _core.fence, too.
#define fence() \
  if (__LINE__ != RELAXED) atomic_thread_fence(memory_order_seq_cst)
