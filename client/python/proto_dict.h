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

#include <limits>
#include <string>
#include <type_traits>
#include <vector>

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

// Describes a C++ type for error texts: "a whole number from 0 to 4294967295".
template <typename T>
std::string KindOf() {
  if constexpr (std::is_same_v<T, bool>) {
    return "True or False";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a string";
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return "a list of strings";
  } else if constexpr (std::is_floating_point_v<T>) {
    return "a number";
  } else {
    static_assert(std::is_integral_v<T>);
    return absl::StrCat("a whole number from ", std::numeric_limits<T>::min(), " to ",
                        std::numeric_limits<T>::max());
  }
}

// Converts to a C++ type. Throws pybind11::value_error, naming `name`, if the value does not fit.
template <typename T>
T ReadValue(pybind11::handle value, absl::string_view name) {
  try {
    return value.cast<T>();
  } catch (const pybind11::cast_error&) {
    throw pybind11::value_error(absl::StrCat(name, ": is ",
                                             pybind11::repr(value).template cast<std::string>(),
                                             "; must be ", KindOf<T>()));
  }
}

// Sets `target` if there is an item `name` and it is not None.
template <typename T>
void ReadItem(const pybind11::dict& items, const char* name, T* target) {
  if (items.contains(name) && !items[name].is_none()) *target = ReadValue<T>(items[name], name);
}

// Returns the number of an enum's value by its short name. Throws pybind11::value_error, which
// names `name` and lists the values, if there is none.
int EnumNumber(const google::protobuf::EnumDescriptor& type, absl::string_view short_name,
               absl::string_view name);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PROTO_DICT_H_
