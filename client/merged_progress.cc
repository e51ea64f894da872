#include "client/merged_progress.h"

#include <algorithm>
#include <utility>

namespace ringattn::client {

MergedProgress::MergedProgress(std::vector<double> bytes,
                               std::function<void(const v1::Progress&)> report)
    : bytes_(std::move(bytes)), report_(std::move(report)), latest_(bytes_.size()) {
  for (v1::Progress& progress : latest_) progress.set_state(v1::REQUEST_STATE_QUEUED);
}

void MergedProgress::Update(size_t request, const v1::Progress& progress) {
  const absl::MutexLock lock(&mutex_);
  latest_[request] = progress;
  report_(Merged());
}

v1::Progress MergedProgress::Merged() const {
  v1::Progress merged;
  merged.set_state(
      std::min_element(latest_.begin(), latest_.end(), [](const auto& a, const auto& b) {
        return a.state() < b.state();
      })->state());
  double done = 0, all = 0;
  for (size_t i = 0; i < latest_.size(); ++i) {
    all += bytes_[i];
    done += bytes_[i] * (latest_[i].state() == merged.state() ? latest_[i].fraction_done() : 1.0);
  }
  merged.set_fraction_done(all > 0 ? done / all : 1.0);
  return merged;
}

}  // namespace ringattn::client
