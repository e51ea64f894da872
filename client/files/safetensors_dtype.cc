#include "client/files/safetensors.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ringattn::client {
namespace {

struct Entry {
  FileDType dtype;
  absl::string_view name;
  int64_t bytes;
};

constexpr Entry kEntries[] = {
    {FileDType::kBool, "BOOL", 1},      {FileDType::kU8, "U8", 1},
    {FileDType::kI8, "I8", 1},          {FileDType::kF8E4M3, "F8_E4M3", 1},
    {FileDType::kF8E5M2, "F8_E5M2", 1}, {FileDType::kU16, "U16", 2},
    {FileDType::kI16, "I16", 2},        {FileDType::kF16, "F16", 2},
    {FileDType::kBF16, "BF16", 2},      {FileDType::kU32, "U32", 4},
    {FileDType::kI32, "I32", 4},        {FileDType::kF32, "F32", 4},
    {FileDType::kU64, "U64", 8},        {FileDType::kI64, "I64", 8},
    {FileDType::kF64, "F64", 8},
};

}  // namespace

absl::string_view FileDTypeName(FileDType dtype) { return kEntries[static_cast<int>(dtype)].name; }

std::string FileDTypeNames() {
  return absl::StrJoin(kEntries, ", ", [](std::string* text, const Entry& entry) {
    absl::StrAppend(text, entry.name);
  });
}

int64_t FileDTypeBytes(FileDType dtype) { return kEntries[static_cast<int>(dtype)].bytes; }

std::optional<FileDType> FileDTypeFromName(absl::string_view name) {
  for (const Entry& entry : kEntries) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

}  // namespace ringattn::client
