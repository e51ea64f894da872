#include "worker/comm/cuda/step_deadlines.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ringattn::worker {

std::string DescribeGroup(const std::vector<PeerTransfer>& group) {
  if (group.empty()) return "no transfer";
  std::vector<std::string> words;
  for (const PeerTransfer& transfer : group) {
    const bool send = transfer.kind == PeerTransfer::Kind::kSend;
    std::string word =
        absl::StrCat(send ? "sending to rank " : "receiving from rank ", transfer.peer);
    if (std::find(words.begin(), words.end(), word) == words.end()) {
      words.push_back(std::move(word));
    }
  }
  return absl::StrJoin(words, ", ");
}

void StepDeadlines::Add(std::vector<EventRef> after, EventRef done, std::string description) {
  groups_.push_back({std::move(after), std::move(done), std::move(description)});
}

std::string StepDeadlines::Poll(absl::Time now) {
  while (!groups_.empty() && groups_.front().done->Done()) {
    groups_.pop_front();
    running_since_ = absl::InfiniteFuture();
  }
  if (groups_.empty()) return "";
  Group& first = groups_.front();
  const auto is_done = [](const EventRef& event) { return event->Done(); };
  while (!first.after.empty() && is_done(first.after.back())) first.after.pop_back();
  if (!std::all_of(first.after.begin(), first.after.end(), is_done)) return "";
  running_since_ = std::min(running_since_, now);
  if (now - running_since_ <= step_timeout_) return "";
  return absl::StrCat(first.description, " took longer than ", absl::FormatDuration(step_timeout_));
}

}  // namespace ringattn::worker
