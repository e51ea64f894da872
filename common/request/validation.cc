#include "common/request/validation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/request/compute_dtype_rules.h"
#include "common/request/dilation_rules.h"
#include "common/request/option_fields.h"
#include "common/request/shape_rules.h"
#include "common/request/transport_rules.h"
#include "common/request/unknown_fields.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

// An enum's number that is neither UNSPECIFIED nor a value that this version knows.
template <typename Enum>
void CheckEnum(Enum value, const char* field, const char* type, Violations& violations) {
  if (value == 0 || FromProto(value).has_value()) return;
  violations.Invalid(field, absl::StrCat(static_cast<int>(value), " is no value of ", type));
}

DType CheckDType(v1::DataType proto, Violations& violations) {
  CheckEnum(proto, "dtype", "DataType", violations);
  const std::optional<DType> dtype = FromProto(proto);
  if (!dtype.has_value()) violations.Invalid("dtype", "must be given");
  return dtype.value_or(DType::kFloat32);
}

// 0 where it is not set. Which values a device takes, it says itself.
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

// As many as the ring is to have, each once.
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
  CheckEnum(plan.layout(), "plan.layout", "Layout", violations);
  CheckEnum(plan.schedule(), "plan.schedule", "Schedule", violations);
  PlanChoice choice;
  choice.layout = FromProto(plan.layout());
  choice.schedule = FromProto(plan.schedule());
  if (plan.has_world_size()) {
    choice.world_size = static_cast<int>(
        violations.Bounded("plan.world_size", plan.world_size(), 1, limits.max_world_size));
    if (choice.schedule == ScheduleKind::kSingle && plan.world_size() > 1) {
      violations.Invalid("plan.world_size",
                         absl::StrCat("is ", plan.world_size(), ", but plan.schedule is single"));
    }
  }
  if (plan.has_heads_per_step()) {
    choice.heads_per_step =
        violations.Bounded("plan.heads_per_step", plan.heads_per_step(), 1, limits.max_heads);
    if (choice.schedule != ScheduleKind::kAllGather) {
      violations.Invalid("plan.heads_per_step", "is set, but plan.schedule is not all_gather");
    }
  }
  if (plan.has_stripe()) {
    choice.stripe = violations.Bounded("plan.stripe", plan.stripe(), 1, limits.max_tokens);
    if (choice.layout != Layout::kStriped) {
      violations.Invalid("plan.stripe", "is set, but plan.layout is not striped");
    }
  }
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
    violations.Invalid("reply.progress_interval", absl::StrCat("must be at least ", least, " s"));
  }
}

// What a schedule does not take of the rest of the request.
void CheckScheduleTakes(const PlanChoice& choice, const AttentionSpec& spec,
                        Violations& violations) {
  const AttentionOptions& options = spec.options;
  if (choice.schedule.has_value() && KeepsKeysInPlace(*choice.schedule)) {
    if (!spec.probability_rows.empty()) {
      violations.Invalid(
          "reply.probability_rows",
          absl::StrCat("are given, but plan.schedule is ", ScheduleKindName(*choice.schedule),
                       ": ring, all_gather and single return them"));
    }
  }
  const char* const refused = spec.pairs_by_keys ? NotCutByKeys(spec) : nullptr;
  if (refused != nullptr) {
    violations.Invalid(
        "plan.schedule",
        absl::StrCat("is ", ScheduleKindName(*choice.schedule),
                     ", where devices have the columns of their keys, which a ", refused,
                     " does not have by itself: ring, all_gather and "
                     "single take one"));
  }
  if (choice.heads_per_step == 0) return;
  if (!spec.probability_rows.empty()) {
    violations.Invalid("plan.heads_per_step", "is set, but reply.probability_rows are given");
  }
  if (spec.shape.num_kv_heads % choice.heads_per_step != 0) {
    violations.Invalid("plan.heads_per_step",
                       absl::StrCat("is ", choice.heads_per_step, ": must divide num_kv_heads, ",
                                    spec.shape.num_kv_heads));
  }
  if (options.bias.has_value() && options.bias->gradient && !options.bias->per_head &&
      choice.heads_per_step != spec.shape.num_kv_heads) {
    violations.Invalid("plan.heads_per_step",
                       "is set, but the gradient of a bias that heads share is the sum over all "
                       "of them at once");
  }
}

