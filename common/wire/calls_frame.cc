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

// Returns the message: the fields in `head`, then `carried` in the kind's field.
grpc::ByteBuffer Join(std::string head, std::optional<CarriedKind> kind,
                      const grpc::ByteBuffer& carried) {
  std::vector<grpc::Slice> slices;
  if (kind.has_value()) {
    (void)carried.Dump(&slices);  // fails for compressed messages only; these are our own
    absl::StrAppend(&head, EncodeFieldPrefix(static_cast<int>(*kind), carried.Length()).view());
  }
  slices.insert(slices.begin(), grpc::Slice(head));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// The fields of a frame, and the range of the carried message.
class FrameReader {
 public:
  explicit FrameReader(grpc::Slice whole) : whole_(std::move(whole)) {}

  // Calls `take(field, type, input)` for each field that is not a carried message. It returns
  // false for a malformed value.
  template <typename Take>
  absl::Status Read(const Take& take) {
    CodedInputStream input(whole_.begin(), static_cast<int>(whole_.size()));
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
      if (size > whole_.size() - begin) return NoFrame("a message is cut off");
      if (kind_.has_value()) return NoFrame("it carries several messages");
      kind_ = static_cast<CarriedKind>(field);
      carried_ = whole_.sub(begin, begin + size);
      input.Skip(static_cast<int>(size));
    }
    if (!input.ConsumedEntireMessage()) return NoFrame("it is cut off");
    return absl::OkStatus();
  }

  std::optional<CarriedKind> kind() const { return kind_; }
  grpc::ByteBuffer message() const { return grpc::ByteBuffer(&carried_, 1); }

 private:
  grpc::Slice whole_;
  std::optional<CarriedKind> kind_;
  grpc::Slice carried_;
};

bool ReadBytes(CodedInputStream* input, std::string* bytes) {
  uint32_t size = 0;
  return input->ReadVarint32(&size) && input->ReadString(bytes, static_cast<int>(size));
}

// Reads a frame with FrameReader::Read.
template <typename Take>
absl::StatusOr<FrameReader> ReadFrame(const grpc::ByteBuffer& buffer, const Take& take) {
  grpc::Slice whole;
  if (buffer.Length() > 0 && !buffer.TrySingleSlice(&whole).ok() &&
      !buffer.DumpToSingleSlice(&whole).ok()) {
    return absl::InternalError("unreadable message");
  }
  FrameReader reader(std::move(whole));
  if (absl::Status status = reader.Read(take); !status.ok()) return status;
  return reader;
}

constexpr uint32_t TagOf(int field, WireFormatLite::WireType type) {
  return static_cast<uint32_t>(field) << 3 | type;
}
constexpr uint32_t kCallTag = TagOf(1, WireFormatLite::WIRETYPE_VARINT);
constexpr uint32_t kTimeoutTag = TagOf(2, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kEndTag = kTimeoutTag;
constexpr uint32_t kTraceparentTag = TagOf(3, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kCancelTag = TagOf(6, WireFormatLite::WIRETYPE_VARINT);

}  // namespace

grpc::ByteBuffer EncodeCallsRequest(const CallsRequestFrame& frame) {
  v1::CallsRequest head;
  head.set_call(frame.call);
  if (frame.timeout.has_value()) {
    SetDuration(std::max(*frame.timeout, absl::ZeroDuration()), head.mutable_timeout());
  }
  head.set_traceparent(frame.traceparent);
  if (frame.cancels) head.set_cancel(true);
  return Join(head.SerializeAsString(),
              frame.cancels ? std::nullopt : std::optional<CarriedKind>(frame.kind), frame.message);
}

grpc::ByteBuffer EncodeCallsResponse(const CallsResponseFrame& frame) {
  v1::CallsResponse head;
  head.set_call(frame.call);
  if (frame.end.has_value()) {
    google::rpc::Status& end = *head.mutable_end();
    // The details are a google.rpc.Status, as in grpc-status-details-bin.
    if (!end.ParseFromString(frame.end->error_details())) end.Clear();
    end.set_code(frame.end->error_code());
    end.set_message(frame.end->error_message());
  }
  return Join(head.SerializeAsString(), frame.kind, frame.message);
}

absl::StatusOr<CallsRequestFrame> DecodeCallsRequest(const grpc::ByteBuffer& buffer) {
  CallsRequestFrame frame;
  const auto reader = ReadFrame(buffer, [&frame](uint32_t tag, CodedInputStream* input) {
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
  if (!reader.ok()) return reader.status();
  if (reader->kind().has_value() == frame.cancels) {
    return NoFrame(frame.cancels ? "it carries a message and cancels"
                                 : "it carries neither forward nor backward nor cancel");
  }
  if (!frame.cancels) {
    frame.kind = *reader->kind();
    frame.message = reader->message();
  }
  return frame;
}

absl::StatusOr<CallsResponseFrame> DecodeCallsResponse(const grpc::ByteBuffer& buffer) {
  CallsResponseFrame frame;
  const auto reader = ReadFrame(buffer, [&frame](uint32_t tag, CodedInputStream* input) {
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
  if (!reader.ok()) return reader.status();
  frame.kind = reader->kind();
  if (frame.kind.has_value()) frame.message = reader->message();
  return frame;
}

}  // namespace ringattn::wire
