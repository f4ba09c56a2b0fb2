// Compares the declarations of net/ucx_api.h with those of ucp.h.
#include <ucp/api/ucp.h>

#include "alike.h"
#include "net/ucx_api.h"

namespace distopt::net::ucx {
namespace {

#define PLACED_ALIKE(ours, field, theirs, their_field)         \
  EQUAL(offsetof(ours, field), offsetof(theirs, their_field)); \
  EQUAL(sizeof(ours::field), sizeof(theirs::their_field))

EQUAL(ok, ::UCS_OK);
EQUAL(in_progress, ::UCS_INPROGRESS);
EQUAL(unreachable, ::UCS_ERR_UNREACHABLE);
EQUAL(not_connected, ::UCS_ERR_NOT_CONNECTED);
EQUAL(connection_reset, ::UCS_ERR_CONNECTION_RESET);
EQUAL(first_link_failure, ::UCS_ERR_FIRST_LINK_FAILURE);
EQUAL(last_endpoint_failure, ::UCS_ERR_LAST_ENDPOINT_FAILURE);
EQUAL(last_error, ::UCS_ERR_LAST);
EQUAL(close_by_force, ::UCP_EP_CLOSE_FLAG_FORCE);
EQUAL(RequestParams::with_callback, ::UCP_OP_ATTR_FIELD_CALLBACK);
EQUAL(RequestParams::with_argument, ::UCP_OP_ATTR_FIELD_USER_DATA);
EQUAL(RequestParams::with_flags, ::UCP_OP_ATTR_FIELD_FLAGS);

PLACED_ALIKE(ContextParams, fields, ::ucp_params_t, field_mask);
PLACED_ALIKE(ContextParams, features, ::ucp_params_t, features);
PLACED_ALIKE(ContextParams, workers_are_shared, ::ucp_params_t, mt_workers_shared);
PLACED_ALIKE(WorkerParams, fields, ::ucp_worker_params_t, field_mask);
PLACED_ALIKE(WorkerParams, thread_mode, ::ucp_worker_params_t, thread_mode);
PLACED_ALIKE(EndpointParams, fields, ::ucp_ep_params_t, field_mask);
PLACED_ALIKE(EndpointParams, address, ::ucp_ep_params_t, address);
PLACED_ALIKE(EndpointParams, error_mode, ::ucp_ep_params_t, err_mode);
PLACED_ALIKE(EndpointParams, on_error, ::ucp_ep_params_t, err_handler.cb);
PLACED_ALIKE(EndpointParams, argument, ::ucp_ep_params_t, err_handler.arg);
PLACED_ALIKE(TagInfo, tag, ::ucp_tag_recv_info_t, sender_tag);
PLACED_ALIKE(TagInfo, bytes, ::ucp_tag_recv_info_t, length);
PLACED_ALIKE(RequestParams, fields, ::ucp_request_param_t, op_attr_mask);
PLACED_ALIKE(RequestParams, flags, ::ucp_request_param_t, flags);
PLACED_ALIKE(RequestParams, sent, ::ucp_request_param_t, cb.send);
PLACED_ALIKE(RequestParams, argument, ::ucp_request_param_t, user_data);
static_assert(sizeof(WorkerParams) >= sizeof(::ucp_worker_params_t), "the library would read more than there is");
static_assert(sizeof(EndpointParams) >= sizeof(::ucp_ep_params_t), "the library would read more than there is");
static_assert(sizeof(RequestParams) >= sizeof(::ucp_request_param_t), "the library would read more than there is");

static_assert(UCP_PARAM_FIELD_FEATURES == 1 << 0 && UCP_PARAM_FIELD_MT_WORKERS_SHARED == 1 << 5);
static_assert(UCP_FEATURE_TAG == 1 << 0 && UCP_FEATURE_WAKEUP == 1 << 4);
static_assert(UCP_WORKER_PARAM_FIELD_THREAD_MODE == 1 << 0 && UCS_THREAD_MODE_SERIALIZED == 1);
static_assert(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS == 1 << 0 && UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE == 1 << 1);
static_assert(UCP_EP_PARAM_FIELD_ERR_HANDLER == 1 << 2 && UCP_ERR_HANDLING_MODE_PEER == 1);

}  // namespace
}  // namespace distopt::net::ucx
