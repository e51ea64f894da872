#include "server/edge/header/header_translation.h"

#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"

namespace ringattn::server {
namespace {

struct Fingerprints {
  uint64_t recipe = 0;   // without inline tensors
  uint64_t request = 0;  // with them
};

// Clears the header's id and transport, because a retry may use another transport, and all fields
// that the plan does not depend on.
template <typename Header>
Fingerprints TakeFingerprints(Header* header) {
  header->clear_request_id();
  if (header->transport().has_writer()) {
    // These concern this writer's stream alone.
    header->mutable_reply()->clear_max_chunk_bytes();
    header->mutable_reply()->clear_with_crc32c();
    header->mutable_reply()->clear_progress_interval();
    header->mutable_reply()->clear_single_message();
  }
  header->clear_transport();
  // These change nothing in the plan.
  v1::ReplyOptions* reply = header->mutable_reply();
  const uint64_t reply_way =
      absl::HashOf(reply->max_chunk_bytes(), reply->with_crc32c(), reply->with_timeline(),
                   reply->progress_interval().SerializeAsString(), reply->single_message(),
                   header->has_prepare(), header->prepare().SerializeAsString());
  reply->clear_max_chunk_bytes();
  reply->clear_with_crc32c();
  reply->clear_with_timeline();
  reply->clear_progress_interval();
  reply->clear_single_message();
  header->clear_prepare();
  google::protobuf::RepeatedPtrField<v1::InlineTensor> tensors;
  tensors.Swap(header->mutable_inline_tensors());
  Fingerprints taken;
  taken.recipe =
      absl::HashOf(std::is_same_v<Header, v1::BackwardHeader>, header->SerializeAsString());
  taken.request = absl::HashOf(taken.recipe, reply_way);
  for (const v1::InlineTensor& tensor : tensors) {
    taken.request = absl::HashOf(taken.request, tensor.tensor(), tensor.data());
  }
  tensors.Swap(header->mutable_inline_tensors());
  return taken;
}

template <typename First>
std::variant<HeaderRequest, Rejection> Read(First first, const Limits& limits) {
  Violations violations(limits.max_error_detail_bytes);
  const auto& unknown = first.GetReflection()->GetUnknownFields(first);
  if (unknown.field_count() > 0) {
    violations.Unknown(absl::StrCat(unknown.field(0).number()));
    return std::move(violations).ToRejection();
  }
  if (!first.has_header()) {
    violations.Invalid("header", "must be the first message");
    return std::move(violations).ToRejection();
  }
  auto& header = *first.mutable_header();
  std::variant<ValidRequest, Rejection> checked = ValidateRequest(header, limits);
  if (auto* rejected = std::get_if<Rejection>(&checked)) return *std::move(rejected);
  if (header.transport().has_writer() && header.request_id().empty()) {
    violations.Invalid("request_id", "is empty; all writers of a request name the same");
    return std::move(violations).ToRejection();
  }

  HeaderRequest request;
  request.valid = std::get<ValidRequest>(std::move(checked));
  request.request_id = header.request_id();
  const v1::ReplyOptions& reply = header.reply();
  request.reply.max_chunk_bytes = reply.has_max_chunk_bytes()
                                      ? static_cast<int64_t>(reply.max_chunk_bytes())
                                      : limits.max_chunk_bytes_down_default;
  request.reply.with_crc32c = reply.with_crc32c();
  request.reply.with_timeline = reply.with_timeline();
  request.reply.single_message = reply.single_message();
  if (reply.has_progress_interval()) {
    request.reply.progress_interval = ToDuration(reply.progress_interval());
  }
  const Fingerprints fingerprints = TakeFingerprints(&header);
  request.fingerprint = fingerprints.request;
  request.recipe_fingerprint = fingerprints.recipe;
  InlineTensors tensors;
  for (v1::InlineTensor& tensor : *header.mutable_inline_tensors()) {
    tensors.push_back({*TensorFromNumber(tensor.tensor()), std::move(*tensor.mutable_data())});
  }
  request.inline_tensors = std::make_shared<const InlineTensors>(std::move(tensors));
  return request;
}

}  // namespace

bool HeaderRequest::has_all_inputs() const {
  return std::all_of(valid.inputs.begin(), valid.inputs.end(), [this](TensorId id) {
    return BytesOf(valid.spec, id) == 0 ||
           std::any_of(inline_tensors->begin(), inline_tensors->end(),
                       [id](const InlineData& data) { return data.tensor == id; });
  });
}

uint64_t FingerprintOf(v1::BackwardHeader header) { return TakeFingerprints(&header).request; }

std::variant<HeaderRequest, Rejection> ReadHeader(v1::ForwardRequest first, const Limits& limits) {
  return Read(std::move(first), limits);
}

std::variant<HeaderRequest, Rejection> ReadHeader(v1::BackwardRequest first, const Limits& limits) {
  return Read(std::move(first), limits);
}

}  // namespace ringattn::server
