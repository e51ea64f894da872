#include "client/memory/shared_region.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/memory/region_index.h"
#include "client/testing/fake_region_worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

template <typename Predicate>
bool Await(const Predicate& predicate) {
  for (int i = 0; i < 3000 && !predicate(); ++i) absl::SleepFor(absl::Milliseconds(5));
  return predicate();
}

// A coordinator with two workers that learns at once what is attached.
class SharedRegionTest : public testing::Test {
 protected:
  absl::StatusOr<v1::AttachResponse> Attach(const v1::AttachRequest& request) {
    ++calls_;
    v1::AttachResponse response;
    if (!refusal_.ok()) return refusal_;
    if (forgets_ && !request.region_id().empty()) {
      forgets_ = false;
      ++incarnation_;
      return absl::NotFoundError("no such region");
    }
    response.set_region_id(request.region_id().empty() ? "region-" + std::to_string(incarnation_)
                                                       : request.region_id());
    for (FakeRegionWorker* worker : {&first_, &second_}) {
      if (worker->has_region() && !request.region_id().empty()) {
        response.add_attached(worker->name());
      } else {
        *response.add_points() = worker->Point();
        if (worker == &second_ && change_second_)
          change_second_(*response.mutable_points()->rbegin());
      }
    }
    return response;
  }

  std::shared_ptr<SharedRegion> Make(int64_t bytes = 10'000) {
    auto made = SharedRegion::Make(
        bytes, [this](const v1::AttachRequest& request) { return Attach(request); });
    EXPECT_TRUE(made.ok()) << made.status();
    (*made)->AwaitFirstRound(absl::Seconds(10));
    return *made;
  }

  // Returns the fence's report about workers that did not answer.
  static std::string Fence(SharedRegion& region, uint64_t number) {
    auto over = std::make_shared<std::promise<std::string>>();
    region.Fence(number, [over](const std::string& unsure) { over->set_value(unsure); });
    return over->get_future().get();
  }

  // Returns true if a worker attached it.
  static bool Reattach(SharedRegion& region, uint64_t than) {
    auto over = std::make_shared<std::promise<bool>>();
    region.Reattach(than, [over](bool taken) { over->set_value(taken); });
    return over->get_future().get();
  }

  FakeRegionWorker first_{"first"}, second_{"second"};
  std::atomic<int> calls_{0}, incarnation_{0};
  std::atomic<bool> forgets_{false};
  absl::Status refusal_;
  std::function<void(v1::AttachPoint&)> change_second_;
};

