// Suspicion: somebody reported that the ring broke. Until a window closes, evidence is
// gathered of who broke it: the reporter is often only the neighbour.
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
  // The first report opens the window; later ones add to it.
  void Report(ConnectionId reporter, const v1::GenerationFailed& failed, const Ring& ring,
              const Roster& roster, absl::Time now, absl::Duration window);
  void Close() { open_.reset(); }
  void Forgive(absl::Duration pause);

  bool open() const { return open_.has_value(); }
  bool IsDue(absl::Time now) const { return open_ && now >= open_->closes; }
  // REQUIRES: open, and every member is still in the roster (one whose stream closes within
  // the window has settled the question already).
  std::vector<Standing> Judge(const Ring& ring, const Roster& roster, const Operations& operations,
                              absl::Time now) const;
  // Who reported first, and what. REQUIRES: open.
  const std::string& first_report() const { return open_->first_report; }

 private:
  struct Window {
    absl::Time opened;
    absl::Time closes;
    std::string first_report;
    std::set<ConnectionId> reporters;
    std::set<std::string> operations;                  // that the reports name
    std::map<ConnectionId, v1::Heartbeat> heartbeats;  // as the window opened
  };
  std::optional<Window> open_;
};

// Of the members of one operation that shows no progress.
std::vector<Standing> StandingsIn(const Operation& operation, const Ring& ring);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_SUSPICION_H_
