// The accesses of csrc/host/peers.cpp to shared words, with their memory orders, for GenMC. It explores all executions
// that the C11 model allows, and reports a race of ordinary accesses or an assertion that fails.
// -DRELAXED, -DNO_WAKE_FENCE ... take one order away; then it must report something: see the Makefile's target `genmc`.
#include <assert.h>
#include <genmc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef RELAXED_STORE
#define PUBLISHED memory_order_relaxed
#else
#define PUBLISHED memory_order_release
#endif
#ifdef RELAXED_LOAD
#define SEEN memory_order_relaxed
#else
#define SEEN memory_order_acquire
#endif

typedef _Atomic uint64_t Word;

// Peers::publish, without the waking; see sleep.c.
static void publish(Word* word) {
  atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + 1, PUBLISHED);
}

// Peers::publish_post.
static void publish_post(Word* word, uint64_t sequence) { atomic_store_explicit(word, sequence, PUBLISHED); }

// Peers::reached, waited for.
static void await(Word* word, uint64_t target) { __VERIFIER_assume(atomic_load_explicit(word, SEEN) >= target); }
