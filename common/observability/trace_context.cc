#include "common/observability/trace_context.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn {
namespace {

// version "-" trace id "-" parent id "-" flags
constexpr size_t kTraceIdBegin = 3, kTraceIdSize = 32;
constexpr size_t kParentIdBegin = 36, kParentIdSize = 16;
constexpr size_t kFlagsBegin = 53;
constexpr size_t kSize = 55;
constexpr int kKnownFlags = 0x03;  // sampled, random

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsId(absl::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != absl::string_view::npos;
}

int HexDigit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

}  // namespace

std::optional<std::string> ReadTraceparent(absl::string_view text) {
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') {
    return std::nullopt;
  }
  const absl::string_view version = text.substr(0, 2);
  if (!IsHex(version) || version == "ff") return std::nullopt;
  // Later versions may append fields after another dash.
  if (text.size() > kSize && (version == "00" || text[kSize] != '-')) return std::nullopt;
  const absl::string_view trace_id = text.substr(kTraceIdBegin, kTraceIdSize);
  const absl::string_view parent_id = text.substr(kParentIdBegin, kParentIdSize);
  const absl::string_view flags = text.substr(kFlagsBegin, 2);
  if (!IsId(trace_id) || !IsId(parent_id) || !IsHex(flags)) return std::nullopt;
  return absl::StrCat("00-", trace_id, "-", parent_id, "-0", HexDigit(flags[1]) & kKnownFlags);
}

absl::string_view TraceIdOf(absl::string_view traceparent) {
  return traceparent.size() < kSize ? absl::string_view()
                                    : traceparent.substr(kTraceIdBegin, kTraceIdSize);
}

}  // namespace ringattn
