#include "common/security/credentials.h"

#include "common/security/call_capture.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(TransportSecurity, BothEndsOfPlainTextMeet) {
  const TransportSecurity off;
  const CallCapture server(off.ServerCredentials(), [](const grpc::ServerContextBase&) {
    return grpc::Status(grpc::StatusCode::DATA_LOSS, "reached");
  });
  EXPECT_EQ(server.Call(off.ChannelCredentials()).error_code(), grpc::StatusCode::DATA_LOSS);
  // Who insists on TLS does not get there.
  EXPECT_EQ(server.Call(grpc::SslCredentials({})).error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace ringattn
