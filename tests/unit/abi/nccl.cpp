// Compares the declarations of nccl/api.h with those of nccl.h.
#include <nccl.h>

#include "alike.h"
#include "nccl/api.h"

namespace distopt::nccl {
namespace {

#define COMPARE(field, symbol, result, parameters) \
  static_assert(CalledAlike<decltype(NcclApi::field), decltype(&::symbol)>::value, #symbol " is declared otherwise");
DISTOPT_NCCL(COMPARE)

EQUAL(Result::success, ::ncclSuccess);
EQUAL(Result::remote_error, ::ncclRemoteError);
EQUAL(Result::in_progress, ::ncclInProgress);
EQUAL(DataType::int8, ::ncclInt8);
EQUAL(DataType::uint8, ::ncclUint8);
EQUAL(DataType::int32, ::ncclInt32);
EQUAL(DataType::int64, ::ncclInt64);
EQUAL(DataType::float16, ::ncclFloat16);
EQUAL(DataType::float32, ::ncclFloat32);
EQUAL(DataType::float64, ::ncclFloat64);
EQUAL(DataType::bfloat16, ::ncclBfloat16);
EQUAL(RedOp::sum, ::ncclSum);
EQUAL(RedOp::prod, ::ncclProd);
EQUAL(RedOp::max, ::ncclMax);
EQUAL(RedOp::min, ::ncclMin);
EQUAL(RedOp::avg, ::ncclAvg);
EQUAL(sizeof(UniqueId), sizeof(::ncclUniqueId));
EQUAL(INT_MIN, NCCL_CONFIG_UNDEF_INT);
constexpr ::ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
EQUAL(Config().magic, initial.magic);
EQUAL(offsetof(Config, size), offsetof(::ncclConfig_t, size));
EQUAL(offsetof(Config, magic), offsetof(::ncclConfig_t, magic));
EQUAL(offsetof(Config, version), offsetof(::ncclConfig_t, version));
EQUAL(offsetof(Config, blocking), offsetof(::ncclConfig_t, blocking));
EQUAL(offsetof(Config, cga_cluster_size), offsetof(::ncclConfig_t, cgaClusterSize));
EQUAL(offsetof(Config, min_ctas), offsetof(::ncclConfig_t, minCTAs));
EQUAL(offsetof(Config, max_ctas), offsetof(::ncclConfig_t, maxCTAs));
EQUAL(offsetof(Config, net_name), offsetof(::ncclConfig_t, netName));
EQUAL(offsetof(Config, split_share), offsetof(::ncclConfig_t, splitShare));
static_assert(sizeof(Config) <= sizeof(::ncclConfig_t), "the library would read less than it is told");

}  // namespace
}  // namespace distopt::nccl
