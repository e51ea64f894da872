#include "client/python/proto_dict.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/duration.pb.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ringattn::python {
namespace {

namespace pb = google::protobuf;
namespace py = pybind11;
using Field = pb::FieldDescriptor;

// Returns the common prefix of an enum's names: "LAYOUT_" for Layout, "TIMELINE_CATEGORY_" for
// TimelineCategory.
std::string EnumPrefix(const pb::EnumDescriptor& type) {
  std::string prefix;
  for (const char letter : type.name()) {
    if (absl::ascii_isupper(letter) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(letter);
  }
  return prefix + '_';
}

py::object EnumToPython(const pb::EnumValueDescriptor& value) {
  const std::string prefix = EnumPrefix(*value.type());
  return py::str(absl::AsciiStrToLower(value.name().substr(prefix.size())));
}

py::object MessageToPython(const pb::Message& message) {
  if (message.GetDescriptor() == pb::Duration::descriptor()) {
    const auto& duration = static_cast<const pb::Duration&>(message);
    return py::float_(static_cast<double>(duration.seconds()) + duration.nanos() * 1e-9);
  }
  return ToDict(message);
}

py::object BytesOrText(const Field& field, const std::string& value) {
  if (field.type() == Field::TYPE_BYTES) return py::bytes(value);
  return py::str(value);
}

// `index` is the position in a repeated field, and -1 for a singular field.
py::object ToPython(const pb::Message& message, const Field& field, int index) {
  const pb::Reflection& reflection = *message.GetReflection();
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case Field::CPPTYPE_INT32:
      return py::int_(one ? reflection.GetInt32(message, &field)
                          : reflection.GetRepeatedInt32(message, &field, index));
    case Field::CPPTYPE_INT64:
      return py::int_(one ? reflection.GetInt64(message, &field)
                          : reflection.GetRepeatedInt64(message, &field, index));
    case Field::CPPTYPE_UINT32:
      return py::int_(one ? reflection.GetUInt32(message, &field)
                          : reflection.GetRepeatedUInt32(message, &field, index));
    case Field::CPPTYPE_UINT64:
      return py::int_(one ? reflection.GetUInt64(message, &field)
                          : reflection.GetRepeatedUInt64(message, &field, index));
    case Field::CPPTYPE_DOUBLE:
      return py::float_(one ? reflection.GetDouble(message, &field)
                            : reflection.GetRepeatedDouble(message, &field, index));
    case Field::CPPTYPE_FLOAT:
      return py::float_(one ? reflection.GetFloat(message, &field)
                            : reflection.GetRepeatedFloat(message, &field, index));
    case Field::CPPTYPE_BOOL:
      return py::bool_(one ? reflection.GetBool(message, &field)
                           : reflection.GetRepeatedBool(message, &field, index));
    case Field::CPPTYPE_ENUM:
      return EnumToPython(one ? *reflection.GetEnum(message, &field)
                              : *reflection.GetRepeatedEnum(message, &field, index));
    case Field::CPPTYPE_STRING:
      return BytesOrText(field, one ? reflection.GetString(message, &field)
                                    : reflection.GetRepeatedString(message, &field, index));
    case Field::CPPTYPE_MESSAGE:
      return MessageToPython(one ? reflection.GetMessage(message, &field)
                                 : reflection.GetRepeatedMessage(message, &field, index));
  }
  return py::none();
}

[[noreturn]] void Refuse(absl::string_view name, const std::string& why) {
  throw py::value_error(absl::StrCat(name, ": ", why));
}

void Set(pb::Message& message, const Field& field, py::handle value, const std::string& name);

// Sets a singular field, or appends to a repeated one.
void SetOne(pb::Message& message, const Field& field, py::handle value, const std::string& name) {
  const pb::Reflection& reflection = *message.GetReflection();
  const bool many = field.is_repeated();
  switch (field.cpp_type()) {
    case Field::CPPTYPE_INT32: {
      const auto number = ReadValue<int32_t>(value, name);
      return many ? reflection.AddInt32(&message, &field, number)
                  : reflection.SetInt32(&message, &field, number);
    }
    case Field::CPPTYPE_INT64: {
      const auto number = ReadValue<int64_t>(value, name);
      return many ? reflection.AddInt64(&message, &field, number)
                  : reflection.SetInt64(&message, &field, number);
    }
    case Field::CPPTYPE_UINT32: {
      const auto number = ReadValue<uint32_t>(value, name);
      return many ? reflection.AddUInt32(&message, &field, number)
                  : reflection.SetUInt32(&message, &field, number);
    }
    case Field::CPPTYPE_UINT64: {
      const auto number = ReadValue<uint64_t>(value, name);
      return many ? reflection.AddUInt64(&message, &field, number)
                  : reflection.SetUInt64(&message, &field, number);
    }
    case Field::CPPTYPE_DOUBLE: {
      const auto number = ReadValue<double>(value, name);
      return many ? reflection.AddDouble(&message, &field, number)
                  : reflection.SetDouble(&message, &field, number);
    }
    case Field::CPPTYPE_FLOAT: {
      const auto number = ReadValue<float>(value, name);
      return many ? reflection.AddFloat(&message, &field, number)
                  : reflection.SetFloat(&message, &field, number);
    }
    case Field::CPPTYPE_BOOL: {
      const auto truth = ReadValue<bool>(value, name);
      return many ? reflection.AddBool(&message, &field, truth)
                  : reflection.SetBool(&message, &field, truth);
    }
    case Field::CPPTYPE_ENUM: {
      const auto short_name = ReadValue<std::string>(value, name);
      const int number = EnumNumber(*field.enum_type(), short_name, name);
      return many ? reflection.AddEnumValue(&message, &field, number)
                  : reflection.SetEnumValue(&message, &field, number);
    }
    case Field::CPPTYPE_STRING: {
      auto text = ReadValue<std::string>(value, name);
      return many ? reflection.AddString(&message, &field, std::move(text))
                  : reflection.SetString(&message, &field, std::move(text));
    }
    case Field::CPPTYPE_MESSAGE: {
      pb::Message* part = many ? reflection.AddMessage(&message, &field)
                               : reflection.MutableMessage(&message, &field);
      if (!py::isinstance<py::dict>(value)) Refuse(name, "must be a dict");
      return FromDict(py::reinterpret_borrow<py::dict>(value), name, part);
    }
  }
}

void Set(pb::Message& message, const Field& field, py::handle value, const std::string& name) {
  if (!field.is_repeated()) return SetOne(message, field, value, name);
  if (!py::isinstance<py::sequence>(value)) Refuse(name, "must be a list");
  int index = 0;
  for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
    SetOne(message, field, item, absl::StrCat(name, "[", index++, "]"));
  }
}

}  // namespace

