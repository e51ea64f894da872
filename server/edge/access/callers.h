// Callers: identifies the caller of each call on the public listener. Every handler calls it first,
// so that no header of an unknown caller is read.
#ifndef RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_
#define RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
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
  // Without a directory every caller is accepted. The principal is then the certificate's name, and
  // a caller without a certificate is identified by its connection. Both pointers must outlive this
  // object; `directory` may be null.
  Callers(const ClientDirectory* directory, const Limits& limits, Metrics* metrics);

  // REQUIRES: called from the handler (common/security/principal.h). Returns UNAUTHENTICATED with
  // an ErrorInfo for an unknown caller, and counts it.
  std::variant<Caller, grpc::Status> Identify(const grpc::CallbackServerContext& call);

  // Counts and logs a rejected caller. `peer` may be empty.
  void Refused(const Failure& failure, const std::string& peer);
  // Counts an ended Forward or Backward call.
  void CountRequest(const Caller& caller, const char* code);

 private:
  // Number of client names that become metric labels; all others share the label "other".
  static constexpr size_t kMaxLabels = kMaxClients;

  const ClientDirectory* const directory_;
  const Limits limits_;
  prometheus::Family<prometheus::Counter>& failures_;
  prometheus::Family<prometheus::Counter>& requests_;
  absl::Mutex mutex_;
  std::set<std::string> labels_ ABSL_GUARDED_BY(mutex_);
  // The series of requests_ in use, by label and code: finding one by its labels costs more.
  std::map<std::pair<std::string, std::string>, prometheus::Counter*> counters_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_ACCESS_CALLERS_H_
