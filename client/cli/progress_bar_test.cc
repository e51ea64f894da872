#include "client/cli/progress_bar.h"

#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Collects what any thread writes.
class Written {
 public:
  ProgressBar::Options Options(bool terminal, absl::Duration interval) {
    return {terminal, interval, [this](const std::string& text) {
              const absl::MutexLock lock(&mutex_);
              texts_.push_back(text);
            }};
  }
  std::vector<std::string> Await(size_t count) {
    const auto there = [this, count]()
                           ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return texts_.size() >= count; };
    const absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(20)));
    return texts_;
  }
  std::vector<std::string> texts() {
    const absl::MutexLock lock(&mutex_);
    return texts_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
};

// Work that reports once and then computes for long.
TEST(ProgressBarTest, WithoutATerminalLinesComeWhileNothingIsReported) {
  Written written;
  ProgressBar bar(written.Options(false, absl::Milliseconds(5)));
  bar.Update("computing", 0.25);
  EXPECT_THAT(written.Await(3), Each(HasSubstr("ringattn: computing, 25%, after 0 s\n")));
}

TEST(ProgressBarTest, WithoutATerminalQuickWorkIsSilent) {
  Written written;
  {
    ProgressBar bar(written.Options(false, absl::Hours(1)));
    bar.Update("uploading", 0.5);
    bar.Update("computing", 0.5);
  }
  EXPECT_THAT(written.texts(), IsEmpty());
}

TEST(ProgressBarTest, UnknownFractionsAreNotShown) {
  Written written;
  ProgressBar bar(written.Options(false, absl::Milliseconds(5)));
  bar.Update("verifying", -1);
  EXPECT_THAT(written.Await(1), Each(HasSubstr("ringattn: verifying, after 0 s\n")));
}

TEST(ProgressBarTest, ATerminalShowsABarAndRemovesIt) {
  Written written;
  {
    ProgressBar bar(written.Options(true, absl::Hours(1)));
    bar.Update("computing", 0.5);
    EXPECT_THAT(written.Await(1)[0], HasSubstr("[###############               ]  50% computing"));
    // A second later the bar is redrawn, although nothing was reported.
    EXPECT_THAT(written.Await(2)[1], HasSubstr("computing, 1 s"));
  }
  EXPECT_EQ(written.texts().back(), "\r\x1b[K");
}

TEST(ProgressBarTest, LinesArePrintedAboveABar) {
  Written written;
  {
    ProgressBar bar(written.Options(true, absl::Hours(1)));
    bar.Print("");
    bar.Print("first\n");
    bar.Update("computing", 0.5);
    bar.Print("second\n");
  }
  const std::vector<std::string> texts = written.texts();
  ASSERT_GE(texts.size(), 4u);
  EXPECT_EQ(texts[0], "first\n");
  EXPECT_EQ(texts[2], "\r\x1b[Ksecond\n");
  EXPECT_THAT(texts[3], HasSubstr("computing"));
}

}  // namespace
}  // namespace ringattn::client::cli
