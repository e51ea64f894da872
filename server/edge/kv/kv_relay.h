// KvRelay: one Steps stream of KvCacheService. The coordinator opens a stream to every rank of the
// cache, cuts each message of the client by ranks and joins the ranks' answers.
//
//   hello -> the core checks the writer -> hello to every rank -> opened
//   begin, call or commit -> one message to every rank -> one answer from every rank -> one answer
//
// One message of the client is processed at a time: the next is read once the answer to the last
// was written. So a stream holds at most one request and the ranks' answers to it, and gRPC's flow
// control stops a client that sends faster. Calls that follow a refused StepBegin of the same
// number are skipped, because a client may send StepBegin and its first call together.
//
// Ends: with the client's half-close (OK); with the failure of the core (the writer was fenced, the
// cache ended); with a rank's status. If a rank's stream breaks without a status of the worker, the
// relay waits for the core's verdict for kVerdictTime and then reports UNAVAILABLE.
// Tests: kv_relay_test, tests/e2e/test_kv_cache.py.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_RELAY_H_
#define RINGATTN_SERVER_EDGE_KV_KV_RELAY_H_

#include <grpcpp/support/server_callback.h>

#include "ringattn/v1/kv_cache.grpc.pb.h"
#include "server/edge/kv/kv_context.h"

namespace ringattn::server {

// Time for the core to learn that a worker was lost.
inline constexpr absl::Duration kVerdictTime = absl::Milliseconds(800);

// Returns a reactor that deletes itself when the stream ends. `context` must outlive it. Thread
// safe.
grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* StartKvRelay(
    const KvContext* context, grpc::CallbackServerContext* call);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_RELAY_H_
