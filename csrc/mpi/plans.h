// The plan of each collective for a rank.
#pragma once

#include "host/arguments.h"
#include "mpi/flow.h"

namespace distopt::mpi {

FlowPlan plan_all_reduce(const Arguments& arguments, const Group& group, std::size_t chunk_bytes);
FlowPlan plan_reduce_scatter(const Arguments& arguments, const Group& group);
FlowPlan plan_all_gather(const Arguments& arguments, const Group& group);  // the own part is copied here
FlowPlan plan_broadcast(const Arguments& arguments, const Group& group);

}  // namespace distopt::mpi
