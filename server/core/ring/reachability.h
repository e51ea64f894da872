// Reachability: the pairs of hosts that cannot reach each other, and the largest set of hosts that
// all do. Ring reports failed formings; probes between workers find out when a link has recovered.
// Tests: reachability_test.cc
#ifndef RINGATTN_SERVER_CORE_RING_REACHABILITY_H_
#define RINGATTN_SERVER_CORE_RING_REACHABILITY_H_

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// One end of a link: a host, or a worker whose host is unknown or does not explain the fault.
struct LinkEnd {
  std::string host;    // empty: one worker
  std::string worker;  // empty: all workers of the host

  const std::string& name() const { return worker.empty() ? host : worker; }
  auto operator<=>(const LinkEnd&) const = default;
};

// Not thread safe.
//
// A pair of ends is a *cut* once a worker of one has reported a worker of the other as unreached.
// A cut lasts until a probe in each direction succeeds. The n-th failed forming within kMemory puts
// the first probe off for probe_interval * 2^(n-1), at most parted_retry_max, so that a link that
// passes probes and fails rings cannot take the ring down more often.
class Reachability {
 public:
  // All arguments must outlive it.
  Reachability(const CoordinatorConfig* config, const Roster* roster, ActionBatch* batch);

  // A ring of `members` failed to form, and `reporter` could not reach these members.
  void OnUnreached(ConnectionId reporter, const std::vector<ConnectionId>& unreached,
                   const std::string& reason);
  // A ring of these members failed to form, and no report named an unreached member. After
  // kUnexplainedFormings of them in a row, all pairs of hosts count as cuts.
  void OnUnexplained(const std::vector<ConnectionId>& members);
  // A ring of these members broke while it served, although all of them are alive. The next
  // Advance() probes all pairs of their hosts once. A pair becomes a cut if both workers answer and
  // one has not reached the other.
  void Suspect(const std::vector<ConnectionId>& members);
  // Returns false while such probes are due or in flight, at most for two probe timeouts and a
  // round of others. A ring that formed now could include hosts that do not reach each other, and
  // would need most of control_timeout to fail.
  bool Settled() const { return suspected_ == 0; }
  // These members have formed a ring. Forgets past failures among them.
  void OnFormed(const std::vector<ConnectionId>& members);

  // Sends due probes and ends late ones. Call it on every tick.
  void Advance();
  void OnProbed(ConnectionId connection, const v1::Probed& probed);
  // Extends timeouts by a pause of this process.
  void Forgive(absl::Duration pause);

  // Returns those of `workers` that all reach each other: on as many hosts as possible, then with
  // the most memory, then the most workers, then with the lowest name. Keeps the order. Exact for
  // up to some 20 hosts with cuts; the search is bounded beyond that.
  std::vector<ConnectionId> LargestReachable(const std::vector<ConnectionId>& workers) const;
  // Returns the hosts and single workers that the worker cannot reach and that are connected;
  // sorted.
  std::vector<std::string> PartedFrom(ConnectionId worker) const;
  bool has_cuts() const { return open_cuts_ > 0; }
  // Returns whether a cut has opened or closed since the last call.
  bool TakeChanged() { return std::exchange(changed_, false); }

  static constexpr int kUnexplainedFormings = 3;
  // Failures are remembered for this long after a cut has closed.
  static constexpr absl::Duration kMemory = absl::Minutes(10);

 private:
  using Pair = std::pair<LinkEnd, LinkEnd>;  // the lower end first
  struct Cut {
    bool open = false;
    bool suspected = false;  // by Suspect(); not open
    int failures = 0;        // failed formings
    int probes = 0;          // selects the workers that probe
    // Probes of the current round that were answered, and that succeeded.
    int answered = 0;
    int passed = 0;
    absl::Time failed_at;
    absl::Time due;  // of the next probe
  };
  // A probe message that has not been answered.
  struct SentProbe {
    ConnectionId prober = 0;
    std::vector<Pair> pairs;  // by index of the address
  };

  LinkEnd EndOf(ConnectionId worker) const;
  // The ends of those members that are connected.
  std::set<LinkEnd> EndsOf(const std::vector<ConnectionId>& members) const;
  bool IsCut(ConnectionId a, ConnectionId b) const;
  void Open(const LinkEnd& a, const LinkEnd& b, const std::string& reason);
  void Close(const Pair& pair, Cut* cut);
  std::vector<ConnectionId> WorkersAt(const LinkEnd& end) const;
  void StartRound();
  void EndRound();
  void Judge(const Pair& pair);
  void Forget();

  const CoordinatorConfig& config_;
  const Roster& roster_;
  ActionBatch& batch_;

  std::map<Pair, Cut> cuts_;
  int open_cuts_ = 0;
  int suspected_ = 0;
  int unexplained_ = 0;
  bool changed_ = false;
  // The current round of probes.
  std::map<uint64_t, SentProbe> sent_;
  std::set<Pair> probed_;
  absl::Time round_ends_ = absl::InfiniteFuture();
  uint64_t last_probe_ = 0;
  // The last result of LargestReachable.
  mutable std::vector<ConnectionId> asked_, answer_;
  mutable bool cached_ = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_REACHABILITY_H_
