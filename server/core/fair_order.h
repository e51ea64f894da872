// FairOrder: whose turn it is among requests that cost differently much and come from
// clients that ask differently often.
//
// Start-time fair queueing: every client has a clock that each of its requests moves on by
// its cost, and the request with the earliest start goes next; of equal starts the cheapest.
// So clients get equal shares, whatever they ask for, a client that has waited for nothing
// lately goes before the next request of one that has, and one client's requests keep their
// order. Many clients with one cheap request each could hold an expensive one up for ever:
// once as much was let past it as `Bounds` allow, it is next.
#ifndef RINGATTN_SERVER_CORE_FAIR_ORDER_H_
#define RINGATTN_SERVER_CORE_FAIR_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace ringattn::server {

// Costs are seconds of one device. Not thread safe.
class FairOrder {
 public:
  using Id = uint64_t;  // a stream's
  // Beside those with a place, so many clients are remembered: 1,024 names of 64 bytes.
  static constexpr size_t kMaxClients = 1024;

  struct Bounds {
    // A request is let past by later ones for at most the larger of these.
    double passing_factor = 4;  // times its own cost
    double passing_seconds = 10;
  };

  FairOrder() = default;
  explicit FairOrder(const Bounds& bounds) : bounds_(bounds) {}

  // Takes a place for it. REQUIRES: it has none; cost >= 0.
  void Enter(Id id, const std::string& client, double cost);
  // It was served: its cost is spent. Nothing if it has no place.
  void Serve(Id id);
  // It will not be: its client gets the cost back. Nothing if it has no place.
  void Leave(Id id);

  bool Has(Id id) const { return places_.count(id) > 0; }
  // REQUIRES: Has(id).
  double CostOf(Id id) const { return places_.at(id).cost; }
  // True if it is a's turn before b's. REQUIRES: both have places.
  bool Before(Id a, Id b) const;
  // REQUIRES: all have places.
  void Sort(std::vector<Id>* ids) const;

  // For tests: clients that are remembered.
  size_t client_count() const { return clocks_.size(); }

 private:
  struct Place {
    std::string client;
    double start = 0;
    double cost = 0;
    double passed = 0;     // cost of what came later and was served before
    uint64_t arrival = 0;  // a number
  };

  // Overdue ones first, as they came; then by start, cost, arrival.
  using Key = std::tuple<int, double, double, uint64_t>;

  Key KeyOf(const Place& place) const;
  bool IsOverdue(const Place& place) const;
  void ForgetIdleClients();

  Bounds bounds_;
  std::map<Id, Place> places_;
  std::map<std::string, double> clocks_;  // where each client's next request starts
  double now_ = 0;                        // the start of what was served last
  uint64_t last_arrival_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_FAIR_ORDER_H_
