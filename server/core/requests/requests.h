// Requests: the client's side, from arrival until exactly one FinishRequest or FailRequest,
// and for a while afterwards what GetStatus may still ask for.
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
#include "server/core/events/batch.h"
#include "server/core/events/config.h"
#include "server/core/events/operation_view.h"
#include "server/core/requests/regions.h"

namespace ringattn::server {

struct Request {
  RequestArrived arrived;                     // without its spec
  std::shared_ptr<const AttentionSpec> spec;  // until it is accepted
  absl::Time arrived_at;
  int64_t bytes = 0;            // of all inputs
  int64_t query_tokens = 0;     // of all batch rows
  bool many_documents = false;  // a plan of it has more than kManyDocuments
  v1::RequestState state = v1::REQUEST_STATE_UNSPECIFIED;
  std::shared_ptr<const Plan> plan;  // without its spans; null: not yet
  uint64_t plan_generation = 0;
  uint64_t asked_generation = 0;  // for which a plan is being made; 0: for none
  double planning_seconds = 0;    // of one core, that its plans took
  std::string operation_id;       // empty while queued
  // A worker had no memory: not worth another try before this many releases.
  uint64_t blocked_until_release = 0;
  // Refused while others reserved as well: it may be that they were in each other's way.
  bool reserves_alone = false;
  // What workers that refused said their kernels need for this plan beside the buffers.
  std::map<ConnectionId, int64_t> workspace_bytes;
  TransportDecision transport;  // of the members that it asks, or has
  absl::Time accepted_at;
  absl::Time run_at;
  absl::Time download_at;
  std::string not_retained;               // why its residual was given up
  std::vector<std::string> member_names;  // by ring rank, once accepted
  uint64_t generation = 0;                // likewise

  bool retains() const { return arrived.retain.has_value(); }
  StreamId stream() const { return arrived.stream; }
  int64_t WorkspaceOn(ConnectionId connection) const {
    const auto known = workspace_bytes.find(connection);
    return known == workspace_bytes.end() ? 0 : known->second;
  }
};

// The bytes that a client will upload.
int64_t InputBytes(const RequestArrived& request);
// Memory that it takes.
int64_t BytesOf(const OperationView& view);

// Not thread safe. References stay valid until their request ends.
class Requests {
 public:
  // Both outlive it.
  Requests(const CoordinatorConfig* config, ActionBatch* batch)
      : config_(*config), batch_(*batch) {}

  // REQUIRES: neither the stream nor its request_id is known.
  Request& Add(RequestArrived arrived);
  void SetState(Request& request, v1::RequestState state);
  // Both end it: the request is gone, its view remains.
  //   residual_reason  why the Forward has no residual, if it asked for one
  void Succeed(Request& request, std::string residual_handle, std::string residual_reason);
  void Fail(Request& request, const Failure& failure);
  // Likewise, but somebody else tells the client: with what is returned.
  FailRequest FailSilently(Request& request, const Failure& failure);
  // For a stream that never became a request.
  void Refuse(StreamId stream, const Failure& failure);

  // Those whose deadline has passed, or that have waited long enough for a ring; `ringless_since`
  // is when there last was one, unless there is one.
  std::vector<std::pair<StreamId, Failure>> CheckTimers(
      std::optional<absl::Time> ringless_since) const;

  Request* Find(StreamId stream);
  const Request* Find(StreamId stream) const;
  // Ids are the principal's own.
  const Request* FindById(const std::string& request_id, const std::string& principal) const;
  // In flight or lately ended.
  std::optional<OperationView> FindView(const std::string& request_id,
                                        const std::string& principal) const;
  // In flight, of one client.
  int64_t CountOf(const std::string& client) const;
  // In flight, in the order in which they came.
  const std::map<StreamId, Request>& all() const { return requests_; }
  bool empty() const { return requests_.empty(); }
  int64_t size() const { return static_cast<int64_t>(requests_.size()); }
  // Of what has ended.
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
  std::deque<Finished> finished_;  // the newest last
  int64_t finished_bytes_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REQUESTS_H_
