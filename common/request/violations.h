// The violations of a request, by field.
#ifndef RINGATTN_COMMON_REQUEST_VIOLATIONS_H_
#define RINGATTN_COMMON_REQUEST_VIOLATIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ringattn {

// One violation, at a field in dotted proto style relative to the header: "shape.head_dim",
// "shape.packed.cu_seqlens_q[3]", "options.window.left".
struct Violation {
  std::string field;
  std::string description;
  // INVALID_ARGUMENT, UNIMPLEMENTED (a field that this version does not support) or
  // RESOURCE_EXHAUSTED (over a limit).
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

struct Rejection {
  // INVALID_ARGUMENT if any violation has it, else RESOURCE_EXHAUSTED.
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  // All violations that fit Limits::max_error_detail_bytes.
  std::vector<Violation> violations;
  int64_t violations_left_out = 0;

  absl::Status ToStatus() const;  // the first violation and the number of others
};

// Collects violations up to a total size. Not thread safe.
class Violations {
 public:
  explicit Violations(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void Add(Violation violation);
  void Invalid(std::string field, std::string description);
  void OverLimit(std::string field, std::string description);
  void Unknown(std::string field);  // a field that the protocol does not have

  // Checks least <= value <= limit. Returns the value, or `least` if it is invalid, so that later
  // checks stay bounded.
  int64_t Bounded(const char* field, uint64_t value, int64_t least, int64_t limit);

  bool empty() const { return shown_.empty(); }
  Rejection ToRejection() &&;

 private:
  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  int64_t left_out_ = 0;
  bool invalid_ = false;
  std::vector<Violation> shown_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_VIOLATIONS_H_
