// Compares the declarations of nccl/api.h with those of nccl.h; compiled where DISTOPT_NCCL_INCLUDE names its folder.
#include <nccl.h>

#include <type_traits>

#include "nccl/api.h"

namespace distopt::nccl {
namespace {

// Whether two types are passed to a function in the same way.
template <class A, class B>
constexpr bool passed_alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                              std::is_class_v<A> == std::is_class_v<B> && alignof(A) == alignof(B);

template <class A, class B>
struct SameAbi : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameAbi<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B))
      return false;
    else
      return passed_alike<R, S> && (passed_alike<A, B> && ...);
  }();
};

#define DISTOPT_NCCL_COMPARE(field, symbol, result, parameters) \
  static_assert(SameAbi<decltype(Api::field), decltype(&::symbol)>::value, #symbol " is declared otherwise");
DISTOPT_NCCL_REQUIRED(DISTOPT_NCCL_COMPARE)
#if NCCL_VERSION_CODE >= 21900
DISTOPT_NCCL_OPTIONAL(DISTOPT_NCCL_COMPARE)
#endif

#define DISTOPT_NCCL_EQUAL(mine, theirs) \
  static_assert(static_cast<long long>(mine) == static_cast<long long>(theirs), #theirs " has another value")
DISTOPT_NCCL_EQUAL(Result::success, ::ncclSuccess);
DISTOPT_NCCL_EQUAL(Result::remote_error, ::ncclRemoteError);
DISTOPT_NCCL_EQUAL(Result::in_progress, ::ncclInProgress);
DISTOPT_NCCL_EQUAL(DataType::int32, ::ncclInt32);
DISTOPT_NCCL_EQUAL(DataType::int64, ::ncclInt64);
DISTOPT_NCCL_EQUAL(DataType::float16, ::ncclFloat16);
DISTOPT_NCCL_EQUAL(DataType::float32, ::ncclFloat32);
DISTOPT_NCCL_EQUAL(DataType::float64, ::ncclFloat64);
DISTOPT_NCCL_EQUAL(DataType::bfloat16, ::ncclBfloat16);
DISTOPT_NCCL_EQUAL(RedOp::sum, ::ncclSum);
DISTOPT_NCCL_EQUAL(RedOp::max, ::ncclMax);
DISTOPT_NCCL_EQUAL(RedOp::min, ::ncclMin);
DISTOPT_NCCL_EQUAL(RedOp::avg, ::ncclAvg);
DISTOPT_NCCL_EQUAL(sizeof(UniqueId), sizeof(::ncclUniqueId));
DISTOPT_NCCL_EQUAL(INT_MIN, NCCL_CONFIG_UNDEF_INT);
constexpr ::ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
DISTOPT_NCCL_EQUAL(Config().magic, initial.magic);
DISTOPT_NCCL_EQUAL(offsetof(Config, size), offsetof(::ncclConfig_t, size));
DISTOPT_NCCL_EQUAL(offsetof(Config, magic), offsetof(::ncclConfig_t, magic));
DISTOPT_NCCL_EQUAL(offsetof(Config, version), offsetof(::ncclConfig_t, version));
DISTOPT_NCCL_EQUAL(offsetof(Config, blocking), offsetof(::ncclConfig_t, blocking));
DISTOPT_NCCL_EQUAL(offsetof(Config, cga_cluster_size), offsetof(::ncclConfig_t, cgaClusterSize));
DISTOPT_NCCL_EQUAL(offsetof(Config, min_ctas), offsetof(::ncclConfig_t, minCTAs));
DISTOPT_NCCL_EQUAL(offsetof(Config, max_ctas), offsetof(::ncclConfig_t, maxCTAs));
DISTOPT_NCCL_EQUAL(offsetof(Config, net_name), offsetof(::ncclConfig_t, netName));
DISTOPT_NCCL_EQUAL(offsetof(Config, split_share), offsetof(::ncclConfig_t, splitShare));
static_assert(sizeof(Config) <= sizeof(::ncclConfig_t), "the library would read less than it is told");

}  // namespace
}  // namespace distopt::nccl
