#include "common/observability/trace_context.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr char kGood[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceContextTest, AValidOneIsPassedOn) {
  EXPECT_EQ(ReadTraceparent(kGood), kGood);
  EXPECT_EQ(TraceIdOf(kGood), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(TraceIdOf(""), "");
}

TEST(TraceContextTest, OfALaterVersionWhatThisOneKnows) {
  const std::string later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  EXPECT_EQ(ReadTraceparent(later), kGood);
  EXPECT_EQ(ReadTraceparent(later + "-what-is-this"), kGood);
  EXPECT_EQ(ReadTraceparent(later + ".what"), std::nullopt);
}

TEST(TraceContextTest, FlagsWithoutAMeaningAreNotPassedOn) {
  const std::string begin = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-";
  EXPECT_EQ(ReadTraceparent(begin + "00"), begin + "00");
  EXPECT_EQ(ReadTraceparent(begin + "03"), begin + "03");
  EXPECT_EQ(ReadTraceparent(begin + "ff"), begin + "03");
  EXPECT_EQ(ReadTraceparent(begin + "a4"), begin + "00");
}

TEST(TraceContextTest, WhatIsNotValidIsNone) {
  for (const char* text : {
           "",
           "00",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",      // no flags
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",    // one flag digit missing
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",  // version 00 ends there
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
           "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
           "00-00000000000000000000000000000000-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
           "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           "0x-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           "00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331_01",
           " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
           "00-0af7651916cd43dd8448eb211c80319-cb7ad6b7169203331-01",
       }) {
    EXPECT_EQ(ReadTraceparent(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace ringattn
