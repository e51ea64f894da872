#include "client/merged_progress.h"

#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

v1::Progress At(v1::RequestState state, double fraction) {
  v1::Progress progress;
  progress.set_state(state);
  progress.set_fraction_done(fraction);
  return progress;
}

TEST(MergedProgress, TheLeastStateAndTheMeanByBytes) {
  v1::Progress last;
  MergedProgress merged({100, 300}, [&](const v1::Progress& progress) { last = progress; });
  merged.Update(0, At(v1::REQUEST_STATE_UPLOADING, 0.5));
  EXPECT_EQ(last.state(), v1::REQUEST_STATE_QUEUED);  // nothing is known of the other
  merged.Update(1, At(v1::REQUEST_STATE_UPLOADING, 0.1));
  EXPECT_EQ(last.state(), v1::REQUEST_STATE_UPLOADING);
  EXPECT_DOUBLE_EQ(last.fraction_done(), (50.0 + 30.0) / 400);
  merged.Update(0, At(v1::REQUEST_STATE_DOWNLOADING, 0.2));
  EXPECT_EQ(last.state(), v1::REQUEST_STATE_UPLOADING);
  EXPECT_DOUBLE_EQ(last.fraction_done(), (100.0 + 30.0) / 400);
  merged.Update(1, At(v1::REQUEST_STATE_DOWNLOADING, 1.0));
  EXPECT_EQ(last.state(), v1::REQUEST_STATE_DOWNLOADING);
  EXPECT_DOUBLE_EQ(last.fraction_done(), (20.0 + 300.0) / 400);
  merged.Update(1, At(v1::REQUEST_STATE_QUEUED, 0.0));  // sent again
  EXPECT_EQ(last.state(), v1::REQUEST_STATE_QUEUED);
}

}  // namespace
}  // namespace ringattn::client
