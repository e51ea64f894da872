#include "client/launcher/worker_group.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(MemberFlags, NamesAndPortsDiffer) {
  EXPECT_THAT(
      MemberFlags({"--name=pod-3", "--data_listen=10.1.2.3:7710", "--metrics_listen=[::1]:7810",
                   "--health_listen=0.0.0.0:7703", "--coordinator=c:7701", "--insecure"},
                  2, 8),
      ElementsAre("--name=pod-3-2", "--data_listen=10.1.2.3:7712", "--metrics_listen=[::1]:7812",
                  "--health_listen=127.0.0.1:7706", "--coordinator=c:7701", "--insecure",
                  "--device=cuda:2", "--local_workers=8", "--local_rank=2"));
}

TEST(MemberFlags, ClientAddressesDifferToo) {
  EXPECT_THAT(MemberFlags({"--client_data_listen=0.0.0.0:7720", "--client_data_address=gpu-a:7720",
                           "--device=cpu"},
                          3, 4),
              ElementsAre("--client_data_listen=0.0.0.0:7723", "--client_data_address=gpu-a:7723",
                          "--device=cpu", "--local_workers=4", "--local_rank=3"));
}

TEST(MemberFlags, AFreePortAndAGivenDeviceStay) {
  EXPECT_THAT(MemberFlags({"--data_listen=127.0.0.1:0", "--device=cpu"}, 1, 2),
              ElementsAre("--data_listen=127.0.0.1:0", "--device=cpu", "--local_workers=2",
                          "--local_rank=1"));
}

TEST(ReadGroupFlags, ReadsTheGroupsFlags) {
  const auto flags =
      ReadGroupFlags({"--name=a", "--drain_timeout=5s", "--health_listen=127.0.0.1:7703"}, 4);
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->drain_timeout, absl::Seconds(5));
  EXPECT_EQ(flags->health_listen, "127.0.0.1:7703");
  EXPECT_FALSE(flags->check_flags);
}

TEST(ReadGroupFlags, NamesUnsupportedFlags) {
  for (const char* flag :
       {"name", "--local_rank=1", "--local_workers=2", "--port_file=f", "--drain_timeout=soon",
        "--health_listen=127.0.0.1:0", "--health_listen=7703", "--health_listen=h:65534"}) {
    const auto flags = ReadGroupFlags({flag}, 4);
    EXPECT_EQ(flags.status().code(), absl::StatusCode::kInvalidArgument) << flag;
    EXPECT_THAT(std::string(flags.status().message()), HasSubstr(flag));
  }
}

}  // namespace
}  // namespace ringattn::client
