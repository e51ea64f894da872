#include "common/request/validation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/request/enum_values.h"
#include "common/request/request_rules.h"
#include "common/request/transport_rules.h"
#include "common/request/unknown_fields.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

// Rejects an enum number that is neither UNSPECIFIED nor a value of this version.
template <typename Enum>
void CheckEnum(Enum value, const char* field, Violations& violations) {
  const auto accepts = [](int number) { return FromProto(static_cast<Enum>(number)).has_value(); };
  if (value == 0 || accepts(value)) return;
  const auto& type = *google::protobuf::GetEnumDescriptor<Enum>();
  violations.Invalid(field, OtherThan(value, type, accepts));
}

// Returns 0 if the field is not set. Each device decides which values it accepts.
int32_t CheckTuningValue(const char* field, bool is_set, uint32_t value, Violations& violations) {
  constexpr uint32_t kMost = uint32_t{1} << 16;
  if (!is_set) return 0;
  if (value >= 1 && value <= kMost) return static_cast<int32_t>(value);
  violations.Invalid(field, absl::StrCat("is ", value, ", must be in 1..", kMost));
  return 0;
}

Tuning CheckTuning(const v1::Tuning& proto, Violations& violations) {
  Tuning tuning;
  tuning.tile_q =
      CheckTuningValue("plan.tuning.tile_q", proto.has_tile_q(), proto.tile_q(), violations);
  tuning.tile_kv =
      CheckTuningValue("plan.tuning.tile_kv", proto.has_tile_kv(), proto.tile_kv(), violations);
  tuning.key_splits = CheckTuningValue("plan.tuning.key_splits", proto.has_key_splits(),
                                       proto.key_splits(), violations);
  return tuning;
}

// Checks that the list has as many members as the ring, each once.
void CheckMembers(const v1::PlanOptions& plan, const Limits& limits, PlanChoice& choice,
                  Violations& violations) {
  if (plan.members().empty()) return;
  const char* field = "plan.members";
  if (plan.members_size() > limits.max_world_size) {
    return violations.OverLimit(
        field,
        absl::StrCat("has ", plan.members_size(), " names, the limit is ", limits.max_world_size));
  }
  for (int i = 0; i < plan.members_size(); ++i) {
    const std::string& name = plan.members(i);
    const std::string entry = absl::StrCat(field, "[", i, "]");
    if (name.empty() || name.size() > static_cast<uint64_t>(limits.max_request_id_bytes)) {
      violations.Invalid(entry, absl::StrCat("has ", name.size(), " bytes, must have 1..",
                                             limits.max_request_id_bytes));
    }
    if (std::find(plan.members().begin(), plan.members().begin() + i, name) !=
        plan.members().begin() + i) {
      violations.Invalid(entry, absl::StrCat("names ", name, " again"));
    }
    choice.members.push_back(name);
  }
  if (choice.schedule == ScheduleKind::kSingle && plan.members_size() > 1) {
    violations.Invalid(
        field, absl::StrCat("has ", plan.members_size(), " names, but plan.schedule is single"));
  }
  if (plan.has_world_size() && choice.world_size != plan.members_size()) {
    violations.Invalid(field, absl::StrCat("has ", plan.members_size(),
                                           " names, but plan.world_size is ", plan.world_size()));
  }
  choice.world_size = plan.members_size();
}

PlanChoice CheckPlan(const v1::PlanOptions& plan, const Limits& limits, Violations& violations) {
  CheckEnum(plan.layout(), "plan.layout", violations);
  CheckEnum(plan.schedule(), "plan.schedule", violations);
  PlanChoice choice;
  choice.layout = FromProto(plan.layout());
  choice.schedule = FromProto(plan.schedule());
  if (plan.has_world_size()) {
    choice.world_size = static_cast<int>(
        violations.Bounded("plan.world_size", plan.world_size(), 1, limits.max_world_size));
  }
  if (plan.has_heads_per_step()) {
    choice.heads_per_step =
        violations.Bounded("plan.heads_per_step", plan.heads_per_step(), 1, limits.max_heads);
  }
  if (plan.has_group_size()) {
    choice.group_size =
        violations.Bounded("plan.group_size", plan.group_size(), 1, limits.max_world_size);
  }
  if (plan.has_stripe()) choice.stripe = ReadStripe(plan.stripe(), limits, violations);
  choice.tuning = CheckTuning(plan.tuning(), violations);
  CheckMembers(plan, limits, choice, violations);
  return choice;
}

void CheckReply(const v1::ReplyOptions& reply, const Limits& limits, Violations& violations) {
  if (reply.has_max_chunk_bytes()) {
    violations.Bounded("reply.max_chunk_bytes", reply.max_chunk_bytes(),
                       limits.min_chunk_bytes_down, limits.max_chunk_bytes_up);
  }
  if (!reply.has_progress_interval()) return;
  const double seconds = static_cast<double>(reply.progress_interval().seconds()) +
                         1e-9 * reply.progress_interval().nanos();
  const double least = absl::ToDoubleSeconds(limits.min_progress_interval);
  if (!(seconds >= least)) {
    violations.Invalid("reply.progress_interval",
                       absl::StrCat("is ", seconds, " s, must be at least ", least, " s"));
  }
}

