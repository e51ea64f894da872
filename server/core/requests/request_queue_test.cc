#include "server/core/requests/request_queue.h"

#include <limits>
#include <set>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

TEST(RequestQueueTest, CountsByClient) {
  RequestQueue queue;
  queue.Add(1, "a", 10);
  queue.Add(2, "b", 20);
  queue.Add(3, "a", 30);
  EXPECT_EQ(queue.all().requests, 3);
  EXPECT_EQ(queue.all().bytes, 60);
  EXPECT_EQ(queue.Of("a").requests, 2);
  EXPECT_EQ(queue.Of("a").bytes, 40);
  queue.Remove(1);
  queue.Remove(1);
  EXPECT_FALSE(queue.Has(1));
  EXPECT_EQ(queue.Of("a").bytes, 30);
  queue.Remove(3);
  EXPECT_EQ(queue.Of("a").requests, 0);
  EXPECT_EQ(queue.Of("nobody").requests, 0);
  EXPECT_EQ(queue.all().bytes, 20);
  queue.Remove(2);
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.all().bytes, 0);
}

TEST(RequestQueueTest, KeepsExtremes) {
  RequestQueue queue;
  queue.Add(1, "a", 10);
  queue.SetNeeds(1, {.cost_seconds = 2, .memory_bytes = 100});
  queue.Add(2, "b", 10);
  EXPECT_EQ(queue.ExtremesOf("b").cost_seconds, std::numeric_limits<double>::infinity());
  queue.SetNeeds(2, {.cost_seconds = 1, .memory_bytes = 50, .is_special = true});
  queue.Add(3, "a", 10);
  queue.SetNeeds(3, {.cost_seconds = 2, .memory_bytes = 300});
  EXPECT_EQ(queue.extremes().cost_seconds, 1);
  EXPECT_EQ(queue.extremes().memory_bytes, 300);
  EXPECT_TRUE(queue.extremes().is_special);
  EXPECT_EQ(queue.ExtremesOf("a").cost_seconds, 2);
  EXPECT_FALSE(queue.ExtremesOf("a").is_special);
  queue.SetNeeds(2, {.cost_seconds = 4, .memory_bytes = 50});  // replaces
  EXPECT_EQ(queue.extremes().cost_seconds, 2);
  EXPECT_FALSE(queue.extremes().is_special);
  queue.Remove(3);
  EXPECT_EQ(queue.extremes().memory_bytes, 100);
  EXPECT_EQ(queue.ExtremesOf("a").cost_seconds, 2);
  queue.Remove(1);
  queue.Remove(2);
  EXPECT_EQ(queue.extremes().cost_seconds, std::numeric_limits<double>::infinity());
  EXPECT_EQ(queue.extremes().memory_bytes, 0);
}

TEST(RequestQueueTest, NewRequestsAreReportedOnce) {
  RequestQueue queue;
  for (StreamId stream = 1; stream <= 3; ++stream) {
    queue.Add(stream, "a", 10);
    queue.SetNeeds(stream, {});
  }
  queue.Add(4, "a", 10);  // no plan yet
  queue.Remove(2);
  EXPECT_EQ(queue.TakeNew(), (std::set<StreamId>{1, 3}));
  EXPECT_TRUE(queue.TakeNew().empty());
  queue.SetNeeds(4, {});
  queue.SetNeeds(5, {});  // not queued
  EXPECT_EQ(queue.TakeNew(), (std::set<StreamId>{4}));
}

}  // namespace
}  // namespace ringattn::server
