// Conversion between protobuf messages and Python values by reflection. A message becomes a dict
// with the proto's field names, so a new field needs no code here.
//   message   dict                          repeated   list
//   enum      its short name, "ring" for SCHEDULE_RING
//   Duration  seconds, a float
// All functions need the GIL.
#ifndef RINGATTN_CLIENT_PYTHON_PROTO_DICT_H_
#define RINGATTN_CLIENT_PYTHON_PROTO_DICT_H_

#include <google/protobuf/message.h>
#include <pybind11/pybind11.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn::python {

// Returns every field that is set, and every field without presence.
pybind11::dict ToDict(const google::protobuf::Message& message);

// Sets the fields that `values` has; None leaves a field unset. `where` prefixes names in errors,
// as in "options". Throws pybind11::value_error, naming the field, if there is no such field or the
// value does not fit.
void FromDict(const pybind11::dict& values, absl::string_view where,
              google::protobuf::Message* message);

// Converts to a C++ type. Throws pybind11::value_error, naming `name`, if the value does not fit.
template <typename T>
T ReadValue(pybind11::handle value, absl::string_view name) {
  try {
    return value.cast<T>();
  } catch (const pybind11::cast_error&) {
    throw pybind11::value_error(absl::StrCat(
        name, ": ", pybind11::repr(value).template cast<std::string>(), " is no value of it"));
  }
}

// Sets `target` if there is an item `name` and it is not None.
template <typename T>
void ReadItem(const pybind11::dict& items, const char* name, T* target) {
  if (items.contains(name) && !items[name].is_none()) *target = ReadValue<T>(items[name], name);
}

// Returns the number of an enum's value by its short name; -1 if there is none.
int EnumNumber(const google::protobuf::EnumDescriptor& type, absl::string_view short_name);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PROTO_DICT_H_
