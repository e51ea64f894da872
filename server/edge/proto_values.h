// The protocol's enums and the values of common/ that they stand for.
#ifndef RINGATTN_SERVER_EDGE_PROTO_VALUES_H_
#define RINGATTN_SERVER_EDGE_PROTO_VALUES_H_

#include <optional>

#include "common/attention_spec.h"
#include "common/schedule.h"
#include "common/shard_plan.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn {

// Nothing for TENSOR_ID_UNSPECIFIED and for numbers that are no TensorId.
std::optional<TensorId> TensorIdFromNumber(int number);

inline v1::TensorId ToProto(TensorId id) { return static_cast<v1::TensorId>(id); }
v1::DataType ToProto(DType dtype);
v1::Layout ToProto(Layout layout);
v1::Schedule ToProto(ScheduleKind kind);

}  // namespace ringattn

#endif  // RINGATTN_SERVER_EDGE_PROTO_VALUES_H_
