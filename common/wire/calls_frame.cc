#include "common/wire/calls_frame.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include "absl/strings/str_cat.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/durations.h"
#include "common/wire/grpc_slices.h"
#include "google/rpc/status.pb.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::wire {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kFirstCarried = static_cast<int>(CarriedKind::kForward);
constexpr int kLastCarried = static_cast<int>(CarriedKind::kBackward);

absl::Status NoFrame(const char* what) { return absl::InvalidArgumentError(what); }

constexpr int kFramesField = 1;  // CallsRequest.requests, CallsResponse.responses
// Copying fewer bytes takes less time than a slice.
constexpr size_t kCopiedBytes = 4096;

// Returns the frame in its message: the fields in `head`, then `carried` in the kind's field.
grpc::ByteBuffer Enclose(std::string head, std::optional<CarriedKind> kind,
                         const grpc::ByteBuffer& carried) {
  std::vector<grpc::Slice> slices;
  size_t bytes = head.size();
  if (kind.has_value()) {
    (void)carried.Dump(&slices);  // fails for compressed messages only; these are our own
    const ChunkPrefix prefix = EncodeFieldPrefix(static_cast<int>(*kind), carried.Length());
    absl::StrAppend(&head, prefix.view());
    bytes += prefix.size + carried.Length();
  }
  const ChunkPrefix prefix = EncodeFieldPrefix(kFramesField, bytes);
  slices.insert(slices.begin(), grpc::Slice(absl::StrCat(prefix.view(), head)));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// The message in a frame.
struct Carried {
  std::optional<CarriedKind> kind;  // nullopt: no message
  grpc::Slice message;

  grpc::ByteBuffer buffer() const { return grpc::ByteBuffer(&message, 1); }
};

// Calls `take(tag, input)` for each field of the frame that is not a carried message. It returns
// false for a malformed value.
template <typename Take>
absl::StatusOr<Carried> ReadFrame(const grpc::Slice& frame, const Take& take) {
  Carried carried;
  CodedInputStream input(frame.begin(), static_cast<int>(frame.size()));
  while (const uint32_t tag = input.ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    const auto type = WireFormatLite::GetTagWireType(tag);
    if (field < kFirstCarried || field > kLastCarried ||
        type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (!take(tag, &input)) return NoFrame("a field cannot be read");
      continue;
    }
    uint32_t size = 0;
    if (!input.ReadVarint32(&size)) return NoFrame("a length cannot be read");
    const auto begin = static_cast<size_t>(input.CurrentPosition());
    if (size > frame.size() - begin) return NoFrame("a message is cut off");
    if (carried.kind.has_value()) return NoFrame("it carries several messages");
    carried.kind = static_cast<CarriedKind>(field);
    carried.message = frame.sub(begin, begin + size);
    input.Skip(static_cast<int>(size));
  }
  if (!input.ConsumedEntireMessage()) return NoFrame("it is cut off");
  return carried;
}

bool ReadBytes(CodedInputStream* input, std::string* bytes) {
  uint32_t size = 0;
  return input->ReadVarint32(&size) && input->ReadString(bytes, static_cast<int>(size));
}

constexpr uint32_t TagOf(int field, WireFormatLite::WireType type) {
  return static_cast<uint32_t>(field) << 3 | type;
}
constexpr uint32_t kFrameTag = TagOf(kFramesField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kCallTag = TagOf(1, WireFormatLite::WIRETYPE_VARINT);
constexpr uint32_t kTimeoutTag = TagOf(2, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kEndTag = kTimeoutTag;
constexpr uint32_t kTraceparentTag = TagOf(3, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kCancelTag = TagOf(6, WireFormatLite::WIRETYPE_VARINT);

}  // namespace

grpc::ByteBuffer EncodeCallRequest(const CallRequestFrame& frame) {
  v1::CallRequest head;
  head.set_call(frame.call);
  if (frame.timeout.has_value()) {
    SetDuration(std::max(*frame.timeout, absl::ZeroDuration()), head.mutable_timeout());
  }
  head.set_traceparent(frame.traceparent);
  if (frame.cancels) head.set_cancel(true);
  return Enclose(head.SerializeAsString(),
                 frame.cancels ? std::nullopt : std::optional<CarriedKind>(frame.kind),
                 frame.message);
}

grpc::ByteBuffer EncodeCallResponse(const CallResponseFrame& frame) {
  v1::CallResponse head;
  head.set_call(frame.call);
  if (frame.end.has_value()) {
    google::rpc::Status& end = *head.mutable_end();
    // The details are a google.rpc.Status, as in grpc-status-details-bin.
    if (!end.ParseFromString(frame.end->error_details())) end.Clear();
    end.set_code(frame.end->error_code());
    end.set_message(frame.end->error_message());
  }
  return Enclose(head.SerializeAsString(), frame.kind, frame.message);
}

MessageBuffer JoinMessages(std::vector<MessageBuffer> messages) {
  if (messages.size() == 1) return std::move(messages.front());
  std::vector<grpc::Slice> all, slices;
  std::string small;
  const auto flush = [&] {
    if (!small.empty()) all.emplace_back(small);
    small.clear();
  };
  for (const MessageBuffer& message : messages) {
    (void)message.get().Dump(&slices);  // fails for compressed messages only; these are our own
    for (grpc::Slice& slice : slices) {
      if (slice.size() <= kCopiedBytes) {
        small.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      } else {
        flush();
        all.push_back(std::move(slice));
      }
    }
  }
  flush();
  return grpc::ByteBuffer(all.data(), all.size());
}

absl::StatusOr<FrameReader> FrameReader::Of(const grpc::ByteBuffer& message) {
  grpc::Slice whole;
  if (message.Length() > 0 && !message.TrySingleSlice(&whole).ok() &&
      !message.DumpToSingleSlice(&whole).ok()) {
    return absl::InternalError("unreadable message");
  }
  return FrameReader(std::move(whole));
}

absl::StatusOr<std::optional<grpc::Slice>> FrameReader::Next() {
  CodedInputStream input(whole_.begin() + at_, static_cast<int>(whole_.size() - at_));
  while (const uint32_t tag = input.ReadTag()) {
    if (tag != kFrameTag) {
      if (!WireFormatLite::SkipField(&input, tag)) return NoFrame("a field cannot be read");
      continue;
    }
    uint32_t size = 0;
    if (!input.ReadVarint32(&size)) return NoFrame("a length cannot be read");
    const size_t begin = at_ + static_cast<size_t>(input.CurrentPosition());
    if (size > whole_.size() - begin) return NoFrame("it is cut off");
    at_ = begin + size;
    return whole_.sub(begin, at_);
  }
  if (!input.ConsumedEntireMessage()) return NoFrame("it is cut off");
  if (at_ == 0) return NoFrame("it is empty");
  return std::nullopt;
}

absl::StatusOr<std::optional<CallRequestFrame>> FrameReader::NextRequest() {
  const absl::StatusOr<std::optional<grpc::Slice>> bytes = Next();
  if (!bytes.ok()) return bytes.status();
  if (!bytes->has_value()) return std::nullopt;
  CallRequestFrame frame;
  const auto carried = ReadFrame(**bytes, [&frame](uint32_t tag, CodedInputStream* input) {
    switch (tag) {
      case kCallTag:
        return input->ReadVarint64(&frame.call);
      case kTimeoutTag: {
        std::string text;
        google::protobuf::Duration timeout;
        if (!ReadBytes(input, &text) || !timeout.ParseFromString(text)) return false;
        frame.timeout = std::max(ToDuration(timeout), absl::ZeroDuration());
        return true;
      }
      case kTraceparentTag:
        return ReadBytes(input, &frame.traceparent);
      case kCancelTag: {
        uint64_t cancels = 0;
        if (!input->ReadVarint64(&cancels)) return false;
        frame.cancels = cancels != 0;
        return true;
      }
      default:
        return WireFormatLite::SkipField(input, tag);
    }
  });
  if (!carried.ok()) return carried.status();
  if (carried->kind.has_value() == frame.cancels) {
    return NoFrame(frame.cancels ? "it carries a message and cancels"
                                 : "it carries neither forward nor backward nor cancel");
  }
  if (!frame.cancels) {
    frame.kind = *carried->kind;
    frame.message = carried->buffer();
  }
  return frame;
}

absl::StatusOr<std::optional<CallResponseFrame>> FrameReader::NextResponse() {
  const absl::StatusOr<std::optional<grpc::Slice>> bytes = Next();
  if (!bytes.ok()) return bytes.status();
  if (!bytes->has_value()) return std::nullopt;
  CallResponseFrame frame;
  const auto carried = ReadFrame(**bytes, [&frame](uint32_t tag, CodedInputStream* input) {
    switch (tag) {
      case kCallTag:
        return input->ReadVarint64(&frame.call);
      case kEndTag: {
        std::string text;
        google::rpc::Status end;
        if (!ReadBytes(input, &text) || !end.ParseFromString(text)) return false;
        frame.end = grpc::Status(static_cast<grpc::StatusCode>(end.code()), end.message(),
                                 end.details().empty() ? "" : text);
        return true;
      }
      default:
        return WireFormatLite::SkipField(input, tag);
    }
  });
  if (!carried.ok()) return carried.status();
  frame.kind = carried->kind;
  if (frame.kind.has_value()) frame.message = carried->buffer();
  return frame;
}

}  // namespace ringattn::wire
