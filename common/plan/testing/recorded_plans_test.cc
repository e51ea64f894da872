// Plans are those that were recorded when the planner built every rank's program. So classes of
// equal steps (step_classes.h) change no figure.
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/plan/testing/drawn_requests.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// The last fields of a line are seconds and operations.
constexpr size_t kPredictions = 4;

void ExpectSameFigures(const std::string& now, const std::string& recorded) {
  const std::vector<std::string> a = absl::StrSplit(now, ' ');
  const std::vector<std::string> b = absl::StrSplit(recorded, ' ');
  ASSERT_EQ(a.size(), b.size()) << now << "\n" << recorded;
  for (size_t i = 0; i < a.size(); ++i) {
    if (i + kPredictions < a.size() || a.size() == 1) {
      EXPECT_EQ(a[i], b[i]) << "field " << i;
      continue;
    }
    double x = 0, y = 0;
    ASSERT_TRUE(absl::SimpleAtod(a[i], &x) && absl::SimpleAtod(b[i], &y));
    EXPECT_DOUBLE_EQ(x, y) << "field " << i;  // compilers may contract sums
  }
}

TEST(RecordedPlansTest, PlansAreThoseOfAllPrograms) {
  std::ifstream file("common/plan/testing/recorded_plans.txt");
  std::string recorded;
  for (int number = 0; number < kRecordedRequests; ++number) {
    for (const std::string& figures : FiguresOfRequest(number)) {
      ASSERT_TRUE(std::getline(file, recorded)) << "request " << number;
      ExpectSameFigures(figures, recorded);
      ASSERT_FALSE(HasFailure()) << "request " << number << "\n" << figures << "\n" << recorded;
    }
  }
}

}  // namespace
}  // namespace ringattn
