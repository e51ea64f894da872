#include "server/port_file.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr char kNoFolder[] = "/no/such/folder/server.json";

TEST(PortFileTest, ReportsTheAddresses) {
  const std::string path = absl::StrCat(testing::TempDir(), "/server.json");
  ServerAddresses addresses;
  addresses.listen = "127.0.0.1:1";
  addresses.control = "127.0.0.1:2";
  ASSERT_TRUE(WritePortFile(path, ServerOptions(), addresses).ok());
  std::string text;
  std::getline(std::ifstream(path), text);
  EXPECT_EQ(text, R"({"listen":"127.0.0.1:1","control":"127.0.0.1:2","metrics":"","health":""})");
}

// A coordinator that restarts on a full disk keeps its ports.
TEST(PortFileTest, IsOptionalIfEveryPortIsGiven) {
  ServerOptions options;
  EXPECT_TRUE(WritePortFile(kNoFolder, options, ServerAddresses()).ok());
  options.health_listen = "127.0.0.1:0";
  EXPECT_EQ(WritePortFile(kNoFolder, options, ServerAddresses()).code(),
            absl::StatusCode::kUnavailable);
  options.health_listen = "";
  options.listen = "[::1]:0";
  EXPECT_EQ(WritePortFile(kNoFolder, options, ServerAddresses()).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(WritePortFile("", options, ServerAddresses()).ok());
}

}  // namespace
}  // namespace ringattn::server
