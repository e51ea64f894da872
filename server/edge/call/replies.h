// Builds the messages that the coordinator itself writes to a client's stream. Forward and Backward
// use the same messages in different response types. Pure.
#ifndef RINGATTN_SERVER_EDGE_CALL_REPLIES_H_
#define RINGATTN_SERVER_EDGE_CALL_REPLIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/schedule/schedule.h"
#include "common/wire/message_buffer.h"
#include "ringattn/v1/attention.pb.h"
#include "server/core/coordinator.h"
#include "server/core/events/events.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

v1::PlanReport MakePlanReport(const Plan& plan, const std::vector<std::string>& members);

v1::Accepted MakeAccepted(const HeaderRequest& request, const AcceptRequest& accept,
                          const std::string& traceparent, const Limits& limits);
// Adds where the client sends and receives each member's shard. `shards` must have spans.
void AddTickets(const AcceptRequest& accept, const ShardPlan& shards, v1::Accepted* accepted);

// Returns the progress of the operation's current state.
v1::Progress MakeProgress(const OperationView& view, const TransferTotals& totals);

// `flops`: Plan::flops.
v1::Summary MakeSummary(const BeginDownload& begin, const FinishRequest& finish, double flops,
                        const TransferTotals& totals);

// Wraps the message as a ForwardResponse or BackwardResponse.
grpc::ByteBuffer Wrap(Direction direction, v1::Accepted accepted);
grpc::ByteBuffer Wrap(Direction direction, v1::Progress progress);
grpc::ByteBuffer Wrap(Direction direction, v1::Summary summary);

// Returns the whole messages of a reply, in order, as one with a SingleReply. Does not copy them.
grpc::ByteBuffer MakeSingleReply(const std::vector<wire::MessageBuffer>& messages);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_REPLIES_H_