// Whether results are to be fp32 where the request's dtype is another.
bool AsksForFloat32(const v1::ReplyOptions& reply, DType dtype, Violations& violations) {
  CheckEnum(reply.output_dtype(), "reply.output_dtype", "DataType", violations);
  const DType asked = FromProto(reply.output_dtype()).value_or(dtype);
  if (asked != dtype && asked != DType::kFloat32) {
    violations.Invalid("reply.output_dtype",
                       absl::StrCat("is ", DTypeName(asked), ": must be the request's dtype, ",
                                    DTypeName(dtype), ", or fp32"));
  }
  return asked == DType::kFloat32 && dtype != DType::kFloat32;
}

// Whether lse and dlse travel per document.
bool IsLsePerDocument(const v1::ReplyOptions& reply, const AttentionShape& shape,
                      Violations& violations) {
  switch (reply.lse_format()) {
    case v1::LSE_FORMAT_UNSPECIFIED:
      return false;
    case v1::LSE_FORMAT_PER_DOCUMENT:
      if (!shape.packed) {
        violations.Invalid("reply.lse_format", "is per document, but shape.packed is not set");
      }
      return shape.packed;
    default:
      violations.Invalid("reply.lse_format", absl::StrCat(static_cast<int>(reply.lse_format()),
                                                          " is no value of LseFormat"));
      return false;
  }
}

