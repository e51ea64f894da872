#include "common/wire/grpc_1_51/connection_table.h"

#include <sys/socket.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

TEST(ConnectionTableTest, RemovesClosedConnections) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  ConnectionTable table;
  table.Add(pair[0]);
  table.Add(pair[1]);
  EXPECT_EQ(table.Prune(), 2);
  close(pair[0]);
  EXPECT_EQ(table.size(), 2);
  EXPECT_EQ(table.Prune(), 1);
  close(pair[1]);
  EXPECT_EQ(table.Prune(), 0);
}

TEST(ConnectionTableTest, ReusedDescriptorIsAnotherConnection) {
  int first[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, first), 0);
  ConnectionTable table;
  table.Add(first[0]);
  // Another socket with the same number, which the table does not know.
  int second[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, second), 0);
  ASSERT_EQ(dup2(second[0], first[0]), first[0]);
  EXPECT_EQ(table.Prune(), 0);
  for (const int fd : {first[0], first[1], second[0], second[1]}) close(fd);
}

}  // namespace
}  // namespace ringattn::wire
