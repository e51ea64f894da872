// Frames and blobs: what is parsed and what is refused.
#include "worker/comm/wire/wire_frame.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "common/security/token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/wire/frame_reader.h"
#include "worker/comm/wire/wire_blob.h"

namespace ringattn::worker {
namespace {

using FrameKind = WireFrame::Kind;

std::string BytesOf(const WireFrame& frame) {
  std::string bytes;
  AppendFrame(frame, &bytes);
  return bytes;
}

WireFrame LastChunk() {
  return {.kind = FrameKind::kData,
          .length = 5,
          .sequence = 7,
          .offset = 2 * kChunkBytes,
          .total = 2 * kChunkBytes + 5};
}

TEST(WireFrame, ParsesWhatItFormats) {
  for (const WireFrame& frame :
       {LastChunk(), WireFrame{.kind = FrameKind::kGrant, .sequence = ~uint64_t{0}, .total = 1},
        WireFrame{.kind = FrameKind::kGrant, .sequence = 0, .total = kMaxTransferBytes}}) {
    const std::string bytes = BytesOf(frame);
    ASSERT_EQ(bytes.size(), kFrameBytes);
    const auto parsed = ParseFrame(bytes.data());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(BytesOf(*parsed), bytes);
  }
}

TEST(WireFrame, RefusesFieldsThatDisagree) {
  const std::vector<std::function<void(WireFrame*)>> changes = {
      [](WireFrame* f) { f->kind = static_cast<FrameKind>(3); },
      [](WireFrame* f) { f->length = 4; },
      [](WireFrame* f) { f->length = 0xffffffff; },
      [](WireFrame* f) { f->offset += 1; },
      [](WireFrame* f) { f->offset = 3 * kChunkBytes; },
      [](WireFrame* f) { f->offset = ~uint64_t{0} - kChunkBytes + 1; },
      [](WireFrame* f) { f->total = 0; },
      [](WireFrame* f) { f->total = ~uint64_t{0}; },
      [](WireFrame* f) { f->kind = FrameKind::kGrant; },
      [](WireFrame* f) {
        f->kind = FrameKind::kGrant;
        f->length = 0;
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    WireFrame frame = LastChunk();
    changes[i](&frame);
    EXPECT_EQ(ParseFrame(BytesOf(frame).data()).status().code(), absl::StatusCode::kInvalidArgument)
        << i;
  }
  std::string bytes = BytesOf(LastChunk());
  bytes[0] ^= 1;
  EXPECT_FALSE(ParseFrame(bytes.data()).ok());
}

class RecordingSink : public FrameSink {
 public:
  absl::Status OnGrant(const WireFrame& frame) override {
    grants.push_back(frame.sequence);
    return absl::OkStatus();
  }
  absl::StatusOr<char*> OnData(const WireFrame& frame) override {
    if (!has_memory) return nullptr;
    target.resize(frame.length);
    return target.data();
  }
  absl::Status OnDataEnd(const WireFrame&) override {
    received += target;
    return absl::OkStatus();
  }

  std::vector<uint64_t> grants;
  std::string target, received;
  bool has_memory = true;
};

TEST(FrameReader, AssemblesFragmentsOfAnySize) {
  const std::string bytes = BytesOf({.kind = FrameKind::kGrant, .sequence = 3, .total = 9}) +
                            BytesOf(LastChunk()) + "abcde" +
                            BytesOf({.kind = FrameKind::kGrant, .sequence = 4, .total = 9});
  for (const size_t most : {1, 2, 31, 32, 33, 1000}) {
    FrameReader reader;
    RecordingSink sink;
    for (size_t at = 0; at < bytes.size();) {
      const FrameReader::Buffer buffer = reader.Next();
      const size_t n = std::min({most, buffer.bytes, bytes.size() - at});
      std::memcpy(buffer.data, bytes.data() + at, n);
      ASSERT_TRUE(reader.Advance(n, sink).ok());
      at += n;
    }
    EXPECT_THAT(sink.grants, testing::ElementsAre(3, 4)) << most;
    EXPECT_EQ(sink.received, "abcde") << most;
  }
}

TEST(FrameReader, WaitsForMemory) {
  const std::string header = BytesOf(LastChunk());
  FrameReader reader;
  RecordingSink sink;
  sink.has_memory = false;
  std::memcpy(reader.Next().data, header.data(), header.size());
  ASSERT_TRUE(reader.Advance(header.size(), sink).ok());
  EXPECT_TRUE(reader.waits_memory());
  ASSERT_TRUE(reader.Resume(sink).ok());
  EXPECT_TRUE(reader.waits_memory());
  sink.has_memory = true;
  ASSERT_TRUE(reader.Resume(sink).ok());
  EXPECT_FALSE(reader.waits_memory());
  ASSERT_EQ(reader.Next().bytes, 5);
  std::memcpy(reader.Next().data, "abcde", 5);
  ASSERT_TRUE(reader.Advance(5, sink).ok());
  EXPECT_EQ(sink.received, "abcde");
}

TEST(WireBlob, ParsesWhatItFormats) {
  WireBlob blob{.tls = true, .stripes = 5, .address = {.port = 40000}, .secret = RandomToken()};
  blob.address.ip.s6_addr[15] = 1;
  const std::string text = FormatWireBlob(blob);
  const auto parsed = ParseWireBlob(text);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(FormatWireBlob(*parsed), text);
  for (const auto& [at, value] :
       {std::pair(0, 'x'), std::pair(8, '\2'), std::pair(9, '\0'), std::pair(9, '\x09')}) {
    std::string bad = text;
    bad[at] = value;
    EXPECT_FALSE(ParseWireBlob(bad).ok()) << at;
  }
  EXPECT_FALSE(ParseWireBlob(text + "x").ok());
  EXPECT_FALSE(ParseWireBlob(text.substr(1)).ok());
}

TEST(WireBlob, TokenDependsOnEverySecretAndTheGeneration) {
  const WireBlob a{.address = {.port = 1}, .secret = RandomToken()};
  const WireBlob b{.address = {.port = 2}, .secret = RandomToken()};
  const WireBlob c{.address = {.port = 2}, .secret = RandomToken()};
  const std::string token = WireRingToken(1, {a, b});
  EXPECT_EQ(token, WireRingToken(1, {a, b}));
  EXPECT_NE(token, WireRingToken(2, {a, b}));
  EXPECT_NE(token, WireRingToken(1, {a, c}));
  EXPECT_NE(token, WireRingToken(1, {b, a}));
}

}  // namespace
}  // namespace ringattn::worker
