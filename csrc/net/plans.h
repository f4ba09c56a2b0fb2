// The plan of each collective for a rank.
#pragma once

#include "host/arguments.h"
#include "net/flow.h"

namespace distopt::net {

FlowPlan plan_all_reduce(const Arguments& arguments, const Group& group, const Context& context);
// In the group Context::two_hosts, for types that round_each_operation: the first host reduces, slice by slice, and
// sends its partial results to the second host, which reduces them with its own arrays and sends the results back. Rank
// order, but the network carries the array once in each direction and not once for every rank of a host.
FlowPlan plan_over_two_hosts(const Arguments& arguments, const Context& context);
FlowPlan plan_reduce_scatter(const Arguments& arguments, const Group& group);
FlowPlan plan_all_gather(const Arguments& arguments, const Group& group);  // the own part is copied here
FlowPlan plan_broadcast(const Arguments& arguments, const Group& group);

}  // namespace distopt::net
