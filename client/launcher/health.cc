#include "client/launcher/health.h"

#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/transfer/grpc_status.h"

namespace ringattn::client {

absl::StatusOr<bool> IsServing(const std::string& address, const TransportSecurity& security,
                               absl::Duration deadline) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  grpc::GenericStub stub(security.Dial(address, arguments));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  // HealthCheckRequest{}, which asks about the server as a whole. (A ByteBuffer without slices is
  // no message.)
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request, &response,
                 [&](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();  // bounded by the call's deadline
  if (!status.ok()) return FromGrpcStatus(status);
  std::vector<grpc::Slice> slices;
  if (!response.Dump(&slices).ok()) return absl::InternalError("unreadable health answer");
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  // HealthCheckResponse{status = 1: SERVING} has exactly one encoding.
  return bytes == std::string("\x08\x01", 2);
}

}  // namespace ringattn::client
