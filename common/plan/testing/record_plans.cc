// Prints plans of drawn requests. Run at a commit whose plans are known to be right, it makes the
// values with which recorded_plans_test.cc compares:
//
//   record_plans > common/plan/testing/recorded_plans.txt
#include <cstdio>

#include "common/plan/testing/drawn_requests.h"

int main() {
  for (int number = 0; number < ringattn::kRecordedRequests; ++number) {
    for (const std::string& figures : ringattn::FiguresOfRequest(number)) {
      std::printf("%s\n", figures.c_str());
    }
  }
}
