// A case of the sweep through the public API: a running service, the client library, and the
// oracle as the judge.
#ifndef RINGATTN_TESTS_E2E_SERVICE_CASE_H_
#define RINGATTN_TESTS_E2E_SERVICE_CASE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "tests/cases/case_generator.h"

namespace ringattn::tests {

struct ServiceOutcome {
  absl::Status status;    // the call's
  absl::Time ended;       // when it was known
  std::string judgement;  // of its result in fp64: empty if it is right, or if there is none

  bool passed() const { return status.ok() && judgement.empty(); }
};

// Blocks until the call has ended. The result's space is filled with a pattern before that no
// result has. `transport`: as the command line's. Thread safe.
ServiceOutcome RunThroughService(client::Client& client, const Case& c,
                                 absl::Duration deadline = absl::Seconds(60),
                                 const std::string& transport = "auto");

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_E2E_SERVICE_CASE_H_
