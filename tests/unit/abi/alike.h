// Whether two functions are called in the same way.
#pragma once

#include <type_traits>

template <class A, class B>
constexpr bool passed_alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                              std::is_class_v<A> == std::is_class_v<B> && alignof(A) == alignof(B);

template <class A, class B>
struct CalledAlike : std::false_type {};
template <class R, class... A, class S, class... B>
struct CalledAlike<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B))
      return false;
    else
      return passed_alike<R, S> && (passed_alike<A, B> && ...);
  }();
};

#define EQUAL(mine, theirs) \
  static_assert(static_cast<long long>(mine) == static_cast<long long>(theirs), #theirs " has another value")
