#include "common/wire/health_listener.h"

#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/synchronization/notification.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

// Returns "SERVING", "NOT_SERVING", or the code of the call's failure.
std::string Ask(const std::string& address, const std::string& name) {
  grpc::GenericStub stub(grpc::CreateChannel(address, TransportSecurity().ChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  // HealthCheckRequest{service = name}: field 1, a length below 128, the bytes.
  const grpc::Slice slice("\x0a" + std::string(1, static_cast<char>(name.size())) + name);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request, &response,
                 [&](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();
  if (!status.ok()) return std::to_string(status.error_code());
  grpc::Slice answer;
  EXPECT_TRUE(response.DumpToSingleSlice(&answer).ok());
  const std::string bytes(answer.begin(), answer.end());
  if (bytes == std::string("\x08\x01", 2)) return "SERVING";
  return bytes == std::string("\x08\x02", 2) ? "NOT_SERVING" : "unreadable";
}

TEST(HealthListener, LivesFromTheStartAndIsReadyWhenTold) {
  const KeepAwake keep_awake;
  auto health = HealthListener::Start("127.0.0.1:0");
  ASSERT_TRUE(health.ok()) << health.status();
  const std::string& address = (*health)->address();
  EXPECT_EQ(Ask(address, kLivenessName), "SERVING");
  EXPECT_EQ(Ask(address, kReadinessName), "NOT_SERVING");
  (*health)->SetServing(kReadinessName, true);
  EXPECT_EQ(Ask(address, kReadinessName), "SERVING");
  (*health)->SetServing(kReadinessName, false);
  EXPECT_EQ(Ask(address, kReadinessName), "NOT_SERVING");
  EXPECT_EQ(Ask(address, "no.such.Service"), std::to_string(grpc::StatusCode::NOT_FOUND));
}

TEST(HealthListener, RefusesAPortThatIsTaken) {
  auto first = HealthListener::Start("127.0.0.1:0");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(HealthListener::Start((*first)->address()).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ringattn::wire
