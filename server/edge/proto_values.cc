#include "server/edge/proto_values.h"

namespace ringattn {

// One numbering on both sides.
static_assert(static_cast<int>(TensorId::kQ) == v1::TENSOR_ID_Q);
static_assert(static_cast<int>(TensorId::kLse) == v1::TENSOR_ID_LSE);
static_assert(static_cast<int>(TensorId::kDout) == v1::TENSOR_ID_DOUT);
static_assert(static_cast<int>(TensorId::kDv) == v1::TENSOR_ID_DV);

std::optional<TensorId> TensorIdFromNumber(int number) {
  if (number < v1::TENSOR_ID_Q || number > v1::TENSOR_ID_DV) return std::nullopt;
  return static_cast<TensorId>(number);
}

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

v1::Layout ToProto(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return v1::LAYOUT_CONTIGUOUS;
    case Layout::kZigzag:
      return v1::LAYOUT_ZIGZAG;
    case Layout::kStriped:
      return v1::LAYOUT_STRIPED;
  }
  return v1::LAYOUT_UNSPECIFIED;
}

v1::Schedule ToProto(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kSingle:
      return v1::SCHEDULE_SINGLE;
    case ScheduleKind::kRing:
      return v1::SCHEDULE_RING;
  }
  return v1::SCHEDULE_UNSPECIFIED;
}

}  // namespace ringattn
