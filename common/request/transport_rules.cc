#include "common/request/transport_rules.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/request/enum_values.h"

namespace ringattn {
namespace {

bool Has(const std::vector<TensorId>& tensors, TensorId id) {
  return std::find(tensors.begin(), tensors.end(), id) != tensors.end();
}

std::string PlaceField(int index, const char* field) {
  return absl::StrCat("transport.places[", index, "].", field);
}

std::optional<TransportKind> KindOf(int transport) {
  switch (transport) {
    case v1::TRANSPORT_RELAY:
      return TransportKind::kCoordinatorStream;
    case v1::TRANSPORT_DIRECT:
      return TransportKind::kDirectStream;
    case v1::TRANSPORT_HOST_MEMORY:
      return TransportKind::kHostMemory;
    case v1::TRANSPORT_CUDA_MEMORY:
      return TransportKind::kCudaMemory;
    default:
      return std::nullopt;
  }
}

void ReadAccept(const v1::TransportOptions& options, TransportChoice* choice,
                Violations& violations) {
  for (int i = 0; i < options.accept_size(); ++i) {
    const std::optional<TransportKind> kind = KindOf(options.accept(i));
    const std::string field = absl::StrCat("transport.accept[", i, "]");
    if (!kind.has_value()) {
      violations.Invalid(field, OtherThan<v1::Transport>(options.accept(i)));
      continue;
    }
    if (std::find(choice->accept.begin(), choice->accept.end(), *kind) != choice->accept.end()) {
      violations.Invalid(field, "is given twice");
      continue;
    }
    choice->accept.push_back(*kind);
  }
  choice->required = options.required();
  if (options.required() && options.accept().empty()) {
    violations.Invalid("transport.required", "needs transport.accept");
  }
}

// Reads the tokens of one axis.
Shard ReadSpans(const google::protobuf::RepeatedPtrField<v1::TokenSpan>& spans, const char* axis,
                int64_t tokens, Violations& violations) {
  Shard shard;
  for (int i = 0; i < spans.size(); ++i) {
    const v1::TokenSpan& span = spans[i];
    const std::string field = absl::StrCat("transport.writer.", axis, "[", i, "]");
    const uint64_t stride = std::max<uint64_t>(span.stride(), 1);
    const auto rows = static_cast<uint64_t>(tokens);
    if (span.count() == 0) {
      violations.Invalid(absl::StrCat(field, ".count"), "is 0; omit empty spans");
      return {};
    }
    // Without overflow: begin + (count - 1) * stride < rows.
    if (span.begin() >= rows || (span.count() - 1) > (rows - 1 - span.begin()) / stride) {
      violations.Invalid(field, absl::StrCat("has tokens beyond the axis, which has ", tokens));
      return {};
    }
    shard.push_back({static_cast<int64_t>(span.begin()), static_cast<int64_t>(span.count()),
                     static_cast<int64_t>(stride)});
  }
  return shard;
}

// Returns what makes the request unsuitable for writers; empty if nothing does.
std::string CheckWriterRequest(const TransportSubject& subject) {
  const AttentionSpec& spec = subject.spec;
  if (!subject.inline_tensors.empty()) return "the request has inline tensors";
  if (spec.lse_per_document) return "reply.lse_format is LSE_FORMAT_PER_DOCUMENT";
  if (!spec.probability_rows.empty()) return "the request has reply.probability_rows";
  for (const std::vector<TensorId>* tensors : {&subject.inputs, &subject.outputs}) {
    for (TensorId id : *tensors) {
      if (PartsOf(id).size() > 1) return "shape.packing is not PACKING_UNSPECIFIED";
    }
  }
  return "";
}

void ReadWriter(const v1::TransportOptions& options, const TransportSubject& subject,
                TransportChoice* choice, Violations& violations) {
  const v1::Writer& writer = options.writer();
  const auto most = static_cast<uint32_t>(subject.limits.max_writers);
  if (writer.count() < 1 || writer.count() > most) {
    return violations.Invalid("transport.writer.count",
                              absl::StrCat("is ", writer.count(), "; must be in 1..", most));
  }
  if (writer.index() >= writer.count()) {
    return violations.Invalid(
        "transport.writer.index",
        absl::StrCat("is ", writer.index(), "; must be below count, which is ", writer.count()));
  }
  const int64_t spans = int64_t{writer.q_size()} + writer.kv_size();
  const int64_t most_spans = subject.limits.max_ticket_spans / writer.count();
  if (spans > most_spans) {
    return violations.Invalid(
        "transport.writer",
        absl::StrCat("has ", spans, " spans; at most ", subject.limits.max_ticket_spans,
                     " for all writers, ", most_spans, " for each of ", writer.count()));
  }
  if (const std::string why = CheckWriterRequest(subject); !why.empty()) {
    return violations.Invalid("transport.writer", absl::StrCat("is not available: ", why));
  }
  if (std::find(choice->accept.begin(), choice->accept.end(), TransportKind::kCoordinatorStream) !=
      choice->accept.end()) {
    return violations.Invalid("transport.accept", "names RELAY, which writers cannot use");
  }
  if (choice->accept.empty()) {
    return violations.Invalid("transport.accept",
                              "is empty; a writer needs DIRECT, HOST_MEMORY or CUDA_MEMORY");
  }
  const AttentionShape& shape = subject.spec.shape;
  WriterChoice read{static_cast<int>(writer.index()), static_cast<int>(writer.count()), {}};
  read.rows.q = ReadSpans(writer.q(), "q", shape.seq_len_q, violations);
  read.rows.kv = ReadSpans(writer.kv(), "kv", shape.seq_len_kv, violations);
  choice->writer = std::move(read);
  choice->required = true;
}

std::optional<TensorLocationChoice> ReadPlace(const v1::TensorLocation& place, int index,
                                              const TransportSubject& subject,
                                              const TransportChoice& choice,
                                              Violations& violations) {
  const std::optional<TensorId> id = TensorFromNumber(place.tensor());
  if (!id.has_value()) {
    violations.Invalid(PlaceField(index, "tensor"), "names no tensor");
    return std::nullopt;
  }
  if (!Has(subject.inputs, *id) && !Has(subject.outputs, *id)) {
    violations.Invalid(PlaceField(index, "tensor"),
                       absl::StrCat(TensorName(*id), " is not a tensor of this request"));
    return std::nullopt;
  }
  if (place.region_id().size() != kRegionIdBytes) {
    violations.Invalid(PlaceField(index, "region_id"),
                       absl::StrCat("must have ", kRegionIdBytes, " bytes"));
    return std::nullopt;
  }
  const std::optional<WriterChoice>& writer = choice.writer;
  const int64_t bytes =
      writer.has_value() ? BytesOf(subject.spec, writer->rows, *id) : BytesOf(subject.spec, *id);
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - bytes);
  if (place.offset() > most) {
    violations.Invalid(PlaceField(index, "offset"),
                       absl::StrCat("and the ", bytes, " bytes of ", TensorName(*id),
                                    " exceed the largest offset of a region"));
    return std::nullopt;
  }
  // Only the coordinator sets these two, for workers.
  if (place.writer() != 0 || place.fence_number() != 0) {
    violations.Invalid(PlaceField(index, place.writer() != 0 ? "writer" : "fence_number"),
                       "must not be set by clients");
    return std::nullopt;
  }
  return TensorLocationChoice{*id, place.region_id(), static_cast<int64_t>(place.offset()), bytes,
                              writer.has_value() ? writer->index : 0};
}

bool Overlap(const TensorLocationChoice& a, const TensorLocationChoice& b) {
  return a.region_id == b.region_id && a.bytes > 0 && b.bytes > 0 &&
         a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

// Outputs must not overlap any other tensor. Inputs may share bytes.
void CheckOverlaps(const std::vector<TensorLocationChoice>& places, const TransportSubject& subject,
                   Violations& violations) {
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const bool written =
          Has(subject.outputs, places[i].tensor) || Has(subject.outputs, places[j].tensor);
      if (!written || !Overlap(places[i], places[j])) continue;
      violations.Invalid(PlaceField(static_cast<int>(i), "offset"),
                         absl::StrCat("the location of ", TensorName(places[i].tensor),
                                      " overlaps that of ", TensorName(places[j].tensor)));
    }
  }
}

