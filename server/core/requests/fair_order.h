// FairOrder: the order of requests that differ in cost and come from clients that differ in load.
//
// It implements weighted fair queueing. Every client has a clock that its service advances. A
// request starts at its client's clock and finishes later by its cost. The request with the
// earliest finish goes next; ties go to the cheapest. So a client with small requests does not wait
// for the large requests of many other clients, even after it has been served: it goes first until
// it has received as much service as one of those requests takes.
//
// While a request waits or runs, its client is charged the expected cost; when it ends, the actual
// cost. Clients therefore get equal shares, regardless of what they request and of how wrong the
// expectation is. Idle time earns no credit. A client's weight slows its clock, which gives it a
// larger share.
//
// Within one client, requests that cost far less go first and others keep their arrival order. Many
// callers may share one connection, and a small request should not wait there for a queue of large
// ones.
//
// Overtaking is bounded, so cheap requests do not starve an expensive one: a request goes next once
// the service that overtook it reaches `Bounds`.
//
// The order is kept, not sorted: a change costs the logarithm of the number of clients and of the
// client's requests. Only the first request of each client has a place among all clients. The
// places of its next requests follow while VisitWaiting passes them.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_
#define RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ringattn::server {

// Costs are seconds of one device; clocks and starts are the same at weight 1. Not thread safe.
class FairOrder {
 public:
  using Id = uint64_t;  // a stream's id
  // Number of remembered clients without requests: 1,024 names of 64 bytes.
  static constexpr size_t kMaxClients = 1024;

  struct Bounds {
    // Later requests may overtake a client's oldest request by at most the larger of these costs.
    double passing_factor = 4;  // times its own cost
    double passing_seconds = 10;
  };

  FairOrder() = default;
  explicit FairOrder(const Bounds& bounds) : bounds_(bounds) {}
  FairOrder(const FairOrder&) = delete;
  FairOrder& operator=(const FairOrder&) = delete;

  // Adds a waiting request, with the client's current weight. REQUIRES: !Has(id); expected_cost >=
  // 0; weight > 0.
  void Enter(Id id, const std::string& client, double expected_cost, double weight = 1.0);
  // The request starts to run. No effect unless it waits.
  void Start(Id id);
  // Takes back Start: the request waits again, in the place of its arrival. No effect unless it
  // runs.
  void Return(Id id);
  // The request ended, served or not. Its client is charged `used` instead of the expected cost. No
  // effect unless Has(id). REQUIRES: used >= 0.
  void Finish(Id id, double used);

  bool Has(Id id) const { return entries_.count(id) > 0; }
  bool Waits(Id id) const;
  // Returns the expected cost. REQUIRES: Has(id).
  double CostOf(Id id) const { return entries_.at(id).cost; }
  // Returns true if `a` goes before `b`. REQUIRES: both wait. Takes as long as the clients of both
  // have requests that go before them.
  bool Before(Id a, Id b) const;
  // Sorts by order of service. REQUIRES: all wait. Takes as long as their clients have requests
  // that go before the last of them.
  void Sort(std::vector<Id>* ids) const;

  enum class Visit {
    kNext,
    kSkipClient,  // visit no further request of this client
    kStop,
  };
  // Calls `visit` with waiting requests and their clients, in order of service, until it returns
  // kStop. `visit` must not change this object.
  void VisitWaiting(absl::FunctionRef<Visit(Id id, const std::string& client)> visit) const;

  // For tests: the number of remembered clients.
  size_t client_count() const { return clients_.size(); }
  // For tests: the number of requests and clients that were looked at in loops.
  int64_t steps() const { return steps_; }

 private:
  struct Client;
  struct Entry {
    Id id = 0;
    Client* client = nullptr;
    double cost = 0;
    double weight = 1;
    double not_before = 0;  // now_ at arrival: idle time earns no credit
    double passed = 0;      // cost of later requests that were served before
    uint64_t arrival = 0;   // sequence number
    bool waits = true;
    bool was_overdue = false;  // when it started
  };
  // Order within a client: cost class, then arrival.
  using OwnKey = std::pair<int, uint64_t>;
  using OwnOrder = std::map<OwnKey, Entry*>;
  // Order among clients: finish, cost and arrival.
  using FinishKey = std::tuple<double, double, uint64_t>;
  struct Client {
    std::string name;
    double clock = 0;  // includes the expected cost of running requests
    int entries = 0;
    OwnOrder waiting;
    std::map<uint64_t, Entry*> by_arrival;  // the same requests
    // The client's keys in heads_ and oldest_.
    std::optional<FinishKey> head;
    std::optional<uint64_t> oldest;
  };
  // Overdue requests first, by arrival; then by FinishKey.
  using Key = std::pair<int, FinishKey>;

  static OwnKey OwnKeyOf(const Entry& entry);
  // `earliest`: the finish of the client's request before it, or else the client's clock.
  static double StartAfter(double earliest, const Entry& entry);
  static FinishKey FinishAfter(double earliest, const Entry& entry);
  double StartOf(const Entry& entry) const;
  bool IsOverdue(const Entry& entry) const;
  void AddWaiting(Entry& entry);
  void RemoveWaiting(Entry& entry);
  // Called after a change of the client's clock or waiting requests.
  void SetPlace(Client& client);
  void CountPassing(const Entry& ended, double used);
  void ForgetIdleClients();

  Bounds bounds_;
  std::unordered_map<Id, Entry> entries_;
  std::map<std::string, Client> clients_;
  std::map<FinishKey, Client*> heads_;  // of the first request in each client's own order
  std::map<uint64_t, Client*> oldest_;  // by the arrival of each client's oldest waiting request
  std::map<uint64_t, Entry*> overdue_;  // waiting requests by arrival
  std::set<std::pair<double, std::string>> idle_;  // clients without requests, by clock
  double now_ = 0;                                 // the latest start of a served request
  uint64_t last_arrival_ = 0;
  mutable int64_t steps_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_
