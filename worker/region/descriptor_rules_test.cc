#include "worker/region/descriptor_rules.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "common/local_memory/scoped_descriptor.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kBytes = 1 << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;

ScopedDescriptor MakeMemfd(int64_t bytes, bool allocate, int seals, unsigned flags = 0) {
  ScopedDescriptor fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd.valid()) return fd;
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  if (allocate) {
    EXPECT_EQ(fallocate(fd.get(), 0, 0, bytes), 0);
  }
  if (seals != 0) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

std::string Why(const ScopedDescriptor& fd, int64_t bytes = kBytes) {
  return std::string(CheckRegionDescriptor(fd.get(), bytes).message());
}

TEST(DescriptorRulesTest, AcceptsSealedMemfd) {
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, kSeals)), "");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, kSeals | F_SEAL_GROW)), "");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, kSeals), 1), "");
}

TEST(DescriptorRulesTest, RequiresSealsThatKeepPages) {
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, 0)), "the memfd is not sealed against shrinking");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, F_SEAL_GROW)), "the memfd is not sealed against shrinking");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, F_SEAL_SHRINK)),
            "the memfd is not sealed against more seals");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, kSeals | F_SEAL_WRITE)),
            "the memfd is sealed against writing");
}

TEST(DescriptorRulesTest, RequiresAllocatedPages) {
  EXPECT_EQ(Why(MakeMemfd(kBytes, false, kSeals)),
            "not all pages of the memfd are allocated (fallocate)");
  EXPECT_EQ(Why(MakeMemfd(kBytes, true, kSeals), kBytes + 1),
            "the memfd has 1048576 bytes; the region needs 1048577");
  ScopedDescriptor holed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(holed.get(), kBytes), 0);
  ASSERT_EQ(fallocate(holed.get(), 0, 0, kBytes), 0);
  ASSERT_EQ(fallocate(holed.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  ASSERT_EQ(fcntl(holed.get(), F_ADD_SEALS, kSeals), 0);
  EXPECT_EQ(Why(holed), "not all pages of the memfd are allocated (fallocate)");
}

TEST(DescriptorRulesTest, RejectsOtherKindsOfFiles) {
  int pipes[2] = {};
  ASSERT_EQ(pipe(pipes), 0);
  ScopedDescriptor reading(pipes[0]), writing(pipes[1]);
  EXPECT_EQ(Why(reading), "the descriptor is not a memfd");
  EXPECT_EQ(Why(ScopedDescriptor(open("/dev/zero", O_RDWR))), "the descriptor is not a memfd");
  EXPECT_EQ(Why(ScopedDescriptor(open("/", O_RDONLY))), "the descriptor is not a memfd");
  char name[] = "/tmp/descriptor_rules_XXXXXX";
  ScopedDescriptor file(mkstemp(name));
  unlink(name);
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  EXPECT_NE(Why(file), "");
  EXPECT_EQ(Why(ScopedDescriptor()), "the descriptor is invalid");
}

TEST(DescriptorRulesTest, RejectsFileInShm) {
  char name[] = "/dev/shm/descriptor_rules_XXXXXX";
  ScopedDescriptor file(mkstemp(name));
  if (!file.valid()) GTEST_SKIP() << "no /dev/shm";
  unlink(name);
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  ASSERT_EQ(posix_fallocate(file.get(), 0, kBytes), 0);
  EXPECT_EQ(Why(file), "the memfd is not sealed against shrinking");
}

TEST(DescriptorRulesTest, RejectsHugePages) {
  ScopedDescriptor huge(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (!huge.valid() || ftruncate(huge.get(), 2 << 20) != 0) GTEST_SKIP() << "no hugetlbfs";
  ASSERT_EQ(fcntl(huge.get(), F_ADD_SEALS, kSeals), 0);
  EXPECT_EQ(Why(huge, 2 << 20), "the memfd uses hugetlbfs pages; ordinary pages are required");
}

TEST(DescriptorRulesTest, RequiresWriteAccess) {
  const ScopedDescriptor memfd = MakeMemfd(kBytes, true, kSeals);
  ScopedDescriptor read_only(
      open(("/proc/self/fd/" + std::to_string(memfd.get())).c_str(), O_RDONLY));
  ASSERT_TRUE(read_only.valid());
  EXPECT_EQ(Why(read_only), "the descriptor is not open for reading and writing");
}

}  // namespace
}  // namespace ringattn::worker