int EnumNumber(const pb::EnumDescriptor& type, absl::string_view short_name,
               absl::string_view name) {
  const std::string prefix = EnumPrefix(type);
  const pb::EnumValueDescriptor* value =
      type.FindValueByName(prefix + absl::AsciiStrToUpper(short_name));
  if (value != nullptr) return value->number();
  std::vector<std::string> choices;
  for (int i = 0; i < type.value_count(); ++i) {
    const pb::EnumValueDescriptor& choice = *type.value(i);
    if (choice.number() == 0) continue;  // unspecified
    choices.push_back(absl::AsciiStrToLower(choice.name().substr(prefix.size())));
  }
  Refuse(name,
         absl::StrCat("is '", short_name, "'; must be one of ", absl::StrJoin(choices, ", ")));
}

py::dict ToDict(const pb::Message& message) {
  const pb::Reflection& reflection = *message.GetReflection();
  const pb::Descriptor& type = *message.GetDescriptor();
  py::dict values;
  for (int i = 0; i < type.field_count(); ++i) {
    const Field& field = *type.field(i);
    const py::str name(field.name());
    if (field.is_repeated()) {
      py::list items;
      for (int j = 0; j < reflection.FieldSize(message, &field); ++j) {
        items.append(ToPython(message, field, j));
      }
      values[name] = items;
    } else if (!field.has_presence() || reflection.HasField(message, &field)) {
      values[name] = ToPython(message, field, -1);
    }
  }
  return values;
}

void FromDict(const py::dict& values, absl::string_view where, pb::Message* message) {
  for (const auto& [key, value] : values) {
    const auto name = ReadValue<std::string>(key, where);
    const std::string path = where.empty() ? name : absl::StrCat(where, ".", name);
    const Field* field = message->GetDescriptor()->FindFieldByName(name);
    if (field == nullptr) Refuse(path, "is not a field of the protocol");
    if (!value.is_none()) Set(*message, *field, value, path);
  }
}

}  // namespace ringattn::python
