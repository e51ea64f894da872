#include "common/wire/open_metadata.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/limits.h"
#include "common/security/call_capture.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

using Metadata = std::vector<std::pair<std::string, std::string>>;

// Tests what a server reads from a call over the network.
class OpenMetadataTest : public testing::Test {
 protected:
  std::optional<v1::OpenShard> Read(const Metadata& metadata,
                                    const std::function<void(grpc::ClientContext*)>& prepare = {}) {
    read_.reset();
    const grpc::Status status = server_.Call(plain_.ChannelCredentials(), metadata, prepare);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return read_;
  }

  const TransportSecurity plain_{};  // clang 14 requires an initialiser
  std::optional<v1::OpenShard> read_;
  const CallCapture server_{plain_.ServerCredentials(),
                            [this](const grpc::ServerContextBase& context) {
                              read_ = ReadOpenShard(context);
                              return grpc::Status::OK;
                            }};
};

v1::OpenShard EveryField() {
  v1::OpenShard open;
  open.set_operation_id("7-12");
  open.set_generation(7);
  open.set_max_chunk_bytes(1 << 20);
  open.set_with_crc32c(true);
  for (int byte = 0; byte < 256; ++byte) open.mutable_token()->push_back(static_cast<char>(byte));
  open.set_part(3);
  open.set_parts(16);
  return open;
}

// Returns an OpenShard of that many bytes.
std::string Serialized(size_t bytes) {
  v1::OpenShard open;
  open.set_token(std::string(bytes, 'x'));
  while (open.ByteSizeLong() > bytes) open.mutable_token()->pop_back();
  EXPECT_EQ(open.ByteSizeLong(), bytes);
  return open.SerializeAsString();
}

TEST_F(OpenMetadataTest, AnyBytesArriveAsTheyWere) {
  const auto read =
      Read({}, [](grpc::ClientContext* context) { PutOpenShard(EveryField(), context); });
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->SerializeAsString(), EveryField().SerializeAsString());
}

// The shortest protobuf message. It opens nothing; its validation is elsewhere.
TEST_F(OpenMetadataTest, AnEmptyOneIsOne) {
  const auto read =
      Read({}, [](grpc::ClientContext* context) { PutOpenShard(v1::OpenShard(), context); });
  ASSERT_TRUE(read.has_value());
  EXPECT_TRUE(read->token().empty());
}

TEST_F(OpenMetadataTest, AKibibyteIsRead) {
  const auto most = static_cast<size_t>(Limits().max_open_shard_bytes);
  EXPECT_TRUE(Read({{kOpenShardMetadataKey, Serialized(most)}}).has_value());
  EXPECT_FALSE(Read({{kOpenShardMetadataKey, Serialized(most + 1)}}).has_value());
}

TEST_F(OpenMetadataTest, WhatIsMissingTwiceOrGarbledIsNone) {
  const std::string good = EveryField().SerializeAsString();
  EXPECT_FALSE(Read({}).has_value());
  EXPECT_FALSE(Read({{"ringattn-open", "7-12"}}).has_value());
  EXPECT_FALSE(Read({{kOpenShardMetadataKey, good}, {kOpenShardMetadataKey, good}}).has_value());
  EXPECT_FALSE(Read({{kOpenShardMetadataKey, good.substr(0, good.size() - 3)}}).has_value());
  EXPECT_FALSE(Read({{kOpenShardMetadataKey, "\xff\xff\xff"}}).has_value());
}

}  // namespace
}  // namespace ringattn::wire
