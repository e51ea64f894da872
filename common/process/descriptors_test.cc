#include "common/process/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(DescriptorsTest, TheSoftLimitRisesToTheHardOne) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GT(limit.rlim_max, 100);
  limit.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(DescriptorLimit(), 100);
  const int64_t raised = RaiseDescriptorLimit();
  EXPECT_GT(raised, 100);
  EXPECT_EQ(raised, DescriptorLimit());
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, limit.rlim_max);
}

TEST(DescriptorsTest, CountsWhatIsOpen) {
  const int64_t before = OpenDescriptors();
  ASSERT_GE(before, 0);
  const int fd = open("/dev/null", O_RDONLY);
  EXPECT_EQ(OpenDescriptors(), before + 1);
  close(fd);
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DescriptorsTest, KnowsItsMemory) { EXPECT_GT(ResidentBytes(), 1 << 20); }

}  // namespace
}  // namespace ringattn
