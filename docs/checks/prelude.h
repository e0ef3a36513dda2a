/* What fragments of C and C++ in the manual find declared. Each fragment is the body of a function that returns int. */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvtier/kvtier.h>

extern kvt_error_t *err;
extern kvt_runtime_t *runtime;
extern kvt_budget_t *budget;
extern kvt_store_t *store;
extern kvt_namespace_t *ns;
extern kvt_session_t *session;
extern kvt_queue_t *queue;
extern kvt_op_t *op;
extern kvt_policy_t *policy;
extern kvt_sparse_t *sparse;
extern kvt_offload_t *offload;
extern kvt_model_t *model;
extern kvt_stream_t *streamer;
extern kvt_device_t *device;
extern kvt_identity_t identity;
extern kvt_layout_t layout;
extern uint32_t tokens[4096];
extern uint64_t count;
extern kvt_status_t status;