// Returns whether results are fp32 although the request's dtype is not.
bool AsksForFloat32(const v1::ReplyOptions& reply, DType dtype, Violations& violations) {
  CheckEnum(reply.output_dtype(), "reply.output_dtype", violations);
  const DType asked = FromProto(reply.output_dtype()).value_or(dtype);
  if (asked != dtype && asked != DType::kFloat32) {
    violations.Invalid("reply.output_dtype",
                       absl::StrCat("is ", DTypeName(asked), ": must be the request's dtype, ",
                                    DTypeName(dtype), ", or fp32"));
  }
  return asked == DType::kFloat32 && dtype != DType::kFloat32;
}

// Returns whether clients exchange lse and dlse per document.
bool IsLsePerDocument(const v1::ReplyOptions& reply, Violations& violations) {
  if (!v1::LseFormat_IsValid(reply.lse_format())) {
    violations.Invalid("reply.lse_format", OtherThan<v1::LseFormat>(reply.lse_format()));
  }
  return reply.lse_format() == v1::LSE_FORMAT_PER_DOCUMENT;
}

void CheckRequestId(const std::string& id, const Limits& limits, Violations& violations) {
  if (id.size() > static_cast<uint64_t>(limits.max_request_id_bytes)) {
    violations.Invalid("request_id", absl::StrCat("has ", id.size(), " bytes, at most ",
                                                  limits.max_request_id_bytes, " are allowed"));
  }
  if (!std::all_of(id.begin(), id.end(), [](char c) { return c >= 0x20 && c <= 0x7e; })) {
    violations.Invalid("request_id", "must be printable ASCII");
  }
}

using InlineTensors = google::protobuf::RepeatedPtrField<v1::InlineTensor>;

void CheckInlineSize(const InlineTensors& tensors, const Limits& limits, Violations& violations) {
  const auto limit = static_cast<uint64_t>(limits.max_inline_bytes);
  uint64_t total = 0;
  for (const v1::InlineTensor& tensor : tensors) {
    total += std::min<uint64_t>(tensor.data().size(), limit + 1);  // far fewer than 2^32 entries
  }
  if (total > limit) {
    violations.OverLimit("inline_tensors",
                         absl::StrCat("have more than ", limit, " bytes together: send chunks"));
  }
}

void CheckInlineTensors(const InlineTensors& tensors, const ValidRequest& request,
                        Violations& violations) {
  std::vector<TensorId> seen;
  for (int i = 0; i < tensors.size(); ++i) {
    const std::string field = absl::StrCat("inline_tensors[", i, "]");
    const std::optional<TensorId> id = TensorFromNumber(tensors[i].tensor());
    if (!id.has_value()) {
      violations.Invalid(field + ".tensor", "names no tensor");
      continue;
    }
    if (std::find(request.inputs.begin(), request.inputs.end(), *id) == request.inputs.end()) {
      violations.Invalid(field + ".tensor",
                         absl::StrCat(TensorName(*id), " is not an input of this request"));
      continue;
    }
    if (std::find(seen.begin(), seen.end(), *id) != seen.end()) {
      violations.Invalid(field + ".tensor", absl::StrCat(TensorName(*id), " is given twice"));
      continue;
    }
    seen.push_back(*id);
    const int64_t expected = BytesOf(request.spec, *id);
    const uint64_t bytes = tensors[i].data().size();
    if (bytes != static_cast<uint64_t>(expected)) {
      violations.Invalid(field + ".data", absl::StrCat("has ", bytes, " bytes, ", TensorName(*id),
                                                       " takes ", expected));
    }
  }
}

// Checks the fields that only one direction's header has.
void CheckOwnFields(const v1::ForwardHeader& header, const Limits& limits, ValidRequest& request,
                    Violations& violations) {
  request.direction = Direction::kForward;
  if (!header.has_retain()) return;
  request.retain_ttl =
      CheckResidualTtl(header.retain().has_ttl() ? &header.retain().ttl() : nullptr, "retain.ttl",
                       limits, violations);
}

void CheckOwnFields(const v1::BackwardHeader& header, const Limits&, ValidRequest& request,
                    Violations& violations) {
  request.direction = Direction::kBackward;
  const bool reads_residual = !header.residual_handle().empty();
  request.recompute_forward = !header.has_forward_result() && !reads_residual;
  request.residual_handle = header.residual_handle();
  request.keep_residual = header.keep_residual();
  if (reads_residual && header.has_forward_result()) {
    violations.Invalid("has_forward_result", "is set, but the residual has out and lse");
  }
  if (header.keep_residual() && !reads_residual) {
    violations.Invalid("keep_residual", "is set, but residual_handle is not");
  }
  if (header.plan().tuning().has_key_splits() && !request.recompute_forward) {
    violations.Invalid("plan.tuning.key_splits",
                       "applies to a forward pass, which this request does not compute");
  }
}