void ReadPlaces(const v1::TransportOptions& options, const TransportSubject& subject,
                TransportChoice* choice, Violations& violations) {
  const size_t tensors = subject.inputs.size() + subject.outputs.size();
  for (int i = 0; i < options.places_size() && choice->places.size() <= tensors; ++i) {
    std::optional<TensorLocationChoice> place =
        ReadPlace(options.places(i), i, subject, *choice, violations);
    if (!place.has_value()) return;  // report only the first invalid location
    const auto twice = std::find_if(choice->places.begin(), choice->places.end(),
                                    [&](const auto& p) { return p.tensor == place->tensor; });
    if (twice != choice->places.end()) {
      return violations.Invalid(PlaceField(i, "tensor"),
                                absl::StrCat(TensorName(place->tensor), " already has a location"));
    }
    place->fence_number = options.fence_number();
    choice->places.push_back(*std::move(place));
  }
  CheckOverlaps(choice->places, subject, violations);
}

std::string CheckLocations(const TransportChoice& choice, const TransportSubject& subject) {
  if (!subject.inline_tensors.empty()) return "some of its tensors are inline";
  for (const std::vector<TensorId>* tensors : {&subject.inputs, &subject.outputs}) {
    for (TensorId id : *tensors) {
      const bool placed = std::any_of(choice.places.begin(), choice.places.end(),
                                      [id](const auto& place) { return place.tensor == id; });
      if (!placed) return absl::StrCat(TensorName(id), " has no location in a region");
    }
  }
  return "";
}

}  // namespace

