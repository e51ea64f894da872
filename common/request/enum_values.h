// Text of a violation: the number of an enum field that is not accepted.
//
//   violations.Invalid("shape.packing", OtherThan<v1::Packing>(9));
//     -> "is 9, must be PACKING_QKV or PACKING_KV"
#ifndef RINGATTN_COMMON_REQUEST_ENUM_VALUES_H_
#define RINGATTN_COMMON_REQUEST_ENUM_VALUES_H_

#include <google/protobuf/generated_enum_reflection.h>

#include <string>

#include "absl/functional/function_ref.h"

namespace ringattn {

// Returns `number` and the names of the accepted values in `type`. UNSPECIFIED (0) is not listed.
std::string OtherThan(int number, const google::protobuf::EnumDescriptor& type,
                      absl::FunctionRef<bool(int)> accepts);

// The same if every value of the enum is accepted.
template <typename Enum>
std::string OtherThan(int number) {
  return OtherThan(number, *google::protobuf::GetEnumDescriptor<Enum>(), [](int) { return true; });
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_ENUM_VALUES_H_
