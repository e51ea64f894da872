#include "worker/executor/hazard_tracker.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

EventRef NewEvent() { return std::make_shared<HostEvent>(); }
Access Read(BufferId buffer, int64_t offset, int64_t bytes) {
  return {{buffer, offset, bytes}, false};
}
Access Write(BufferId buffer, int64_t offset, int64_t bytes) {
  return {{buffer, offset, bytes}, true};
}

TEST(HazardTracker, ReadersDoNotWaitForReaders) {
  HazardTracker tracker;
  tracker.Record({Read(0, 0, 10)}, NewEvent());
  EXPECT_THAT(tracker.Dependencies({Read(0, 0, 10)}), IsEmpty());
}

TEST(HazardTracker, InitialWritersDoNotReplaceEachOther) {
  HazardTracker tracker;
  const EventRef first = NewEvent(), second = NewEvent(), later = NewEvent();
  tracker.RecordInitial({0, 0, 10}, {first, second});
  EXPECT_THAT(tracker.Dependencies({Read(0, 9, 1)}), UnorderedElementsAre(first, second));
  EXPECT_THAT(tracker.Dependencies({Read(1, 0, 10)}), IsEmpty());
  tracker.Record({Write(0, 0, 10)}, later);
  EXPECT_THAT(tracker.Dependencies({Read(0, 9, 1)}), UnorderedElementsAre(later));
}

TEST(HazardTracker, ReadAfterWriteWriteAfterReadWriteAfterWrite) {
  HazardTracker tracker;
  const EventRef write = NewEvent(), read = NewEvent();
  tracker.Record({Write(0, 0, 10)}, write);
  EXPECT_THAT(tracker.Dependencies({Read(0, 9, 1)}), UnorderedElementsAre(write));
  EXPECT_THAT(tracker.Dependencies({Write(0, 9, 1)}), UnorderedElementsAre(write));
  tracker.Record({Read(0, 0, 10)}, read);
  EXPECT_THAT(tracker.Dependencies({Write(0, 0, 1)}), UnorderedElementsAre(write, read));
}

TEST(HazardTracker, DisjointRangesAndOtherBuffersDoNotWait) {
  HazardTracker tracker;
  tracker.Record({Write(0, 0, 10)}, NewEvent());
  EXPECT_THAT(tracker.Dependencies({Write(0, 10, 10)}), IsEmpty());
  EXPECT_THAT(tracker.Dependencies({Write(1, 0, 10)}), IsEmpty());
}

TEST(HazardTracker, CoveringWriteReplacesEarlierEntries) {
  HazardTracker tracker;
  const EventRef first = NewEvent(), second = NewEvent();
  tracker.Record({Write(0, 2, 4)}, first);
  tracker.Record({Write(0, 0, 10)}, second);
  EXPECT_THAT(tracker.Dependencies({Read(0, 0, 10)}), UnorderedElementsAre(second));
}

TEST(HazardTracker, PartialWriteKeepsEarlierEntries) {
  HazardTracker tracker;
  const EventRef first = NewEvent(), second = NewEvent();
  tracker.Record({Write(0, 0, 10)}, first);
  tracker.Record({Write(0, 0, 5)}, second);
  EXPECT_THAT(tracker.Dependencies({Read(0, 0, 10)}), UnorderedElementsAre(first, second));
}

TEST(HazardTracker, WriteConflictsWithOverlappingAccess) {
  EXPECT_FALSE(Conflict({Read(0, 0, 10)}, {Read(0, 0, 10)}));
  EXPECT_TRUE(Conflict({Read(1, 0, 1), Write(0, 0, 10)}, {Read(0, 9, 1)}));
  EXPECT_TRUE(Conflict({Read(0, 0, 10)}, {Read(1, 0, 1), Write(0, 9, 1)}));
  EXPECT_FALSE(Conflict({Write(0, 0, 10)}, {Write(0, 10, 10)}));
  EXPECT_FALSE(Conflict({Write(0, 0, 10)}, {Write(1, 0, 10)}));
}

TEST(HazardTracker, OperationMayAccessABufferTwice) {
  HazardTracker tracker;
  const EventRef event = NewEvent();
  tracker.Record({Read(0, 0, 10), Write(0, 0, 10)}, event);
  EXPECT_THAT(tracker.Dependencies({Write(0, 0, 1)}), UnorderedElementsAre(event));
}

}  // namespace
}  // namespace ringattn::worker
