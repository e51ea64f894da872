#include "common/base/counted.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(Counted, OneIsSingular) {
  EXPECT_EQ(Counted(0, "worker"), "0 workers");
  EXPECT_EQ(Counted(1, "worker"), "1 worker");
  EXPECT_EQ(Counted(2, "worker"), "2 workers");
}

}  // namespace
}  // namespace ringattn
