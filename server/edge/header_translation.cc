#include "server/edge/header_translation.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "server/edge/proto_values.h"

namespace ringattn {
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
                        std::initializer_list<const char*> names,
                        std::vector<Violation>* found) {
  const Reflection& reflection = *message.GetReflection();
  for (const char* name : names) {
    const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(name);
    const bool is_set = field->is_repeated() ? reflection.FieldSize(message, field) > 0
                                             : reflection.HasField(message, field);
    if (is_set) found->push_back(UnsupportedField(Join(prefix, name)));
  }
}

void NotAValue(const char* field, int number, const char* type, std::vector<Violation>* found) {
  found->push_back({field, absl::StrCat(number, " is no value of ", type)});
}

std::optional<DType> ReadDType(int dtype, std::vector<Violation>* found) {
  switch (dtype) {
    case v1::DATA_TYPE_UNSPECIFIED:
      return std::nullopt;  // validation says that it must be given
    case v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
  }
  NotAValue("dtype", dtype, "DataType", found);
  return std::nullopt;
}

std::optional<Layout> ReadLayout(int layout, std::vector<Violation>* found) {
  switch (layout) {
    case v1::LAYOUT_UNSPECIFIED:
      return std::nullopt;
    case v1::LAYOUT_CONTIGUOUS:
      return Layout::kContiguous;
    case v1::LAYOUT_ZIGZAG:
      return Layout::kZigzag;
    case v1::LAYOUT_STRIPED:
      return Layout::kStriped;
  }
  NotAValue("plan.layout", layout, "Layout", found);
  return std::nullopt;
}

std::optional<ScheduleKind> ReadSchedule(int schedule, std::vector<Violation>* found) {
  switch (schedule) {
    case v1::SCHEDULE_UNSPECIFIED:
      return std::nullopt;
    case v1::SCHEDULE_SINGLE:
      return ScheduleKind::kSingle;
    case v1::SCHEDULE_RING:
      return ScheduleKind::kRing;
  }
  NotAValue("plan.schedule", schedule, "Schedule", found);
  return std::nullopt;
}

void ReadShape(const v1::AttentionShape& shape, RawRequest* raw) {
  raw->batch = shape.batch();
  raw->seq_len_q = shape.seq_len_q();
  raw->seq_len_kv = shape.seq_len_kv();
  raw->num_heads = shape.num_heads();
  raw->num_kv_heads = shape.num_kv_heads();
  raw->head_dim = shape.head_dim();
  raw->head_dim_v = shape.head_dim_v();
  raw->packed = shape.has_packed();
  const v1::PackedDocuments& packed = shape.packed();
  raw->cu_seqlens_q.assign(packed.cu_seqlens_q().begin(), packed.cu_seqlens_q().end());
  raw->cu_seqlens_k.assign(packed.cu_seqlens_k().begin(), packed.cu_seqlens_k().end());
}

void ReadOptions(const v1::AttentionOptions& options, RawRequest* raw) {
  if (options.has_softmax_scale()) raw->softmax_scale = options.softmax_scale();
  if (options.has_softcap()) raw->softcap = options.softcap();
  raw->causal = options.causal();
  if (options.has_window()) {
    raw->window = RawWindow{options.window().left(), options.window().right()};
  }
  FindReservedFields(options, "options",
                     {"dropout", "alibi", "has_bias", "has_mask", "has_segment_ids", "has_sinks",
                      "dilation_levels", "deterministic"},
                     &raw->found_in_decoding);
}

void ReadPlan(const v1::PlanOptions& plan, RawRequest* raw) {
  raw->layout = ReadLayout(plan.layout(), &raw->found_in_decoding);
  raw->schedule = ReadSchedule(plan.schedule(), &raw->found_in_decoding);
  if (plan.has_world_size()) raw->world_size = plan.world_size();
  if (plan.has_stripe()) raw->stripe = plan.stripe();
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
  raw.direction = std::is_same_v<Header, v1::BackwardHeader> ? Direction::kBackward
                                                             : Direction::kForward;
  FindUnknownFields(header, "", &raw.found_in_decoding);
  raw.request_id = header.request_id();
  raw.dtype = ReadDType(header.dtype(), &raw.found_in_decoding);
  ReadShape(header.shape(), &raw);
  ReadOptions(header.options(), &raw);
  ReadPlan(header.plan(), &raw);
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

std::variant<HeaderRequest, Rejection> ReadHeader(v1::ForwardRequest first,
                                                  const Limits& limits) {
  return Read(std::move(first), limits);
}

std::variant<HeaderRequest, Rejection> ReadHeader(v1::BackwardRequest first,
                                                  const Limits& limits) {
  return Read(std::move(first), limits);
}

}  // namespace ringattn
