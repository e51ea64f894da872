#include "worker/kernels/cuda/sm90/launch/work_shifts.h"

#include "gtest/gtest.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

TEST(WorkShiftsTest, ShortLaunchesAreNotDivided) {
  const ShiftedLaunch launch = DivideIntoShifts(1000, 132, 0.0039);
  EXPECT_EQ(launch.blocks, 132);
  EXPECT_EQ(launch.shifts.first_blocks, 132u);
  EXPECT_EQ(launch.shifts.cycles, 0u);
}

TEST(WorkShiftsTest, LongLaunchesHaveBlocksForEveryShift) {
  const ShiftedLaunch launch = DivideIntoShifts(100000, 132, 0.020);
  EXPECT_EQ(launch.shifts.first_blocks, 132u);
  EXPECT_EQ(launch.shifts.cycles, 3'500'000u);  // 2 ms at 1.75 GHz
  EXPECT_EQ(launch.blocks, 132 * 16);  // 10 shifts, half as many more, and the first blocks' part
}

TEST(WorkShiftsTest, NoMoreBlocksThanItems) {
  EXPECT_EQ(DivideIntoShifts(300, 132, 1.0).blocks, 300);
  const ShiftedLaunch few = DivideIntoShifts(100, 132, 1.0);
  EXPECT_EQ(few.blocks, 100);
  EXPECT_EQ(few.shifts.first_blocks, 100u);
  EXPECT_EQ(few.shifts.cycles, 0u);
}

TEST(WorkShiftsTest, BlocksAreBounded) {
  EXPECT_EQ(DivideIntoShifts(int64_t{1} << 31, 132, 3600).blocks, 132 * 4096);
}

TEST(WorkShiftsTest, CyclesMayBeForced) {
  EXPECT_EQ(DivideIntoShifts(100000, 132, 1.0, -1).blocks, 132);
  const ShiftedLaunch launch = DivideIntoShifts(500, 132, 1e-6, 1);
  EXPECT_EQ(launch.blocks, 500);
  EXPECT_EQ(launch.shifts.cycles, 1u);
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
