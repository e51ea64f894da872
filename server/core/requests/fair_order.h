// FairOrder: whose turn it is among requests that cost differently much and come from
// clients that ask differently often.
//
// Start-time fair queueing: every client has a clock that what it is served moves on, and the
// request with the earliest start goes next; of equal starts the cheapest. While a request
// waits or is served its client pays what it is expected to cost; when it ends, what it really
// took. So clients get equal shares, whatever they ask for and however wrong the expectation,
// and a client that has waited for nothing lately goes before the next request of one that has.
// Shares may be unequal on purpose: a client's clock runs slower by its weight.
//
// Among one client's own requests those that cost far less go first, the others as they came:
// many callers may share a connection, and a small request passes a queue of large ones there
// too.
//
// Many cheap requests could hold an expensive one up for ever: once as much was let past it as
// `Bounds` allow, it is next.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_
#define RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace ringattn::server {

// Costs are seconds of one device; clocks and starts are such seconds by a weight of one. Not
// thread safe.
class FairOrder {
 public:
  using Id = uint64_t;  // a stream's
  // Beside those with a place, so many clients are remembered: 1,024 names of 64 bytes.
  static constexpr size_t kMaxClients = 1024;

  struct Bounds {
    // The oldest request of a client is let past by later ones for at most the larger of these.
    double passing_factor = 4;  // times its own cost
    double passing_seconds = 10;
  };

  FairOrder() = default;
  explicit FairOrder(const Bounds& bounds) : bounds_(bounds) {}

  // Takes a place for it; from now on it waits. The weight is its client's, as it is now.
  // REQUIRES: it has none; expected_cost >= 0; weight > 0.
  void Enter(Id id, const std::string& client, double expected_cost, double weight = 1.0);
  // Its turn has come. Nothing unless it waits.
  void Start(Id id);
  // It has ended, served or not: its client pays `used` instead of what was expected. Nothing if
  // it has no place. REQUIRES: used >= 0.
  void Finish(Id id, double used);

  bool Has(Id id) const { return places_.count(id) > 0; }
  bool Waits(Id id) const;
  // As expected. REQUIRES: Has(id).
  double CostOf(Id id) const { return places_.at(id).cost; }
  // True if it is a's turn before b's. REQUIRES: both wait.
  bool Before(Id a, Id b) const;
  // REQUIRES: all wait.
  void Sort(std::vector<Id>* ids) const;

  // For tests: clients that are remembered.
  size_t client_count() const { return clients_.size(); }

 private:
  struct Place {
    std::string client;
    double cost = 0;
    double weight = 1;
    double not_before = 0;  // now_ when it came: waiting saves nothing up
    double start = 0;
    double passed = 0;     // what came later and was served before took so much
    uint64_t arrival = 0;  // a number
    bool waits = true;
    bool was_overdue = false;  // when its turn came
  };
  // In a client's own order: of its cost, then as they came.
  using OwnKey = std::tuple<int, uint64_t, Id>;
  struct Client {
    double clock = 0;  // with what is served now as it is expected
    int places = 0;
    std::set<OwnKey> waiting;
  };
  // Overdue ones first, as they came; then by start, cost, arrival.
  using Key = std::tuple<int, double, double, uint64_t>;

  static OwnKey OwnKeyOf(Id id, const Place& place);
  Key KeyOf(const Place& place) const;
  bool IsOverdue(const Place& place) const;
  // After its clock or its requests have changed.
  void SetStarts(const Client& client);
  void CountPassing(const Place& ended, double used);
  void ForgetIdleClients();

  Bounds bounds_;
  std::map<Id, Place> places_;
  std::map<std::string, Client> clients_;
  double now_ = 0;  // the latest start of what was served
  uint64_t last_arrival_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_FAIR_ORDER_H_
