#include "common/request/enum_values.h"

#include <google/protobuf/descriptor.h>

#include "absl/strings/str_cat.h"

namespace ringattn {

std::string OtherThan(int number, const google::protobuf::EnumDescriptor& type,
                      absl::FunctionRef<bool(int)> accepts) {
  std::string text;
  const std::string* last = nullptr;
  for (int i = 0; i < type.value_count(); ++i) {
    const google::protobuf::EnumValueDescriptor& value = *type.value(i);
    if (value.number() == 0 || !accepts(value.number())) continue;
    if (last != nullptr) absl::StrAppend(&text, text.empty() ? "" : ", ", *last);
    last = &value.name();
  }
  if (last != nullptr) absl::StrAppend(&text, text.empty() ? "" : " or ", *last);
  const std::string given = number == 0 ? "is not set" : absl::StrCat("is ", number);
  return absl::StrCat(given, ", must be ", text);
}

}  // namespace ringattn
