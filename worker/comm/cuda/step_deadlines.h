// StepDeadlines: tracks pending groups of transfers and whether the current one takes too long.
// Pure: time is an argument.
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

// Returns, for example, "sending to rank 1, receiving from rank 3", or "no transfer".
std::string DescribeGroup(const std::vector<PeerTransfer>& group);

// Not thread safe.
class StepDeadlines {
 public:
  explicit StepDeadlines(absl::Duration step_timeout) : step_timeout_(step_timeout) {}

  // Adds a group. Groups run in the order in which they are added.
  //   after        what the group waits for
  //   done         the group's event
  //   description  for the message
  void Add(std::vector<EventRef> after, EventRef done, std::string description);

  // Removes groups that have ended. Returns a message if the first remaining one has been able to
  // run (what it waits for is done) for longer than the step timeout, else an empty string. The
  // time counts from the first Poll that finds the group able to run, so poll often.
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
  absl::Time running_since_ =
      absl::InfiniteFuture();  // of the first group; infinite future: it cannot run yet
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_STEP_DEADLINES_H_
