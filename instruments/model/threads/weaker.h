// Included before everything else (-include), it takes the order out of every release in csrc; what ranks exchange is
// then a race, which ThreadSanitizer must find. The standard library's own headers come first and keep theirs.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>
#define memory_order_release memory_order_relaxed
