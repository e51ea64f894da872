#include "worker/comm/nccl/nccl_library.h"

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(NcclLibrary, MissingLibraryIsNotFoundByName) {
  const auto library = NcclLibrary::Load("/nowhere/libnccl.so.2");
  EXPECT_EQ(library.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(library.status()),
              AllOf(HasSubstr("/nowhere/libnccl.so.2"), HasSubstr("$RINGATTN_NCCL")));
}

TEST(NcclLibrary, EnvironmentNamesLibrary) {
  setenv("RINGATTN_NCCL", "/elsewhere/libnccl.so.2", 1);
  const auto library = NcclLibrary::Load("");
  EXPECT_THAT(Message(library.status()), HasSubstr("/elsewhere/libnccl.so.2"));
  // The argument overrides the environment.
  EXPECT_THAT(Message(NcclLibrary::Load("/nowhere/libnccl.so.2").status()), HasSubstr("/nowhere/"));
  unsetenv("RINGATTN_NCCL");
}

TEST(NcclLibrary, RejectsOtherLibrary) {
  const auto library = NcclLibrary::Load("libz.so.1");
  EXPECT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition) << library.status();
  EXPECT_THAT(Message(library.status()), HasSubstr("libz.so.1 has no ncclGetVersion"));
}

TEST(NcclLibrary, DisablesMulticastInEnvironment) {
  setenv("NCCL_NVLS_ENABLE", "1", 1);
  (void)NcclLibrary::Load("/nowhere/libnccl.so.2");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

// Needs NCCL, but no device.
TEST(NcclLibrary, ErrorsCarryNcclMessages) {
  const auto library = NcclLibrary::Load("");
  if (absl::IsNotFound(library.status())) GTEST_SKIP() << library.status();
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_THAT((*library)->version(), testing::StartsWith("2."));
  EXPECT_TRUE((*library)->ToStatus(ncclSuccess, "call", nullptr).ok());
  EXPECT_TRUE((*library)->ToStatus(ncclInProgress, "call", nullptr).ok());
  const absl::Status status = (*library)->ToStatus(ncclInvalidUsage, "ncclSend", nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("ncclSend: "), HasSubstr("invalid usage")));
}

}  // namespace
}  // namespace ringattn::worker
