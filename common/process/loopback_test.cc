#include "common/process/loopback.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(IsLoopback, AllOf127AndTheOneOfIpv6) {
  for (const char* address : {"127.0.0.1:7700", "127.255.1.2:0", "[::1]:7700", "localhost:1",
                              "[::ffff:127.0.0.1]:5", "unix:/tmp/socket", "unix-abstract:name"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
}

TEST(IsLoopback, NotTheWildcardsNorAnythingElse) {
  for (const char* address :
       {"0.0.0.0:7700", "[::]:7700", ":7700", "*:7700", "10.0.0.7:7700", "128.0.0.1:1",
        "[::ffff:10.0.0.1]:5", "[fe80::1]:1", "no.such.host.invalid:1", "127.0.0.1", ""}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

}  // namespace
}  // namespace ringattn
