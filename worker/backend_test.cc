#include "worker/backend.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/sockets/socket_address.h"
#include "worker/comm/wire/wire_blob.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::string> PreparedBlob(const std::string& transport, const std::string& host) {
  BackendOptions options;
  options.device = "cpu";
  options.memory_limit_bytes = 64 << 20;
  options.ring_transport = transport;
  options.ring_host = host;
  absl::StatusOr<Backend> backend = MakeBackend(options);
  if (!backend.ok()) return backend.status();
  return backend->transport->Prepare(1, 0, 2);
}

// --ring_address decides where rings over sockets listen and what they announce.
TEST(Backend, RingAddressIsWhatTheRingAnnounces) {
  for (const char* transport : {"auto", "wire"}) {
    const absl::StatusOr<std::string> blob = PreparedBlob(transport, "127.0.77.5");
    ASSERT_TRUE(blob.ok()) << blob.status();
    const absl::StatusOr<WireBlob> parsed = ParseWireBlob(*blob);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    sockaddr_storage address{};
    const socklen_t length = ToSockaddr(parsed->address, &address);
    EXPECT_EQ(IpText(address, length), "127.0.77.5");
  }
}

TEST(Backend, RingAddressMustBeOneOfThisMachine) {
  for (const char* transport : {"auto", "wire", "gloo"}) {
    const absl::Status status = PreparedBlob(transport, "192.0.2.1").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << transport;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("cannot listen for ring peers on 192.0.2.1: "));
  }
}

}  // namespace
}  // namespace ringattn::worker
