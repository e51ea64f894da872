#include "server/edge/header_translation.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "common/wire/proto_values.h"
#include "common/wire/raw_request.h"

namespace ringattn::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Enough to name what is wrong; the rest would not fit into the answer anyway.
constexpr size_t kMaxUnknownFields = 64;

std::string Join(const std::string& prefix, absl::string_view name) {
  return prefix.empty() ? std::string(name) : absl::StrCat(prefix, ".", name);
}

// Appends a violation for every unknown field, named by its path and number.
void FindUnknownFields(const Message& message, const std::string& prefix,
                       std::vector<Violation>* found) {
  const Reflection& reflection = *message.GetReflection();
  const auto& unknown = reflection.GetUnknownFields(message);
  for (int i = 0; i < unknown.field_count() && found->size() < kMaxUnknownFields; ++i) {
    found->push_back(UnknownField(Join(prefix, absl::StrCat(unknown.field(i).number()))));
  }
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const std::string path = Join(prefix, field->name());
    if (!field->is_repeated()) {
      FindUnknownFields(reflection.GetMessage(message, field), path, found);
      continue;
    }
    const int size = reflection.FieldSize(message, field);
    for (int i = 0; i < size && found->size() < kMaxUnknownFields; ++i) {
      FindUnknownFields(reflection.GetRepeatedMessage(message, field, i),
                        absl::StrCat(path, "[", i, "]"), found);
    }
  }
}

// Those of `names` that are set.
void FindReservedFields(const Message& message, const std::string& prefix,
                        std::initializer_list<const char*> names, std::vector<Violation>* found) {
  const Reflection& reflection = *message.GetReflection();
  for (const char* name : names) {
    const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(name);
    const bool is_set = field->is_repeated() ? reflection.FieldSize(message, field) > 0
                                             : reflection.HasField(message, field);
    if (is_set) found->push_back(UnsupportedField(Join(prefix, name)));
  }
}

// An enum's number that is neither UNSPECIFIED, of which validation says whether it may
// be, nor a value.
template <typename Enum>
void FindNoValue(Enum value, const char* field, const char* type, std::vector<Violation>* found) {
  if (value == 0 || FromProto(value).has_value()) return;
  found->push_back({field, absl::StrCat(static_cast<int>(value), " is no value of ", type)});
}

void ReadReply(const v1::ReplyOptions& reply, RawRequest* raw) {
  if (reply.has_max_chunk_bytes()) raw->reply_max_chunk_bytes = reply.max_chunk_bytes();
  if (reply.has_progress_interval()) {
    raw->reply_progress_interval_seconds =
        static_cast<double>(reply.progress_interval().seconds()) +
        1e-9 * reply.progress_interval().nanos();
  }
}

void ReadBackwardFields(const v1::ForwardHeader&, RawRequest*) {}
void ReadBackwardFields(const v1::BackwardHeader& header, RawRequest* raw) {
  raw->has_forward_result = header.has_forward_result();
  FindReservedFields(header, "", {"residual_handle", "has_dlse"}, &raw->found_in_decoding);
}

template <typename Header>
RawRequest ToRaw(const Header& header) {
  RawRequest raw;
  raw.direction =
      std::is_same_v<Header, v1::BackwardHeader> ? Direction::kBackward : Direction::kForward;
  FindUnknownFields(header, "", &raw.found_in_decoding);
  raw.request_id = header.request_id();
  raw.dtype = FromProto(header.dtype());
  FindNoValue(header.dtype(), "dtype", "DataType", &raw.found_in_decoding);
  ReadShape(header.shape(), &raw);
  ReadOptions(header.options(), &raw);
  FindReservedFields(header.options(), "options",
                     {"dropout", "alibi", "has_bias", "has_mask", "has_segment_ids", "has_sinks",
                      "dilation_levels", "deterministic"},
                     &raw.found_in_decoding);
  ReadPlan(header.plan(), &raw);
  FindNoValue(header.plan().layout(), "plan.layout", "Layout", &raw.found_in_decoding);
  FindNoValue(header.plan().schedule(), "plan.schedule", "Schedule", &raw.found_in_decoding);
  ReadReply(header.reply(), &raw);
  ReadBackwardFields(header, &raw);
  for (const v1::InlineTensor& tensor : header.inline_tensors()) {
    raw.inline_tensors.push_back({TensorIdFromNumber(tensor.tensor()), tensor.data().size()});
  }
  return raw;
}

template <typename Header>
uint64_t Fingerprint(Header* header) {
  header->clear_request_id();
  return absl::HashOf(std::is_same_v<Header, v1::BackwardHeader>, header->SerializeAsString());
}

template <typename First>
std::variant<HeaderRequest, Rejection> Read(First first, const Limits& limits) {
  Rejection rejection;
  const auto& unknown = first.GetReflection()->GetUnknownFields(first);
  if (unknown.field_count() > 0) {
    rejection.violations = {UnknownField(absl::StrCat(unknown.field(0).number()))};
    return rejection;
  }
  if (!first.has_header()) {
    rejection.violations = {{"header", "must be the first message"}};
    return rejection;
  }
  auto& header = *first.mutable_header();
  std::variant<ValidRequest, Rejection> checked = ValidateRequest(ToRaw(header), limits);
  if (auto* rejected = std::get_if<Rejection>(&checked)) return *std::move(rejected);

  HeaderRequest request;
  request.valid = std::get<ValidRequest>(std::move(checked));
  request.request_id = header.request_id();
  request.fingerprint = Fingerprint(&header);
  const v1::ReplyOptions& reply = header.reply();
  request.reply.max_chunk_bytes = reply.has_max_chunk_bytes()
                                      ? static_cast<int64_t>(reply.max_chunk_bytes())
                                      : limits.max_chunk_bytes_down_default;
  request.reply.with_crc32c = reply.with_crc32c();
  request.reply.with_timeline = reply.with_timeline();
  if (reply.has_progress_interval()) {
    request.reply.progress_interval = absl::Seconds(reply.progress_interval().seconds()) +
                                      absl::Nanoseconds(reply.progress_interval().nanos());
  }
  for (v1::InlineTensor& tensor : *header.mutable_inline_tensors()) {
    request.inline_tensors.push_back(
        {*TensorIdFromNumber(tensor.tensor()), std::move(*tensor.mutable_data())});
  }
  return request;
}

}  // namespace

std::variant<HeaderRequest, Rejection> ReadHeader(v1::ForwardRequest first, const Limits& limits) {
  return Read(std::move(first), limits);
}

std::variant<HeaderRequest, Rejection> ReadHeader(v1::BackwardRequest first, const Limits& limits) {
  return Read(std::move(first), limits);
}

}  // namespace ringattn::server
