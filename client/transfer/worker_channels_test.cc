#include "client/transfer/worker_channels.h"

#include <grpcpp/support/channel_arguments.h>

#include "common/base/limits.h"
#include "common/base/testing/wall_clock.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

WorkerChannels::Dial Counting(int* dialled) {
  return [dialled](const std::string& endpoint) {
    ++*dialled;
    return TransportSecurity().Dial(endpoint, grpc::ChannelArguments());
  };
}

TEST(WorkerChannelsTest, FewWorkersAndManyCoresGetManyConnections) {
  struct Case {
    int workers, cores, each;
  };
  for (const Case& c :
       {Case{1, 1, 8}, Case{1, 2, 8}, Case{1, 16, 8}, Case{1, 24, 12}, Case{1, 128, 16},
        Case{2, 2, 4}, Case{2, 16, 4}, Case{3, 8, 3}, Case{4, 2, 2}, Case{4, 64, 4}, Case{8, 2, 2},
        Case{8, 128, 2}, Case{64, 128, 2}}) {
    EXPECT_EQ(WorkerChannels::PerWorker(c.workers, c.cores), c.each)
        << c.workers << " workers, " << c.cores << " cores";
  }
  EXPECT_EQ(WorkerChannels::kMostPerWorker, Limits().max_streams_per_ticket);
}

TEST(WorkerChannelsTest, CallsShareTheFirstOnes) {
  int dialled = 0;
  WorkerChannels channels(Counting(&dialled), /*per_worker=*/0, /*cores=*/4);
  const WorkerChannels::Channels two = channels.To("127.0.0.1:1", 4);
  EXPECT_EQ(two.size(), 2u);
  const WorkerChannels::Channels eight = channels.To("127.0.0.1:1", 1);
  EXPECT_EQ(eight.size(), 8u);
  EXPECT_EQ(dialled, 8);
  EXPECT_EQ(eight[1], two[1]);
  EXPECT_EQ(channels.To("127.0.0.1:1", 4), two);
  EXPECT_EQ(dialled, 8);
}

TEST(WorkerChannelsTest, AnUnreachableWorkerDoesNotFollowTheWallClock) {
  WorkerChannels channels(Counting(nullptr), /*per_worker=*/0);
  channels.NoteUnreachable("silent");
  SetWallClockBack(-absl::Hours(2));
  EXPECT_EQ(channels.UnreachableReason(), "silent");
  SetWallClockBack(absl::ZeroDuration());
}

TEST(WorkerChannelsTest, UsesTheRequestedNumberOfConnections) {
  int dialled = 0;
  WorkerChannels channels(Counting(&dialled), /*per_worker=*/3, /*cores=*/64);
  EXPECT_EQ(channels.To("127.0.0.1:1", 1).size(), 3u);
  EXPECT_EQ(channels.To("127.0.0.1:2", 5).size(), 3u);
  EXPECT_EQ(dialled, 6);
}

}  // namespace
}  // namespace ringattn::client
