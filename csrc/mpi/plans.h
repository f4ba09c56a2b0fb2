// The plan of each collective for a rank.
#pragma once

#include "host/request.h"
#include "mpi/flow.h"

namespace distopt::mpi {

Plan plan_all_reduce(const Request& request, const Group& group, std::size_t chunk_bytes);
Plan plan_reduce_scatter(const Request& request, const Group& group);
Plan plan_all_gather(const Request& request, const Group& group);  // the own part is copied here
Plan plan_broadcast(const Request& request, const Group& group);

}  // namespace distopt::mpi
