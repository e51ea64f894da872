#include "common/wire/calls_frame.h"

#include <deque>
#include <string>
#include <vector>

#include "common/wire/chunk_codec.h"
#include "common/wire/grpc_slices.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::wire {
namespace {

using testing::HasSubstr;

// Returns the bytes in several slices of `piece` bytes each.
grpc::ByteBuffer Pieces(const std::string& bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::ForwardRequest Header(size_t bytes) {
  v1::ForwardRequest request;
  request.mutable_header()->set_request_id("r");
  v1::InlineTensor* tensor = request.mutable_header()->add_inline_tensors();
  tensor->set_tensor(v1::TENSOR_ID_Q);
  tensor->set_data(std::string(bytes, 'q'));
  return request;
}

template <typename Message>
Message Parsed(grpc::ByteBuffer buffer) {
  absl::StatusOr<Message> parsed = ParseProto<Message>(&buffer);
  EXPECT_TRUE(parsed.ok());
  return parsed.ok() ? *parsed : Message();
}

// The first frame of a message.
CallRequestFrame RequestIn(const grpc::ByteBuffer& message) {
  absl::StatusOr<FrameReader> frames = FrameReader::Of(message);
  EXPECT_TRUE(frames.ok()) << frames.status();
  auto frame = frames->NextRequest();
  EXPECT_TRUE(frame.ok() && frame->has_value()) << frame.status();
  return **frame;
}

CallResponseFrame ResponseIn(const grpc::ByteBuffer& message) {
  absl::StatusOr<FrameReader> frames = FrameReader::Of(message);
  EXPECT_TRUE(frames.ok()) << frames.status();
  auto frame = frames->NextResponse();
  EXPECT_TRUE(frame.ok() && frame->has_value()) << frame.status();
  return **frame;
}

// A message with these bytes as its only frame.
std::string Framed(const std::string& frame) {
  return std::string(EncodeFieldPrefix(1, frame.size()).view()) + frame;
}

TEST(CallsFrame, AnyStubReadsARequest) {
  const v1::ForwardRequest header = Header(5000);
  CallRequestFrame frame;
  frame.call = 300;
  frame.timeout = absl::Milliseconds(1500);
  frame.traceparent = "00-a";
  frame.message = SerializeProto(header);
  const auto message = Parsed<v1::CallsRequest>(EncodeCallRequest(frame));
  ASSERT_EQ(message.requests_size(), 1);
  const v1::CallRequest& request = message.requests(0);
  EXPECT_EQ(request.call(), 300);
  EXPECT_EQ(request.timeout().seconds(), 1);
  EXPECT_EQ(request.timeout().nanos(), 500'000'000);
  EXPECT_EQ(request.traceparent(), "00-a");
  EXPECT_EQ(request.forward().SerializeAsString(), header.SerializeAsString());

  CallRequestFrame cancel;
  cancel.call = 300;
  cancel.cancels = true;
  EXPECT_TRUE(Parsed<v1::CallsRequest>(EncodeCallRequest(cancel)).requests(0).cancel());
}

TEST(CallsFrame, ReadsARequestOfAnyStubInAnyPieces) {
  v1::CallsRequest message;
  v1::CallRequest& request = *message.add_requests();
  request.set_call(7);
  request.mutable_timeout()->set_seconds(3);
  request.set_traceparent("00-b");
  *request.mutable_backward()->mutable_header()->mutable_request_id() = std::string(3000, 'b');
  for (size_t piece : {1, 10, 1000, 100'000}) {
    const CallRequestFrame frame = RequestIn(Pieces(message.SerializeAsString(), piece));
    EXPECT_EQ(frame.call, 7);
    EXPECT_EQ(frame.timeout, absl::Seconds(3));
    EXPECT_EQ(frame.traceparent, "00-b");
    EXPECT_FALSE(frame.cancels);
    EXPECT_EQ(frame.kind, CarriedKind::kBackward);
    EXPECT_EQ(Parsed<v1::BackwardRequest>(frame.message).SerializeAsString(),
              request.backward().SerializeAsString());
  }
}

TEST(CallsFrame, ReadsFieldsThatItDoesNotKnow) {
  v1::CallRequest request;
  request.set_call(7);
  request.set_cancel(true);
  const std::string unknown =
      "\x7a\x03"
      "abc";
  const std::string message = unknown + Framed(unknown + request.SerializeAsString()) + unknown;
  absl::StatusOr<FrameReader> frames = FrameReader::Of(Pieces(message, 100));
  const auto frame = frames->NextRequest();
  ASSERT_TRUE(frame.ok() && frame->has_value()) << frame.status();
  EXPECT_TRUE((*frame)->cancels);
  EXPECT_EQ(*frames->NextRequest(), std::nullopt);
}

TEST(CallsFrame, TakesWhatFitsOneMessage) {
  struct Element {
    grpc::ByteBuffer message;
    int number = 0;
  };
  std::deque<Element> queue;
  const size_t sizes[] = {10, 20'000, 40'000, 30'000, 200'000, 1};
  for (int i = 0; i < 6; ++i) queue.push_back({Pieces(std::string(sizes[i], 'x'), 1 << 20), i});
  std::vector<std::vector<int>> taken;
  while (!queue.empty()) {
    taken.emplace_back();
    for (const Element& each : TakeJoined(queue)) taken.back().push_back(each.number);
  }
  EXPECT_EQ(taken, (std::vector<std::vector<int>>{{0, 1, 2}, {3}, {4}, {5}}));
}

TEST(CallsFrame, JoinedMessagesHaveAllFramesInOrder) {
  std::vector<MessageBuffer> messages;
  for (size_t i = 0; i < 9; ++i) {
    CallRequestFrame frame;
    frame.call = i;
    frame.message = SerializeProto(Header(i % 3 == 1 ? 20'000 : 10 * i));
    messages.push_back(EncodeCallRequest(frame));
  }
  const grpc::ByteBuffer joined = JoinMessages(messages);
  const auto parsed = Parsed<v1::CallsRequest>(joined);
  ASSERT_EQ(parsed.requests_size(), 9);
  absl::StatusOr<FrameReader> frames = FrameReader::Of(joined);
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(parsed.requests(i).call(), i);
    const size_t bytes = parsed.requests(i).forward().header().inline_tensors(0).data().size();
    EXPECT_EQ(bytes, i % 3 == 1 ? 20'000 : 10 * i);
    const auto frame = frames->NextRequest();
    ASSERT_TRUE(frame.ok() && frame->has_value()) << frame.status();
    EXPECT_EQ((*frame)->call, i);
    EXPECT_EQ(Parsed<v1::ForwardRequest>((*frame)->message).SerializeAsString(),
              parsed.requests(i).forward().SerializeAsString());
  }
  EXPECT_FALSE(frames->NextRequest()->has_value());
}

TEST(CallsFrame, RejectsWhatIsNoRequest) {
  const std::string header = Header(100).SerializeAsString();
  v1::CallRequest whole;
  whole.set_call(1);
  *whole.mutable_forward() = Header(100);
  const std::string bytes = whole.SerializeAsString();
  const auto status = [](const std::string& text) {
    return FrameReader::Of(Pieces(Framed(text), 1000))->NextRequest().status();
  };
  EXPECT_THAT(std::string(status("").message()), HasSubstr("neither forward nor backward"));
  EXPECT_THAT(std::string(status("\x08\x01").message()), HasSubstr("neither"));
  EXPECT_THAT(std::string(status(bytes + bytes).message()), HasSubstr("several messages"));
  EXPECT_THAT(std::string(status(bytes + "\x30\x01").message()), HasSubstr("and cancels"));
  // A frame that ends in the middle of a field.
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    EXPECT_TRUE(absl::IsInvalidArgument(status(bytes.substr(0, cut)))) << cut;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(status("not protobuf")));
  // A message that ends in the middle of a frame, after a whole one.
  const std::string two = Framed(bytes) + Framed(bytes);
  for (size_t cut = Framed(bytes).size() + 1; cut < two.size(); ++cut) {
    absl::StatusOr<FrameReader> frames = FrameReader::Of(Pieces(two.substr(0, cut), 1000));
    EXPECT_TRUE(frames->NextRequest().ok());
    EXPECT_TRUE(absl::IsInvalidArgument(frames->NextRequest().status())) << cut;
  }
  for (const char* empty : {"", "\x08\x01"}) {
    EXPECT_THAT(std::string(FrameReader::Of(Pieces(empty, 9))->NextRequest().status().message()),
                HasSubstr("it is empty"));
  }
}

TEST(CallsFrame, AnyStubReadsAResponse) {
  v1::ForwardResponse response;
  response.mutable_summary()->set_flops(12);
  CallResponseFrame frame;
  frame.call = 9;
  frame.kind = CarriedKind::kForward;
  frame.message = SerializeProto(response);
  auto read = Parsed<v1::CallsResponse>(EncodeCallResponse(frame)).responses(0);
  EXPECT_EQ(read.call(), 9);
  EXPECT_FALSE(read.has_end());
  EXPECT_EQ(read.forward().summary().flops(), 12);

  frame.end = grpc::Status::OK;
  read = Parsed<v1::CallsResponse>(EncodeCallResponse(frame)).responses(0);
  EXPECT_TRUE(read.has_end());
  EXPECT_EQ(read.end().code(), 0);
  EXPECT_TRUE(read.has_forward());
}

TEST(CallsFrame, AStatusArrivesWithItsDetails) {
  google::rpc::Status details;
  details.set_code(8);
  details.set_message("full");
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  details.add_details()->PackFrom(info);
  CallResponseFrame sent;
  sent.call = 1;
  sent.end =
      grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", details.SerializeAsString());
  const CallResponseFrame frame = ResponseIn(EncodeCallResponse(sent));
  ASSERT_TRUE(frame.end.has_value());
  EXPECT_EQ(frame.end->error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(frame.end->error_message(), "full");
  google::rpc::Status read;
  ASSERT_TRUE(read.ParseFromString(frame.end->error_details()));
  EXPECT_EQ(read.SerializeAsString(), details.SerializeAsString());
  EXPECT_FALSE(frame.kind.has_value());

  sent.end = grpc::Status::OK;
  EXPECT_TRUE(ResponseIn(EncodeCallResponse(sent)).end->ok());
  absl::StatusOr<FrameReader> cut_off = FrameReader::Of(Pieces(Framed("\x12\x05x"), 9));
  EXPECT_TRUE(absl::IsInvalidArgument(cut_off->NextResponse().status()));
}

}  // namespace
}  // namespace ringattn::wire
