#include "client/cli/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace ringattn::client::cli {

ProgressBar::ProgressBar() : visible_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() { Clear(); }

void ProgressBar::Update(absl::string_view what, double fraction) {
  if (!visible_) return;
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = absl::Now();
  if (what_ == what && now - drawn_ < absl::Milliseconds(100)) return;
  drawn_ = now;
  what_ = std::string(what);
  constexpr int kWidth = 30;
  const int filled = std::clamp(static_cast<int>(fraction * kWidth), 0, kWidth);
  std::fprintf(stderr, "\r\x1b[K[%s%s] %3.0f%% %s", std::string(filled, '#').c_str(),
               std::string(kWidth - filled, ' ').c_str(), 100 * std::clamp(fraction, 0.0, 1.0),
               what_.c_str());
  std::fflush(stderr);
}

void ProgressBar::Clear() {
  if (!visible_) return;
  const absl::MutexLock lock(&mutex_);
  if (what_.empty()) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  what_.clear();
}

}  // namespace ringattn::client::cli
