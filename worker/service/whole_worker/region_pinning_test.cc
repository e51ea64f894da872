// A worker pins clients' regions while none of its operations has peers (region_pinner.h).
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"
#include "common/wire/durations.h"
#include "gtest/gtest.h"
#include "worker/region/region_pinner.h"
#include "worker/testing/cluster.h"
#include "worker/testing/copied_operation.h"

namespace ringattn::worker {
namespace {

// Returns the client's end of the socket of a region that a worker has attached.
ScopedDescriptor AttachRegion(Cluster& cluster, int rank, const std::string& folder,
                              const CopiedOperation& copied) {
  const std::string token(kAttachTokenBytes, 't');
  v1::JoinResponse message;
  v1::ExpectRegion* expect = message.mutable_expect_region();
  expect->set_region_id("region");
  expect->set_token(token);
  expect->set_bytes(copied.region_bytes());
  SetDuration(absl::Seconds(10), expect->mutable_valid_for());
  cluster.coordinator().Send(Cluster::Name(rank), message);
  const ScopedDescriptor memfd = copied.MakeMemfd();
  // The worker accepts the region once it has read the message.
  AttachCode code = AttachCode::kNoSuchToken;
  ScopedDescriptor socket;
  Await([&] {
    if (code == AttachCode::kAttached) return true;
    auto connected = ConnectLocally(LocalSocketPath(folder, Cluster::Name(rank)));
    if (!connected.ok()) return false;
    socket = *std::move(connected);
    EXPECT_TRUE(SendMessage(socket.get(), Encode(AttachMessage{token}), memfd.get(), 0).ok());
    const auto received = ReceiveMessage(socket.get(), kMaxAttachDatagramBytes, 0);
    const auto answer = ReadWorkerAnswer(received.ok() ? received->bytes : "");
    if (answer) code = answer->code;
    return code == AttachCode::kAttached;
  });
  EXPECT_EQ(code, AttachCode::kAttached);
  return socket;
}

TEST(RegionPinning, WaitsForOperationsWithPeers) {
  char name[] = "/tmp/region_pinning_XXXXXX";
  const std::string folder = mkdtemp(name);
  {
    Cluster cluster(2, {.local_socket_path = folder,
                        .local_uids = {geteuid()},
                        .max_pinned_bytes = int64_t{1} << 30});
    absl::Mutex mutex;
    absl::Time pinned_at = absl::InfinitePast();
    cluster.device(0).SetOnPin([&] {
      absl::MutexLock lock(&mutex);
      if (pinned_at == absl::InfinitePast()) pinned_at = MonotonicNow();
    });
    cluster.Form(1);
    CopiedOperation copied;
    const ScopedDescriptor socket = AttachRegion(cluster, 0, folder, copied);
    // An operation with peers that waits for its inputs until the end.
    cluster.Reserve(TestRequest::Make(61, 2), "1-1", 1);
    // An operation of rank 0 alone, whose end schedules the region for pinning.
    TestRequest request;
    request.spec = copied.spec();
    v1::JoinResponse message;
    v1::Reserve* reserve = message.mutable_reserve();
    *reserve = cluster.MakeReserve(request, "1-2", 1);
    reserve->clear_members();
    reserve->add_members(0);
    reserve->set_schedule(v1::SCHEDULE_SINGLE);
    reserve->MergeFrom(copied.reserve());
    cluster.coordinator().Send(Cluster::Name(0), message);
    ASSERT_TRUE(
        cluster.coordinator().Await(Cluster::Name(0), v1::JoinRequest::kUploaded).has_value());
    const absl::Time scheduled_after = MonotonicNow();
    message.mutable_release()->set_operation_id("1-2");
    message.mutable_release()->set_generation(1);
    cluster.coordinator().Send(Cluster::Name(0), message);
    {
      absl::MutexLock lock(&mutex);
      const auto is_pinned = [&] { return pinned_at != absl::InfinitePast(); };
      ASSERT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&is_pinned), absl::Seconds(20)));
      EXPECT_GE(pinned_at - scheduled_after, RegionPinner::kLongestWait);
    }
    EXPECT_TRUE(
        cluster.coordinator().Await(Cluster::Name(0), v1::JoinRequest::kReleased).has_value());
    cluster.Release("1-1", 1);
    ExpectAllFree(cluster);
  }
  rmdir(folder.c_str());
}

}  // namespace
}  // namespace ringattn::worker
