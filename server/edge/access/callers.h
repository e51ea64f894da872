// Callers: whose a call on the public listener is. Every handler of it asks before anything
// else, so that nobody unknown gets as far as a header.
#ifndef RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_
#define RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_

#include <cstddef>
#include <set>
#include <string>
#include <variant>

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "common/observability/metrics.h"
#include "server/edge/access/stream_slots.h"
#include "server/identity/client_directory.h"

namespace ringattn::server {

// Thread safe.
class Callers {
 public:
  // Without a directory everybody is served: a principal is what the certificate says, and
  // without one a client is its connection. Both pointers outlive it; `directory` may be null.
  Callers(const ClientDirectory* directory, const Limits& limits, Metrics* metrics);

  // REQUIRES: called by the handler (common/security/principal.h). The status is
  // UNAUTHENTICATED, with an ErrorInfo, and counted.
  std::variant<Caller, grpc::Status> Identify(const grpc::CallbackServerContext& call);

  // Somebody was turned away. `peer`: may be empty.
  void Refused(const Failure& failure, const std::string& peer);
  // A Forward or Backward call has ended.
  void CountRequest(const Caller& caller, const char* code);

 private:
  // Names of this many clients become labels, all others "other".
  static constexpr size_t kMaxLabels = kMaxClients;

  const ClientDirectory* const directory_;
  const Limits limits_;
  prometheus::Family<prometheus::Counter>& failures_;
  prometheus::Family<prometheus::Counter>& requests_;
  absl::Mutex mutex_;
  std::set<std::string> labels_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_
