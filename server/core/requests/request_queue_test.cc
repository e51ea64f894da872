#include "server/core/requests/request_queue.h"

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

}  // namespace
}  // namespace ringattn::server
