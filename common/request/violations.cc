#include "common/request/violations.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {

using absl::StatusCode;

absl::Status Rejection::ToStatus() const {
  if (violations.empty()) return absl::Status(code, "invalid request");
  std::string message = absl::StrCat(violations[0].field, ": ", violations[0].description);
  const int64_t others = static_cast<int64_t>(violations.size()) - 1 + violations_left_out;
  if (others > 0) absl::StrAppend(&message, " (and ", others, " more)");
  return absl::Status(code, message);
}

void Violations::Add(Violation violation) {
  invalid_ = invalid_ || violation.code == StatusCode::kInvalidArgument;
  bytes_ += static_cast<int64_t>(violation.field.size() + violation.description.size());
  // The first violation is always included; its sender bounds its size.
  if (!shown_.empty() && bytes_ > max_bytes_) {
    ++left_out_;
  } else {
    shown_.push_back(std::move(violation));
  }
}

void Violations::Invalid(std::string field, std::string description) {
  Add({std::move(field), std::move(description), StatusCode::kInvalidArgument});
}

void Violations::OverLimit(std::string field, std::string description) {
  Add({std::move(field), std::move(description), StatusCode::kResourceExhausted});
}

void Violations::Unknown(std::string field) {
  Add({std::move(field),
       "is not a field of this version of the protocol; remove it or upgrade the service",
       StatusCode::kInvalidArgument});
}

int64_t Violations::Bounded(const char* field, uint64_t value, int64_t least, int64_t limit) {
  if (value < static_cast<uint64_t>(least)) {
    Invalid(field, absl::StrCat("is ", value, ", must be at least ", least));
    return least;
  }
  if (value > static_cast<uint64_t>(limit)) {
    OverLimit(field, absl::StrCat("is ", value, ", the limit is ", limit));
    return least;
  }
  return static_cast<int64_t>(value);
}

Rejection Violations::ToRejection() && {
  Rejection rejection;
  rejection.code = invalid_ ? StatusCode::kInvalidArgument : StatusCode::kResourceExhausted;
  rejection.violations = std::move(shown_);
  rejection.violations_left_out = left_out_;
  return rejection;
}

}  // namespace ringattn
