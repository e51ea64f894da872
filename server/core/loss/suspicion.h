// Suspicion: gathers evidence after a report that the ring broke. The reporter is often only a
// neighbour of the faulty member, so the verdict waits until a window closes.
#ifndef RINGATTN_SERVER_CORE_LOSS_SUSPICION_H_
#define RINGATTN_SERVER_CORE_LOSS_SUSPICION_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/loss/blame.h"
#include "server/core/requests/operations.h"
#include "server/core/ring/ring.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// Not thread safe.
class Suspicion {
 public:
  // The first report opens the window; later ones add evidence.
  void Report(ConnectionId reporter, const v1::GenerationFailed& failed, const Ring& ring,
              const Roster& roster, absl::Time now, absl::Duration window);
  void Close() { open_.reset(); }
  void Forgive(absl::Duration pause);

  bool open() const { return open_.has_value(); }
  bool IsDue(absl::Time now) const { return open_ && now >= open_->closes; }
  // Returns the evidence on each rank. REQUIRES: open, and every member is still in the roster (a
  // closed control stream within the window already decides the question).
  std::vector<RankState> Evidence(const Ring& ring, const Roster& roster,
                                  const Operations& operations, absl::Time now) const;
  // Returns who reported first, and the report. REQUIRES: open.
  const std::string& first_report() const { return open_->first_report; }

 private:
  struct Window {
    absl::Time opened;
    absl::Time closes;
    std::string first_report;
    std::set<ConnectionId> reporters;
    std::set<std::string> operations;                  // named by the reports
    std::map<ConnectionId, v1::Heartbeat> heartbeats;  // when the window opened
  };
  std::optional<Window> open_;
};

// Returns the evidence on the unfinished members of one operation without progress.
std::vector<RankState> RankStatesOf(const Operation& operation, const Ring& ring);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_SUSPICION_H_
