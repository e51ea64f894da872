#include "client/cli/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::cli {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);
constexpr char kClearLine[] = "\r\x1b[K";

void WriteToStderr(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

ProgressBar::ProgressBar(absl::Duration line_interval)
    : ProgressBar(Options{isatty(STDERR_FILENO) == 1, line_interval, WriteToStderr}) {}

ProgressBar::ProgressBar(Options options)
    : options_(std::move(options)), thread_([this] { Loop(); }) {}

ProgressBar::~ProgressBar() {
  {
    const absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  thread_.join();
  const absl::MutexLock lock(&mutex_);
  if (bar_stands_) options_.write(kClearLine);
}

void ProgressBar::Update(absl::string_view what, double fraction) {
  const absl::MutexLock lock(&mutex_);
  const bool changed = what_ != what;
  what_ = std::string(what);
  fraction_ = std::min(fraction, 1.0);
  const absl::Time now = MonotonicNow();
  if (options_.terminal && (changed || now - shown_at_ >= kRedraw)) Show(now);
}

void ProgressBar::Print(const std::string& lines) {
  if (lines.empty()) return;
  const absl::MutexLock lock(&mutex_);
  options_.write(bar_stands_ ? absl::StrCat(kClearLine, lines) : lines);
  if (bar_stands_) Show(MonotonicNow());
}

void ProgressBar::Loop() {
  const absl::Duration interval = options_.terminal ? absl::Seconds(1) : options_.line_interval;
  absl::Time next = began_ + interval;
  const absl::MutexLock lock(&mutex_);
  while (!AwaitUntil(mutex_, absl::Condition(&closing_), next)) {
    const absl::Time now = MonotonicNow();
    Show(now);
    next = std::max(next + interval, now);
  }
}

void ProgressBar::Show(absl::Time now) {
  if (what_.empty()) return;
  const std::string seconds = absl::StrCat(absl::ToInt64Seconds(now - began_), " s");
  if (!options_.terminal) {
    const std::string percent = fraction_ < 0 ? "" : absl::StrFormat("%.0f%%, ", 100 * fraction_);
    options_.write(absl::StrCat("ringattn: ", what_, ", ", percent, "after ", seconds, "\n"));
    return;
  }
  constexpr int kWidth = 30;
  const int filled = std::clamp(static_cast<int>(fraction_ * kWidth), 0, kWidth);
  const std::string percent = fraction_ < 0 ? "    " : absl::StrFormat("%3.0f%%", 100 * fraction_);
  options_.write(absl::StrCat(kClearLine, "[", std::string(filled, '#'),
                              std::string(kWidth - filled, ' '), "] ", percent, " ", what_, ", ",
                              seconds));
  shown_at_ = now;
  bar_stands_ = true;
}

}  // namespace ringattn::client::cli