TransportChoice ReadTransport(const v1::TransportOptions& options, const TransportSubject& subject,
                              Violations& violations) {
  TransportChoice choice;
  ReadAccept(options, &choice, violations);
  if (!subject.inline_tensors.empty()) choice.why_not_direct = "some of its tensors are inline";
  // Clients shard tensors as the workers hold them: the parts of packed tensors.
  const AttentionSpec& spec = subject.spec;
  if (spec.lse_per_document) choice.why_not_direct = "its lse is per document";
  if (!spec.probability_rows.empty()) choice.why_not_direct = "it asks for probabilities";
  if (options.has_writer()) ReadWriter(options, subject, &choice, violations);
  const bool takes_places =
      std::any_of(choice.accept.begin(), choice.accept.end(), [](TransportKind kind) {
        return kind == TransportKind::kHostMemory || kind == TransportKind::kCudaMemory;
      });
  if (!takes_places) {
    if (!options.places().empty()) {
      violations.Invalid(
          "transport.places",
          "are of HOST_MEMORY and CUDA_MEMORY, which transport.accept does not name");
    }
    if (options.fence_number() != 0) {
      violations.Invalid("transport.fence_number",
                         "is of HOST_MEMORY and CUDA_MEMORY, which transport.accept does not name");
    }
    return choice;
  }
  ReadPlaces(options, subject, &choice, violations);
  choice.why_not_places = CheckLocations(choice, subject);
  return choice;
}

TransportChoice JoinWriters(const std::vector<TransportChoice>& choices, int64_t seq_len_q,
                            int64_t seq_len_kv, Violations& violations) {
  TransportChoice joined;
  joined.required = true;
  for (const TransportChoice& choice : choices) {
    joined.writers.push_back(choice.writer->rows);
    joined.places.insert(joined.places.end(), choice.places.begin(), choice.places.end());
    for (const auto& [why, all] : {std::pair(&choice.why_not_places, &joined.why_not_places),
                                   std::pair(&choice.why_not_direct, &joined.why_not_direct)}) {
      if (why->empty() || !all->empty()) continue;
      *all = absl::StrCat("writer ", choice.writer->index, ": ", *why);
    }
  }
  for (TransportKind kind : choices.front().accept) {
    const bool by_all =
        std::all_of(choices.begin(), choices.end(), [kind](const TransportChoice& choice) {
          return std::find(choice.accept.begin(), choice.accept.end(), kind) != choice.accept.end();
        });
    if (by_all) joined.accept.push_back(kind);
  }
  for (auto& [axis, why] : CheckWriters(joined.writers, seq_len_q, seq_len_kv)) {
    violations.Invalid(absl::StrCat("transport.writer.", axis), std::move(why));
  }
  return joined;
}

}  // namespace ringattn