// Returns how long a prepared part is kept.
absl::Duration ReadPrepareTtl(const v1::PrepareOptions& prepare, const Limits& limits,
                              Violations& violations) {
  if (!prepare.has_ttl()) return limits.default_prepare_ttl;
  const double seconds =
      static_cast<double>(prepare.ttl().seconds()) + 1e-9 * prepare.ttl().nanos();
  const double most = absl::ToDoubleSeconds(limits.max_prepare_ttl);
  if (seconds > 0 && seconds <= most) return absl::Seconds(seconds);
  violations.Invalid(
      "prepare.ttl",
      absl::StrCat("is ", seconds, " s, must be more than 0 and at most ", most, " s"));
  return limits.default_prepare_ttl;
}

// A prepared request moves no tensors, and workers keep no part that leaves or reads a residual.
template <typename Header>
void CheckPrepare(const Header& header, const Limits& limits, ValidRequest& request,
                  Violations& violations) {
  if (!header.has_prepare()) return;
  request.prepare_ttl = ReadPrepareTtl(header.prepare(), limits, violations);
  const auto refuse = [&violations](const char* field, const char* why) {
    violations.Invalid(field, absl::StrCat("is set together with prepare, ", why));
  };
  if (header.has_transport()) refuse("transport", "which moves no tensors");
  if (!header.inline_tensors().empty()) refuse("inline_tensors", "which moves no tensors");
  if (request.retain_ttl) refuse("retain", "but a part that leaves a residual is not kept");
  if (!request.residual_handle.empty()) {
    refuse("residual_handle", "but a part that reads a residual is not kept");
  }
}

bool HasDlse(const v1::ForwardHeader&) { return false; }
bool HasDlse(const v1::BackwardHeader& header) { return header.has_dlse(); }

// The terms that the header states.
ProgramTerms TermsOf(const v1::PlanOptions& plan, const ValidRequest& request) {
  ProgramTerms terms;
  terms.direction = request.direction;
  terms.recompute_forward = request.recompute_forward;
  terms.retains = request.retain_ttl.has_value();
  terms.reads_residual = !request.residual_handle.empty();
  terms.layout = request.choice.layout;
  terms.schedule = request.choice.schedule;
  if (plan.has_world_size()) terms.world_size = request.choice.world_size;
  if (plan.has_stripe()) terms.stripe = request.choice.stripe;
  terms.heads_per_step = request.choice.heads_per_step;
  terms.group_size = request.choice.group_size;
  return terms;
}

template <typename Header>
std::variant<ValidRequest, Rejection> Validate(const Header& header, const Limits& limits) {
  Violations violations(limits.max_error_detail_bytes);
  FindUnknownFields(header, "", violations);
  ValidRequest request;
  CheckOwnFields(header, limits, request, violations);
  CheckPrepare(header, limits, request, violations);
  CheckRequestId(header.request_id(), limits, violations);
  request.spec = ReadSpec({request.direction, header.shape(), header.dtype(), header.options(),
                           header.reply().probability_rows(),
                           IsLsePerDocument(header.reply(), violations), HasDlse(header)},
                          limits, violations);
  request.choice = CheckPlan(header.plan(), limits, violations);
  request.choice.recompute_forward = request.recompute_forward;
  CheckReply(header.reply(), limits, violations);
  request.spec.fp32_results = AsksForFloat32(header.reply(), request.spec.dtype, violations);
  const ProgramTerms terms = TermsOf(header.plan(), request);
  CheckProgram(terms, request.spec, limits, violations);
  CheckInlineSize(header.inline_tensors(), limits, violations);
  request.inputs = ClientInputsOf(request.spec, terms);
  request.outputs = OutputsOf(request.spec, request.direction);
  // Sizes are meaningful only for a valid shape.
  if (violations.empty()) {
    CheckTensorSizes(request.spec, request.direction, request.inputs, limits, violations);
    CheckInlineTensors(header.inline_tensors(), request, violations);
    request.transport = ReadTransport(
        header.transport(),
        {request.spec, request.inputs, request.outputs, header.inline_tensors(), limits},
        violations);
  }
  if (!violations.empty()) return std::move(violations).ToRejection();
  if (request.prepare_ttl) {
    request.inputs.clear();
    request.outputs.clear();
  }
  return request;
}

}  // namespace

absl::Duration CheckResidualTtl(const google::protobuf::Duration* ttl, const char* field,
                                const Limits& limits, Violations& violations) {
  if (ttl == nullptr) return limits.default_residual_ttl;
  const double seconds = static_cast<double>(ttl->seconds()) + 1e-9 * ttl->nanos();
  const double most = absl::ToDoubleSeconds(limits.max_residual_ttl);
  if (seconds > 0 && seconds <= most) return absl::Seconds(seconds);
  violations.Invalid(
      field, absl::StrCat("is ", seconds, " s, must be more than 0 and at most ", most, " s"));
  return limits.default_residual_ttl;
}

std::variant<ValidRequest, Rejection> ValidateRequest(const v1::ForwardHeader& header,
                                                      const Limits& limits) {
  return Validate(header, limits);
}

std::variant<ValidRequest, Rejection> ValidateRequest(const v1::BackwardHeader& header,
                                                      const Limits& limits) {
  return Validate(header, limits);
}

}  // namespace ringattn
