// Converts between the values of common/ and the messages and enums of ringattn.v1. Pure.
//
// FromProto of an enum returns nullopt for UNSPECIFIED and for unknown numbers.
#ifndef RINGATTN_COMMON_WIRE_PROTO_VALUES_H_
#define RINGATTN_COMMON_WIRE_PROTO_VALUES_H_

#include <optional>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/attention/tuning.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn {

v1::DataType ToProto(DType dtype);
v1::Layout ToProto(Layout layout);
v1::Schedule ToProto(ScheduleKind kind);
v1::Packing ToProto(Packing packing);
inline v1::TensorId ToProto(TensorId id) { return static_cast<v1::TensorId>(id); }

std::optional<DType> FromProto(v1::DataType dtype);
std::optional<Layout> FromProto(v1::Layout layout);
std::optional<ScheduleKind> FromProto(v1::Schedule schedule);
// UNSPECIFIED becomes kNone.
std::optional<Packing> FromProto(v1::Packing packing);

// Writes to an empty message. (Options: common/request/option_fields.h.)
void ToProto(const AttentionShape& shape, v1::AttentionShape* proto);

void ToProto(const Tuning& tuning, v1::Tuning* proto);
Tuning FromProto(const v1::Tuning& proto);

MaskRule FromProto(const v1::DocumentOptions& options);

// Reads a shape that this service wrote. REQUIRES: sizes within Limits.
AttentionShape FromProto(const v1::AttentionShape& proto);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_PROTO_VALUES_H_