TEST_F(SharedRegionTest, AllWorkersAttachAndReleaseIt) {
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_EQ(region->bytes() % sysconf(_SC_PAGESIZE), 0);
  EXPECT_THAT(region->workers(), UnorderedElementsAre("first", "second"));
  std::string why;
  EXPECT_EQ(region->id(&why), "region-0");
  EXPECT_THAT(why, IsEmpty());
  std::memset(region->data(), 7, region->bytes());
  region->Stop();
  EXPECT_TRUE(Await([&] { return !first_.has_region() && !second_.has_region(); }));
  EXPECT_THAT(region->id(&why), IsEmpty());
  EXPECT_THAT(why, HasSubstr("released"));
  EXPECT_EQ(region->data()[9'999], 7);  // mapped as long as a reference to it exists
}

TEST_F(SharedRegionTest, ARestartedWorkerAttachesItUnderTheSameName) {
  const std::shared_ptr<SharedRegion> region = Make();
  first_.DropRegions();
  EXPECT_TRUE(Await([&] { return first_.attaches() == 2 && region->workers().size() == 2; }));
  EXPECT_EQ(second_.attaches(), 1);
  std::string why;
  EXPECT_EQ(region->id(&why), "region-0");
  region->Stop();
}

TEST_F(SharedRegionTest, AWorkerThatLacksItAttachesItAgain) {
  second_.RefuseWith(AttachCode::kDescriptorRefused);
  const std::shared_ptr<SharedRegion> region = Make();
  const uint64_t before = region->attachments();
  EXPECT_EQ(before, 1);
  EXPECT_FALSE(Reattach(*region, before));
  EXPECT_EQ(region->attachments(), before);
  second_.RefuseWith(AttachCode::kAttached);
  EXPECT_TRUE(Await([&] { return Reattach(*region, before); }));
  EXPECT_EQ(region->attachments(), 2);
  EXPECT_TRUE(Reattach(*region, before));  // an earlier caller is answered by that attachment
  EXPECT_FALSE(Reattach(*region, 2));
  region->Stop();
  EXPECT_FALSE(Reattach(*region, 2));
}

// A round that has begun may have asked for the workers before one joined.
TEST_F(SharedRegionTest, ALaterRoundAttachesIt) {
  const std::shared_ptr<SharedRegion> region = Make();
  const int calls = calls_;
  absl::Notification asked, go_on;
  change_second_ = [&](v1::AttachPoint&) {
    if (!asked.HasBeenNotified()) asked.Notify();
    go_on.WaitForNotification();
  };
  first_.DropRegions();
  second_.DropRegions();
  asked.WaitForNotification();
  std::atomic<int> shown{0};
  region->Reattach(4, [&](bool taken) {
    EXPECT_FALSE(taken);
    ++shown;
  });
  EXPECT_EQ(shown, 0);
  go_on.Notify();
  EXPECT_TRUE(Await([&] { return shown == 1; }));
  EXPECT_EQ(region->attachments(), 4);
  EXPECT_GE(calls_, calls + 3);  // one call to ask, one to confirm, and the later round
  region->Stop();
}

TEST_F(SharedRegionTest, ANewCoordinatorGivesItANewName) {
  const std::shared_ptr<SharedRegion> region = Make();
  forgets_ = true;
  region->AttachAgain();
  std::string why;
  EXPECT_TRUE(Await([&] { return region->id(&why) == "region-1"; }));
  EXPECT_TRUE(Await([&] { return region->workers().size() == 2; }));
  EXPECT_EQ(first_.attaches(), 2);
  EXPECT_EQ(second_.attaches(), 2);
  region->Stop();
}

TEST_F(SharedRegionTest, AFenceWaitsForEveryWorker) {
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(Fence(*region, 41), IsEmpty());
  EXPECT_THAT(Fence(*region, 42), IsEmpty());
  EXPECT_THAT(first_.fences(), ElementsAre(41, 42));
  EXPECT_THAT(second_.fences(), ElementsAre(41, 42));
  second_.AnswerFences(false);
  std::atomic<bool> over{false};
  region->Fence(43, [&](const std::string& unsure) {
    EXPECT_THAT(unsure, IsEmpty());
    over = true;
  });
  EXPECT_TRUE(Await([&] { return second_.fences().size() == 3; }));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(over);
  second_.DropRegions();  // the fence completes: no writer is left
  EXPECT_TRUE(Await([&] { return over.load(); }));
  region->Stop();
}

TEST_F(SharedRegionTest, AWorkerThatDoesNotAnswerAFenceIsNamedAndDropped) {
  const std::shared_ptr<SharedRegion> region = Make();
  second_.AnswerFences(false);
  const absl::Time begin = absl::Now();
  EXPECT_EQ(Fence(*region, 1), "second");
  EXPECT_LT(absl::Now() - begin, absl::Seconds(15));
  EXPECT_THAT(first_.fences(), ElementsAre(1));
  region->Stop();
}

TEST_F(SharedRegionTest, AFenceAfterStopCompletesAtOnce) {
  const std::shared_ptr<SharedRegion> region = Make();
  second_.AnswerFences(false);
  std::atomic<int> over{0};
  region->Fence(1, [&](const std::string&) { ++over; });
  region->Stop();
  EXPECT_EQ(over, 1);
  region->Fence(2, [&](const std::string&) { ++over; });
  EXPECT_EQ(over, 2);
}

TEST_F(SharedRegionTest, AWorkerThatRejectsItIsNamed) {
  second_.RefuseWith(AttachCode::kDescriptorRefused);
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(region->workers(), ElementsAre("first"));
  EXPECT_THAT(region->trouble(), HasSubstr("second: as it was told"));
  second_.RefuseWith(AttachCode::kAttached);
  EXPECT_TRUE(Await([&] { return region->workers().size() == 2; }));  // the worker is asked again
  region->Stop();
}

// Regardless of how many others have it.
TEST_F(SharedRegionTest, AWorkerThatRejectsItIsRetried) {
  second_.RefuseWith(AttachCode::kDescriptorRefused);
  const std::shared_ptr<SharedRegion> region = Make();
  const int calls = calls_;
  EXPECT_TRUE(Await([&] { return calls_ >= calls + 6; }));  // three more rounds
  second_.RefuseWith(AttachCode::kAttached);
  EXPECT_TRUE(Await([&] { return region->workers().size() == 2; }));
  region->Stop();
}

// Workers reject other users' processes like this: the client's message meets a closed socket.
TEST_F(SharedRegionTest, AWorkerThatRejectsWithoutReadingIsNamed) {
  second_.RefuseUnheard(AttachCode::kForeignUser);
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(region->workers(), ElementsAre("first"));
  EXPECT_THAT(region->trouble(), HasSubstr("second: as it was told"));
  region->Stop();
}

TEST_F(SharedRegionTest, AnUnreachableSocketIsNamed) {
  change_second_ = [](v1::AttachPoint& point) { point.set_socket_path("/nowhere/at/all.sock"); };
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(region->workers(), ElementsAre("first"));
  EXPECT_THAT(region->trouble(), HasSubstr("second: "));
  EXPECT_THAT(region->trouble(), HasSubstr("No such file or directory"));
  region->Stop();
}

TEST_F(SharedRegionTest, AWorkerOnAnotherMachineIsNotDialled) {
  change_second_ = [](v1::AttachPoint& point) { point.set_host_id("another"); };
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(region->workers(), ElementsAre("first"));
  EXPECT_THAT(region->trouble(), HasSubstr("second: is on another machine"));
  EXPECT_EQ(second_.attaches(), 0);
  const int calls = calls_;
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_EQ(calls_, calls);  // and no client requests it again
  region->Stop();
}

TEST_F(SharedRegionTest, WithoutWorkersTheMemoryIsStillUsable) {
  refusal_ = absl::FailedPreconditionError("no worker takes host memory");
  const std::shared_ptr<SharedRegion> region = Make();
  EXPECT_THAT(region->workers(), IsEmpty());
  std::string why;
  EXPECT_THAT(region->id(&why), IsEmpty());
  EXPECT_THAT(why, HasSubstr("no worker takes host memory"));
  region->data()[0] = 1;
  const int calls = calls_;
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(calls_, calls);  // the coordinator has rejected it, so no client requests it again
  region->Stop();
}

TEST_F(SharedRegionTest, BadSizesAreRejected) {
  const auto attach = [this](const v1::AttachRequest& request) { return Attach(request); };
  EXPECT_TRUE(absl::IsInvalidArgument(SharedRegion::Make(0, attach).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(SharedRegion::Make(int64_t{1} << 60, attach).status()));
}

TEST_F(SharedRegionTest, TheIndexFindsRangesInsideRegions) {
  const std::shared_ptr<SharedRegion> region = Make(4096);
  RegionIndex index;
  EXPECT_EQ(index.Any(), nullptr);
  index.Add(region);
  EXPECT_EQ(index.Find(region->data(), 4096), region);
  EXPECT_EQ(index.Find(region->data() + 4096, 0), region);
  EXPECT_EQ(index.Find(region->data() + 1, 4096), nullptr);
  EXPECT_EQ(index.Find(region->data() - 1, 1), nullptr);
  index.Remove(region.get());
  EXPECT_EQ(index.Find(region->data(), 1), nullptr);
  region->Stop();
}

}  // namespace
}  // namespace ringattn::client
