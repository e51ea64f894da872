// StepDeadlines: which groups of transfers are pending, and whether the one whose
// turn it is has taken too long. Pure: time is an argument.
#ifndef RINGATTN_WORKER_COMM_CUDA_STEP_DEADLINES_H_
#define RINGATTN_WORKER_COMM_CUDA_STEP_DEADLINES_H_

#include <deque>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// "sending to rank 1, receiving from rank 3"; "no transfer" for none.
std::string DescribeGroup(const std::vector<PeerTransfer>& group);

// Not thread safe.
class StepDeadlines {
 public:
  explicit StepDeadlines(absl::Duration step_timeout) : step_timeout_(step_timeout) {}

  // Groups run in the order in which they are added.
  //   after        what the group waits for
  //   done         ends when the group does
  //   description  for the message
  void Add(std::vector<EventRef> after, EventRef done, std::string description);

  // Forgets groups that have ended. If the first one left could run (what it waits
  // for is done) for longer than the step timeout, says so; else empty. The moment at
  // which it could is the first Poll that finds it so: poll often.
  std::string Poll(absl::Time now);

  bool empty() const { return groups_.empty(); }

 private:
  struct Group {
    std::vector<EventRef> after;
    EventRef done;
    std::string description;
  };

  const absl::Duration step_timeout_;
  std::deque<Group> groups_;
  absl::Time running_since_ = absl::InfiniteFuture();  // the first group; future: not yet
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_STEP_DEADLINES_H_