// REQUIRES: the shape is right, or `violations` has why it is not.
std::vector<ProbabilityRow> CheckProbabilityRows(const v1::ReplyOptions& reply,
                                                 const AttentionShape& shape, const Limits& limits,
                                                 Violations& violations) {
  std::vector<ProbabilityRow> rows;
  if (reply.probability_rows().empty() || !violations.empty()) return rows;
  const std::string list = "reply.probability_rows";
  if (reply.probability_rows_size() > limits.max_probability_rows) {
    violations.OverLimit(list, absl::StrCat("has ", reply.probability_rows_size(),
                                            " rows, the limit is ", limits.max_probability_rows));
    return rows;
  }
  const int64_t batches = shape.packed ? shape.num_documents() : shape.batch;
  rows.reserve(reply.probability_rows_size());
  for (int i = 0; i < reply.probability_rows_size(); ++i) {
    const v1::ProbabilityRow& row = reply.probability_rows(i);
    const std::string field = absl::StrCat(list, "[", i, "]");
    if (row.batch() >= static_cast<uint64_t>(batches)) {
      violations.Invalid(field + ".batch",
                         absl::StrCat("is ", row.batch(), " of ", batches,
                                      shape.packed ? " documents" : " batch rows"));
      continue;
    }
    const auto batch = static_cast<int64_t>(row.batch());
    const int64_t queries =
        shape.packed ? shape.cu_seqlens_q[batch + 1] - shape.cu_seqlens_q[batch] : shape.seq_len_q;
    if (row.position() >= static_cast<uint64_t>(queries)) {
      violations.Invalid(field + ".position",
                         absl::StrCat("is ", row.position(), " of ", queries, " queries"));
      continue;
    }
    rows.push_back({batch, static_cast<int64_t>(row.position())});
  }
  return rows;
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

void CheckBytes(const ValidRequest& request, const Limits& limits, Violations& violations) {
  int64_t total = 0;
  const auto add = [&](TensorId id) {
    const int64_t bytes = BytesOf(request.spec, id);
    total += std::min(bytes, limits.max_request_bytes);
    if (bytes <= limits.max_tensor_bytes) return;
    violations.OverLimit(
        "shape", absl::StrCat(TensorName(id), " takes ", bytes < kSaturatedBytes ? "" : "at least ",
                              bytes, " bytes, the limit is ", limits.max_tensor_bytes));
  };
  for (TensorId id : request.inputs) add(id);
  for (TensorId id : request.outputs) add(id);
  if (total > limits.max_request_bytes) {
    violations.OverLimit("shape", absl::StrCat("inputs and outputs take more than ",
                                               limits.max_request_bytes, " bytes"));
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
                         absl::StrCat(TensorName(*id), " is no input of this request"));
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

// A request's mask is said in one place.
template <typename Header>
void CheckOneRule(const Header& header, Violations& violations) {
  if (header.shape().packed().options().empty()) return;
  const auto refuse = [&](const char* field) {
    violations.Invalid(field, "is given beside shape.packed.options, which each document has");
  };
  if (header.options().causal()) refuse("options.causal");
  if (header.options().has_window()) refuse("options.window");
}

// A bias is of the request's type or fp32.
template <typename Header>
void CheckBiasDType(const Header& header, Violations& violations) {
  const v1::Bias& bias = header.options().bias();
  if (!bias.has_dtype() || bias.dtype() == v1::DATA_TYPE_FLOAT32 ||
      bias.dtype() == header.dtype()) {
    return;
  }
  violations.Invalid("options.bias.dtype", "must be the request's dtype or fp32");
}

// What one direction's header has beside the fields that both have.
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
  request.spec.has_dlse = header.has_dlse();
  if (!header.reply().probability_rows().empty()) {
    violations.Invalid("reply.probability_rows", "are of Forward");
  }
  if (header.plan().tuning().has_key_splits() && !request.recompute_forward) {
    violations.Invalid("plan.tuning.key_splits", "is of a forward pass, which is given");
  }
}

template <typename Header>
std::variant<ValidRequest, Rejection> Validate(const Header& header, const Limits& limits) {
  Violations violations(limits.max_error_detail_bytes);
  FindUnknownFields(header, "", violations);
  ValidRequest request;
  CheckOwnFields(header, limits, request, violations);
  CheckRequestId(header.request_id(), limits, violations);
  request.spec.dtype = CheckDType(header.dtype(), violations);
  request.spec.shape = CheckShape(header.shape(), limits, violations);
  request.spec.options = ReadOptions(header.options(), request.spec.shape, violations);
  CheckOneRule(header, violations);
  CheckBiasDType(header, violations);
  request.choice = CheckPlan(header.plan(), limits, violations);
  request.choice.recompute_forward = request.recompute_forward;
  CheckReply(header.reply(), limits, violations);
  request.spec.fp32_results = AsksForFloat32(header.reply(), request.spec.dtype, violations);
  request.spec.lse_per_document = IsLsePerDocument(header.reply(), request.spec.shape, violations);
  request.spec.probability_rows =
      CheckProbabilityRows(header.reply(), request.spec.shape, limits, violations);
  request.spec.pairs_by_keys = request.choice.schedule.has_value() &&
                               CutsPairsByKeys(*request.choice.schedule, request.spec.options);
  CheckScheduleTakes(request.choice, request.spec, violations);
  CheckDilation(request.choice, request.spec, limits, violations);
  CheckComputeDType(request.spec, request.direction, request.retain_ttl.has_value(), violations);
  CheckInlineSize(header.inline_tensors(), limits, violations);
  request.inputs = InputsOf(request.spec, request.direction, request.recompute_forward);
  request.outputs = OutputsOf(request.spec, request.direction);
  if (!request.residual_handle.empty()) {
    std::vector<TensorId>& inputs = request.inputs;
    inputs.erase(std::remove_if(inputs.begin(), inputs.end(),
                                [](TensorId id) { return !IsSentBesideResidual(id); }),
                 inputs.end());
  }
  // Sizes mean something only for a shape that is right.
  if (violations.empty()) {
    CheckBytes(request, limits, violations);
    CheckInlineTensors(header.inline_tensors(), request, violations);
    request.transport = ReadTransport(
        header.transport(),
        {request.spec, request.inputs, request.outputs, header.inline_tensors()}, violations);
  }
  if (!violations.empty()) return std::move(violations).ToRejection();
  return request;
}

}  // namespace

absl::Duration CheckResidualTtl(const google::protobuf::Duration* ttl, const char* field,
                                const Limits& limits, Violations& violations) {
  if (ttl == nullptr) return limits.default_residual_ttl;
  const double seconds = static_cast<double>(ttl->seconds()) + 1e-9 * ttl->nanos();
  const double most = absl::ToDoubleSeconds(limits.max_residual_ttl);
  if (seconds > 0 && seconds <= most) return absl::Seconds(seconds);
  violations.Invalid(field, absl::StrCat("must be more than 0 and at most ", most, " s"));
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
