// Requests: the client's side of requests, from arrival until exactly one FinishRequest or
// FailRequest. Keeps the view of ended requests for GetStatus, within limits.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_REQUESTS_H_
#define RINGATTN_SERVER_CORE_REQUESTS_REQUESTS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/events/operation_view.h"
#include "server/core/requests/regions.h"

namespace ringattn::server {

struct Request {
  RequestArrived arrived;                     // without its spec
  std::shared_ptr<const AttentionSpec> spec;  // until the request is accepted
  absl::Time arrived_at;
  int64_t bytes = 0;            // of all inputs
  int64_t query_tokens = 0;     // summed over batch rows
  bool many_documents = false;  // its plan has more than kManyDocuments
  v1::RequestState state = v1::REQUEST_STATE_UNSPECIFIED;
  std::shared_ptr<const Plan> plan;  // without spans; null: not yet
  uint64_t plan_generation = 0;
  std::vector<bool> serving_ranks;  // members of that generation with kernels for the request
  uint64_t asked_generation = 0;    // generation of the pending PlanThis; 0: none
  double planning_seconds = 0;      // of one core, spent on its plans
  std::string operation_id;         // empty while queued
  // A worker lacked memory: no new attempt before this many releases.
  uint64_t blocked_until_release = 0;
  // Set after a rejection while other operations reserved as well, since they may have competed.
  bool reserves_alone = false;
  // A worker rejected an inline attempt. The next one reserves memory first.
  bool was_refused_inline = false;
  // Rings of fewer workers lack the memory for it.
  int min_world_size = 0;
  // Kernel workspace for this plan, as reported by workers that rejected it.
  std::map<ConnectionId, int64_t> workspace_bytes;
  TransportDecision transport;  // to the members asked
  absl::Time accepted_at;
  absl::Time run_at;
  absl::Time download_at;
  std::string not_retained;               // why its residual was given up
  std::vector<std::string> member_names;  // by ring rank, once accepted
  uint64_t generation = 0;                // once accepted

  bool retains() const { return arrived.retain.has_value(); }
  // Predicted; 0 if the request is only prepared.
  double RunSeconds(const Plan& its_plan) const {
    return arrived.prepare_ttl ? 0 : its_plan.predicted_compute_seconds;
  }
  StreamId stream() const { return arrived.stream; }
  int64_t WorkspaceOn(ConnectionId connection) const {
    const auto known = workspace_bytes.find(connection);
    return known == workspace_bytes.end() ? 0 : known->second;
  }
};

// Returns the bytes that the client uploads.
int64_t InputBytes(const RequestArrived& request);
// Returns the memory that the view occupies.
int64_t BytesOf(const OperationView& view);

// Not thread safe. References stay valid until their request ends.
class Requests {
 public:
  // Both arguments must outlive this object.
  Requests(const CoordinatorConfig* config, ActionBatch* batch)
      : config_(*config), batch_(*batch) {}

  // REQUIRES: neither the stream nor the request_id is known.
  Request& Add(RequestArrived arrived);
  void SetState(Request& request, v1::RequestState state);
  // What FinishRequest reports.
  struct Outcome {
    std::string residual_handle = {};
    std::string residual_reason = {};  // why a requested residual was not kept
    std::optional<FinishRequest::Prepared> prepared = {};
  };
  // Both end the request and keep its view.
  void Succeed(Request& request, Outcome outcome);
  void Fail(Request& request, const Failure& failure);
  // Ends the request like Fail, but returns the action for the caller to emit.
  FailRequest FailSilently(Request& request, const Failure& failure);
  // For a stream that never became a request.
  void Refuse(StreamId stream, const Failure& failure);

  // Returns the requests whose deadline has passed, or that have waited too long for a ring.
  // `ringless_since`: when the last ring ended; nullopt while there is one.
  std::vector<std::pair<StreamId, Failure>> CheckTimers(
      std::optional<absl::Time> ringless_since) const;

  Request* Find(StreamId stream);
  const Request* Find(StreamId stream) const;
  // Request ids are unique per principal.
  const Request* FindById(const std::string& request_id, const std::string& principal) const;
  // In flight or recently ended.
  std::optional<OperationView> FindView(const std::string& request_id,
                                        const std::string& principal) const;
  // Requests of one client in flight.
  int64_t CountOf(const std::string& client) const;
  // In flight, in order of arrival.
  const std::map<StreamId, Request>& all() const { return requests_; }
  bool empty() const { return requests_.empty(); }
  int64_t size() const { return static_cast<int64_t>(requests_.size()); }
  // Memory of the views of ended requests.
  int64_t finished_bytes() const { return finished_bytes_; }

 private:
  using Name = std::pair<std::string, std::string>;  // principal, request_id
  struct Finished {
    OperationView view;
    int64_t bytes = 0;
  };

  static Name NameOf(const Request& request);
  OperationView ViewOf(const Request& request) const;
  void Forget(const Request& request, const std::optional<Failure>& failure);

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  std::map<StreamId, Request> requests_;
  std::map<Name, StreamId> stream_by_name_;
  std::map<std::string, int64_t> count_by_client_;  // in flight
  std::deque<Finished> finished_;                   // newest last
  int64_t finished_bytes_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REQUESTS_H_
