#include "common/request/unknown_fields.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>

#include <vector>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Enough to identify the problem; more would not fit into the response.
constexpr int kMaxUnknownFields = 64;

std::string Join(const std::string& prefix, absl::string_view name) {
  return prefix.empty() ? std::string(name) : absl::StrCat(prefix, ".", name);
}

// Returns whether the message or one inside it has an unknown field. Most have none, so this makes
// no paths and no lists.
bool HasUnknownField(const Message& message) {
  const Reflection& reflection = *message.GetReflection();
  if (!reflection.GetUnknownFields(message).empty()) return true;
  const Descriptor& descriptor = *message.GetDescriptor();
  for (int index = 0; index < descriptor.field_count(); ++index) {
    const FieldDescriptor* field = descriptor.field(index);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      if (reflection.HasField(message, field) &&
          HasUnknownField(reflection.GetMessage(message, field))) {
        return true;
      }
      continue;
    }
    const int size = reflection.FieldSize(message, field);
    for (int i = 0; i < size; ++i) {
      if (HasUnknownField(reflection.GetRepeatedMessage(message, field, i))) return true;
    }
  }
  return false;
}

void Find(const Message& message, const std::string& prefix, int* left, Violations& violations) {
  const Reflection& reflection = *message.GetReflection();
  const auto& unknown = reflection.GetUnknownFields(message);
  for (int i = 0; i < unknown.field_count() && *left > 0; ++i, --*left) {
    violations.Unknown(Join(prefix, absl::StrCat(unknown.field(i).number())));
  }
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const std::string path = Join(prefix, field->name());
    if (!field->is_repeated()) {
      Find(reflection.GetMessage(message, field), path, left, violations);
      continue;
    }
    const int size = reflection.FieldSize(message, field);
    for (int i = 0; i<size&& * left> 0; ++i) {
      Find(reflection.GetRepeatedMessage(message, field, i), absl::StrCat(path, "[", i, "]"), left,
           violations);
    }
  }
}

}  // namespace

void FindUnknownFields(const Message& message, const std::string& prefix, Violations& violations) {
  if (!HasUnknownField(message)) return;
  int left = kMaxUnknownFields;
  Find(message, prefix, &left, violations);
}

}  // namespace ringattn
