#include "common/request/transport_rules.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

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

std::optional<TensorLocationChoice> ReadPlace(const v1::TensorLocation& place, int index,
                                              const TransportSubject& subject,
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
  const int64_t bytes = BytesOf(subject.spec, *id);
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - bytes);
  if (place.offset() > most) {
    violations.Invalid(PlaceField(index, "offset"),
                       absl::StrCat("and the ", bytes, " bytes of ", TensorName(*id),
                                    " exceed the largest offset of a region"));
    return std::nullopt;
  }
  return TensorLocationChoice{*id, place.region_id(), static_cast<int64_t>(place.offset()), bytes};
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
        ReadPlace(options.places(i), i, subject, violations);
    if (!place.has_value()) return;  // report only the first invalid location
    const auto twice = std::find_if(choice->places.begin(), choice->places.end(),
                                    [&](const auto& p) { return p.tensor == place->tensor; });
    if (twice != choice->places.end()) {
      return violations.Invalid(PlaceField(i, "tensor"),
                                absl::StrCat(TensorName(place->tensor), " already has a location"));
    }
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
  choice.fence_number = options.fence_number();
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

}  // namespace ringattn
