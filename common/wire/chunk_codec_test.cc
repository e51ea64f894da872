#include "common/wire/chunk_codec.h"

#include <limits>
#include <random>
#include <string>

#include "gtest/gtest.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/shard.pb.h"

namespace ringattn::wire {
namespace {

Fragment Whole(const std::string& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

// Divides the message into fragments of `piece` bytes, with empty ones between them.
std::vector<Fragment> Cut(const std::string& bytes, size_t piece) {
  std::vector<Fragment> fragments = {{nullptr, 0}};
  for (size_t at = 0; at < bytes.size(); at += piece) {
    fragments.push_back(
        {reinterpret_cast<const uint8_t*>(bytes.data()) + at, std::min(piece, bytes.size() - at)});
    fragments.push_back({nullptr, 0});
  }
  return fragments;
}

std::string PayloadOf(const ParsedMessage& parsed) {
  std::string payload(parsed.payload_bytes, '\0');
  size_t total = 0;
  for (const Fragment& fragment : parsed.payload) {
    EXPECT_GT(fragment.size, 0u);
    total += fragment.size;
  }
  EXPECT_EQ(total, parsed.payload_bytes);
  CopyFragments(parsed.payload, payload.data());
  return payload;
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string Field(uint32_t field, const std::string& value) {
  return Varint(field << 3 | 2) + Varint(value.size()) + value;
}

TEST(ChunkCodec, WritesWhatProtobufWrites) {
  const uint64_t offsets[] = {0, 1, 127, 128, 1u << 20, std::numeric_limits<uint64_t>::max()};
  for (const uint64_t offset : offsets) {
    for (const size_t bytes : {0, 1, 127, 128, 70000}) {
      for (const bool with_crc : {false, true}) {
        v1::ForwardResponse response;
        v1::TensorChunk* chunk = response.mutable_chunk();
        chunk->set_tensor(v1::TENSOR_ID_LSE);
        chunk->set_offset(offset);
        if (with_crc) chunk->set_crc32c(0xdeadbeef);
        chunk->set_data(std::string(bytes, 'x'));
        ChunkHeader header{.tensor = v1::TENSOR_ID_LSE, .offset = offset};
        if (with_crc) header.crc32c = 0xdeadbeef;
        const ChunkPrefix prefix = EncodeChunkPrefix(kForwardResponse, header, bytes);
        EXPECT_EQ(std::string(prefix.view()) + std::string(bytes, 'x'),
                  response.SerializeAsString());
      }
    }
  }
}

TEST(ChunkCodec, LongestPrefixFits) {
  const ChunkHeader header{.tensor = -1, .offset = ~uint64_t{0}, .crc32c = 0};
  const uint64_t bytes = (uint64_t{1} << 31) - ChunkPrefix::kMaxBytes - 1;
  EXPECT_LE(EncodeChunkPrefix(kForwardResponse, header, bytes).size, ChunkPrefix::kMaxBytes);
}

TEST(ChunkCodec, ReadsBackAcrossAnyFragmentation) {
  const std::string payload =
      "the payload of a chunk, long enough for two-byte lengths: " + std::string(200, 'p');
  const ChunkHeader header{.tensor = 3, .offset = 1u << 30, .crc32c = 7};
  const std::string message =
      std::string(EncodeChunkPrefix(kExchangeResponse, header, payload.size()).view()) + payload;
  for (size_t piece = 1; piece <= message.size(); ++piece) {
    const std::vector<Fragment> fragments = Cut(message, piece);
    const auto parsed = ParseMessage(kExchangeResponse, fragments);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_TRUE(parsed->is_chunk);
    EXPECT_EQ(parsed->member, 2);
    EXPECT_EQ(parsed->chunk, header);
    EXPECT_EQ(PayloadOf(*parsed), payload);
  }
}

TEST(ChunkCodec, AnyTruncationIsAnErrorOrAnEarlierMessage) {
  const std::string payload(40, 'p');
  const ChunkHeader header{.tensor = 3, .offset = 300, .crc32c = 7};
  const std::string message =
      std::string(EncodeChunkPrefix(kForwardRequest, header, payload.size()).view()) + payload;
  for (size_t length = 1; length < message.size(); ++length) {
    const std::string cut = message.substr(0, length);
    EXPECT_EQ(ParseMessage(kForwardRequest, {Whole(cut)}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << length;
  }
  const auto empty = ParseMessage(kForwardRequest, {});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->member, 0);
}

TEST(ChunkCodec, AcceptsFieldsInAnyOrderRepeatedAndUnknown) {
  // data first, an unknown group with nested fields, then the others; data again.
  const std::string group = Varint(9 << 3 | 3) + Varint(1 << 3 | 0) + Varint(5) +
                            Varint(2 << 3 | 3) + Varint(2 << 3 | 4) + Varint(9 << 3 | 4);
  const std::string inner = Field(15, "old") + group + Varint(2 << 3) + Varint(1u << 31) +
                            Varint(1 << 3) + Varint(2) + Field(200, "unknown") +
                            Varint(7 << 3 | 1) + std::string(8, 'z') + Varint(8 << 3 | 5) +
                            std::string(4, 'z') + Field(15, "newest");
  const std::string message = Varint(50 << 3) + Varint(1) + Field(2, inner) + Field(99, "u");
  for (size_t piece = 1; piece < 10; ++piece) {
    const auto parsed = ParseMessage(kForwardRequest, Cut(message, piece));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->chunk, (ChunkHeader{.tensor = 2, .offset = 1u << 31}));
    EXPECT_EQ(PayloadOf(*parsed), "newest");
  }
}

TEST(ChunkCodec, AChunkGivenTwiceIsMerged) {
  const std::string message =
      Field(2, Varint(8) + Varint(1) + Field(15, "data")) + Field(2, Varint(16) + Varint(77));
  const auto parsed = ParseMessage(kForwardRequest, {Whole(message)});
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->chunk, (ChunkHeader{.tensor = 1, .offset = 77}));
  EXPECT_EQ(PayloadOf(*parsed), "data");
}

TEST(ChunkCodec, TheLastMemberOfTheOneofWins) {
  const std::string chunk = Field(2, Field(15, "data"));
  const std::string header = Field(1, "");
  const auto other = ParseMessage(kForwardRequest, {Whole(chunk), Whole(header)});
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(other->is_chunk);
  EXPECT_EQ(other->member, 1);
  EXPECT_EQ(other->payload_bytes, 0u);
  const auto again = ParseMessage(kForwardRequest, {Whole(chunk), Whole(header), Whole(chunk)});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->is_chunk);
  EXPECT_EQ(PayloadOf(*again), "data");
}

TEST(ChunkCodec, RejectsWhatIsNotProtobuf) {
  const std::string deep = [] {
    std::string bytes;
    for (int i = 0; i < 101; ++i) bytes += Varint(9 << 3 | 3);
    for (int i = 0; i < 101; ++i) bytes += Varint(9 << 3 | 4);
    return bytes;
  }();
  const std::string cases[] = {
      std::string(1, '\0'),                               // field number 0
      Varint(9 << 3 | 4),                                 // end of a group without a beginning
      Varint(9 << 3 | 3) + Varint(8 << 3 | 4),            // ends with another field number
      Varint(9 << 3 | 3),                                 // never ends
      Varint(9 << 3 | 6),                                 // wire type 6
      Varint(9 << 3 | 7),                                 // wire type 7
      Varint(9 << 3) + std::string(10, '\xff') + "\x01",  // varint of 11 bytes
      std::string(5, '\xff') + "\x01",                    // tag of 6 bytes
      Varint(2 << 3 | 2) + Varint(~uint64_t{0}),          // length beyond everything
      Varint(2 << 3 | 2) + Varint(0x7fffffff),            // length beyond the message
      Field(2, Varint(15 << 3 | 2) + Varint(9) + "short") + std::string(20, 'x'),
      Field(2, Varint(3 << 3 | 5) + "abc"),
      deep,
  };
  for (const std::string& message : cases) {
    EXPECT_EQ(ParseMessage(kForwardRequest, {Whole(message)}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << testing::PrintToString(message);
  }
}

// Random damage: the parser agrees with protobuf on every message that protobuf accepts.
TEST(ChunkCodec, AgreesWithProtobufOnDamagedMessages) {
  v1::ExchangeResponse original;
  original.mutable_chunk()->set_tensor(v1::TENSOR_ID_DV);
  original.mutable_chunk()->set_offset(123456);
  original.mutable_chunk()->set_crc32c(99);
  original.mutable_chunk()->set_data("0123456789");
  const std::string bytes = original.SerializeAsString();
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string damaged = bytes + (i % 3 == 0 ? bytes : "");
    for (int edits = 1 + i % 3; edits > 0; --edits) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    v1::ExchangeResponse expected;
    const bool legal = expected.ParseFromString(damaged);
    const auto parsed = ParseMessage(kExchangeResponse, Cut(damaged, 1 + random() % 8));
    if (!legal) continue;
    ++accepted;
    ASSERT_TRUE(parsed.ok()) << testing::PrintToString(damaged);
    ASSERT_EQ(parsed->member, static_cast<int>(expected.message_case()));
    if (!expected.has_chunk()) continue;
    ASSERT_EQ(parsed->chunk.tensor, expected.chunk().tensor());
    ASSERT_EQ(parsed->chunk.offset, expected.chunk().offset());
    ASSERT_EQ(parsed->chunk.crc32c.has_value(), expected.chunk().has_crc32c());
    ASSERT_EQ(parsed->chunk.crc32c.value_or(0), expected.chunk().crc32c());
    ASSERT_EQ(PayloadOf(*parsed), expected.chunk().data());
  }
  EXPECT_GT(accepted, 10'000);
}

// In ExchangeRequest only the chunk's number is a member; protobuf too treats other numbers as
// unknown fields.
TEST(ChunkCodec, NumbersThatAreNoMembersClearNothing) {
  v1::ExchangeRequest request;
  request.mutable_chunk()->set_offset(7);
  request.mutable_chunk()->set_data("0123");
  const std::string chunk = request.SerializeAsString();
  const std::string stranger = Field(1, "whatever it is");
  for (const std::string& bytes : {chunk, stranger + chunk, chunk + stranger}) {
    v1::ExchangeRequest expected;
    ASSERT_TRUE(expected.ParseFromString(bytes));
    const auto parsed = ParseMessage(kExchangeRequest, Cut(bytes, 3));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed->member, static_cast<int>(expected.message_case()));
    EXPECT_TRUE(parsed->is_chunk);
    EXPECT_EQ(PayloadOf(*parsed), "0123");
  }
  const auto parsed = ParseMessage(kExchangeRequest, Cut(stranger, 3));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->member, 0);
  EXPECT_FALSE(parsed->is_chunk);
}

TEST(ChunkCodec, SubrangesAreExact) {
  const std::string bytes = "abcdefghijklmnopqrstuvwxyz";
  const std::vector<Fragment> fragments = Cut(bytes, 3);
  for (size_t begin = 0; begin <= bytes.size(); ++begin) {
    for (size_t end = begin; end <= bytes.size(); ++end) {
      std::string copy(end - begin, '\0');
      CopyFragments(Subrange(fragments, begin, end - begin), copy.data());
      EXPECT_EQ(copy, bytes.substr(begin, end - begin));
    }
  }
}

}  // namespace
}  // namespace ringattn::wire
