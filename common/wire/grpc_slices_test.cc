#include "common/wire/grpc_slices.h"

#include <string>

#include "gtest/gtest.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::wire {
namespace {

TEST(GrpcSlices, AChunkIsSentFromBorrowedMemoryAndReadBack) {
  const std::string payload(100'000, 'p');
  int done = 0;
  {
    const ChunkHeader header{.tensor = v1::TENSOR_ID_K, .offset = 4096};
    const ChunkPrefix prefix = EncodeChunkPrefix(kForwardRequest, header, payload.size());
    auto count = [](void* arg) { ++*static_cast<int*>(arg); };
    grpc::ByteBuffer buffer =
        MakeChunkBuffer(prefix, {BorrowSlice(payload.data(), 60'000, count, &done),
                                 BorrowSlice(payload.data() + 60'000, 40'000, count, &done)});
    EXPECT_EQ(buffer.Length(), prefix.size + payload.size());

    auto received = ReceivedMessage::Parse(kForwardRequest, buffer);
    ASSERT_TRUE(received.ok());
    ReceivedMessage message = *std::move(received);
    EXPECT_TRUE(message.is_chunk());
    EXPECT_EQ(message.chunk(), header);
    ASSERT_EQ(message.payload().size(), 2u);
    EXPECT_EQ(message.payload()[0].data, reinterpret_cast<const uint8_t*>(payload.data()));

    std::vector<grpc::Slice> slices;
    message.AppendPayloadSlices(59'990, 20, &slices);
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(slices[0].size(), 10u);
    // Large enough that the slice object does not store the bytes.
    slices.clear();
    message.AppendPayloadSlices(100, 1000, &slices);
    ASSERT_EQ(slices.size(), 1u);
    EXPECT_EQ(slices[0].begin(), reinterpret_cast<const uint8_t*>(payload.data()) + 100);
    EXPECT_EQ(done, 0);

    auto proto = ParseProto<v1::ForwardRequest>(&buffer);
    ASSERT_TRUE(proto.ok());
    EXPECT_EQ(proto->chunk().data(), payload);
  }
  EXPECT_EQ(done, 2);
}

TEST(GrpcSlices, OtherMembersGoThroughProtobuf) {
  v1::ForwardResponse response;
  response.mutable_progress()->set_fraction_done(0.5);
  grpc::ByteBuffer buffer = SerializeProto(response);
  const auto received = ReceivedMessage::Parse(kForwardResponse, buffer);
  ASSERT_TRUE(received.ok());
  EXPECT_FALSE(received->is_chunk());
  EXPECT_EQ(received->parsed().member, v1::ForwardResponse::kProgress);
  const auto parsed = ParseProto<v1::ForwardResponse>(&buffer);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->progress().fraction_done(), 0.5);
}

// Slice objects store fewer than 24 bytes inline: pointers must survive moves.
TEST(GrpcSlices, SmallMessagesSurviveMoves) {
  const ChunkHeader header{.tensor = 1};
  grpc::ByteBuffer buffer = MakeChunkBuffer(EncodeChunkPrefix(kForwardRequest, header, 3),
                                            {grpc::Slice(std::string("abc"))});
  auto received = ReceivedMessage::Parse(kForwardRequest, buffer);
  ASSERT_TRUE(received.ok());
  std::vector<ReceivedMessage> kept;
  kept.push_back(*std::move(received));
  kept.reserve(100);
  std::string copy(3, '\0');
  CopyFragments(kept[0].payload(), copy.data());
  EXPECT_EQ(copy, "abc");
  std::vector<grpc::Slice> slices;
  kept[0].AppendPayloadSlices(1, 2, &slices);
  EXPECT_EQ(std::string(slices[0].begin(), slices[0].end()), "bc");
}

}  // namespace
}  // namespace ringattn::wire
