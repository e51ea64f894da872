#include "common/request/residual_header.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/request/option_fields.h"
#include "common/request/shape_rules.h"
#include "common/request/unknown_fields.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

constexpr char kDiffers[] = "differs from the residual's Forward";

// Serialises a message with only this field, so that an empty field differs from a missing one.
std::string BytesOfField(const google::protobuf::Message& message,
                         const google::protobuf::FieldDescriptor* field) {
  std::unique_ptr<google::protobuf::Message> alone(message.New());
  alone->CopyFrom(message);
  const google::protobuf::Descriptor* type = message.GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    if (type->field(i) != field) alone->GetReflection()->ClearField(alone.get(), type->field(i));
  }
  return alone->SerializeAsString();
}

// Returns the first field in which two messages of one type differ.
std::string FirstDifference(const google::protobuf::Message& a,
                            const google::protobuf::Message& b) {
  const google::protobuf::Descriptor* type = a.GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = type->field(i);
    if (BytesOfField(a, field) != BytesOfField(b, field)) return field->name();
  }
  return "";
}

void CheckShapeIsSame(const AttentionSpec& forward, const v1::AttentionShape& said,
                      const Limits& limits, Violations& violations) {
  const AttentionShape shape = CheckShape(said, limits, violations);
  if (!violations.empty() || shape == forward.shape) return;
  v1::AttentionShape theirs, ours;
  ToProto(shape, &theirs);
  ToProto(forward.shape, &ours);
  violations.Invalid(absl::StrCat("shape.", FirstDifference(theirs, ours)), kDiffers);
}

void CheckOptionsAreSame(const AttentionSpec& forward, const v1::AttentionOptions& said,
                         Violations& violations) {
  const AttentionOptions options = ReadOptions(said, forward.shape, violations);
  if (!violations.empty() || options == forward.options) return;
  v1::AttentionOptions theirs, ours;
  WriteOptions(options, &theirs);
  WriteOptions(forward.options, &ours);
  violations.Invalid(absl::StrCat("options.", FirstDifference(theirs, ours)), kDiffers);
}

void CheckPlanIsSame(const PlanChoice& plan, const std::vector<std::string>& members,
                     const v1::PlanOptions& said, Violations& violations) {
  const auto differs = [&](const char* field) { violations.Invalid(field, kDiffers); };
  if (said.layout() != 0 && said.layout() != ToProto(*plan.layout)) differs("plan.layout");
  // On one device every schedule becomes `single` with all heads at once, so the Forward's plan
  // options are valid here too.
  const bool is_alone = plan.schedule == ScheduleKind::kSingle;
  const bool is_schedule = FromProto(said.schedule()).has_value();
  if (said.schedule() != 0 && said.schedule() != ToProto(*plan.schedule) &&
      !(is_alone && is_schedule)) {
    differs("plan.schedule");
  }
  if (said.has_world_size() && said.world_size() != static_cast<uint32_t>(*plan.world_size)) {
    differs("plan.world_size");
  }
  if (said.has_stripe() && said.stripe() != static_cast<uint64_t>(plan.stripe)) {
    differs("plan.stripe");
  }
  if (said.has_heads_per_step() &&
      said.heads_per_step() != static_cast<uint32_t>(plan.heads_per_step) &&
      !(is_alone && said.schedule() == v1::SCHEDULE_ALL_GATHER)) {
    differs("plan.heads_per_step");
  }
  if (said.has_group_size() && said.group_size() != static_cast<uint32_t>(plan.group_size) &&
      !(is_alone && said.schedule() == v1::SCHEDULE_DOUBLE_RING)) {
    differs("plan.group_size");
  }
  if (!said.members().empty() &&
      !std::equal(said.members().begin(), said.members().end(), members.begin(), members.end())) {
    violations.Invalid("plan.members",
                       absl::StrCat("differ from the Forward's members, which hold the residual: ",
                                    absl::StrJoin(members, ", ")));
  }
}

}  // namespace

std::optional<Rejection> FillFromResidual(const AttentionSpec& forward, const PlanChoice& plan,
                                          const std::vector<std::string>& members,
                                          const Limits& limits, v1::BackwardHeader* header) {
  Violations violations(limits.max_error_detail_bytes);
  FindUnknownFields(*header, "", violations);  // before the Forward's fields replace them
  if (header->has_shape()) CheckShapeIsSame(forward, header->shape(), limits, violations);
  if (header->dtype() != v1::DATA_TYPE_UNSPECIFIED && header->dtype() != ToProto(forward.dtype)) {
    violations.Invalid("dtype", kDiffers);
  }
  if (header->has_options()) CheckOptionsAreSame(forward, header->options(), violations);
  CheckPlanIsSame(plan, members, header->plan(), violations);
  const v1::DataType results = ToProto(forward.result_dtype());
  const v1::DataType said = header->reply().output_dtype();
  if (said != v1::DATA_TYPE_UNSPECIFIED && said != results) {
    violations.Invalid("reply.output_dtype", kDiffers);
  }
  if (!violations.empty()) return std::move(violations).ToRejection();

  const v1::Tuning tuning = header->plan().tuning();
  const bool is_tuned = header->plan().has_tuning();
  header->clear_shape();
  header->clear_options();
  header->clear_plan();
  if (is_tuned) *header->mutable_plan()->mutable_tuning() = tuning;
  ToProto(forward.shape, header->mutable_shape());
  header->set_dtype(ToProto(forward.dtype));
  WriteOptions(forward.options, header->mutable_options());
  header->mutable_reply()->set_output_dtype(results);
  header->mutable_plan()->set_layout(ToProto(*plan.layout));
  header->mutable_plan()->set_schedule(ToProto(*plan.schedule));
  header->mutable_plan()->set_world_size(static_cast<uint32_t>(*plan.world_size));
  if (*plan.layout == Layout::kStriped) {
    header->mutable_plan()->set_stripe(static_cast<uint64_t>(plan.stripe));
  }
  if (plan.heads_per_step != 0) {
    header->mutable_plan()->set_heads_per_step(static_cast<uint32_t>(plan.heads_per_step));
  }
  if (plan.group_size != 0) {
    header->mutable_plan()->set_group_size(static_cast<uint32_t>(plan.group_size));
  }
  return std::nullopt;
}

}  // namespace ringattn
