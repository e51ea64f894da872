#include "common/process/secret_file.h"

#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

absl::StatusOr<std::string> Read(const std::string& text) {
  const std::string path = testing::TempDir() + "/secret";
  std::ofstream(path, std::ios::binary) << text;
  return ReadSecretFile(path);
}

TEST(SecretFile, WhiteSpaceAroundItIsNotPartOfIt) {
  EXPECT_EQ(*Read("0123456789abcdef"), "0123456789abcdef");
  EXPECT_EQ(*Read("  0123456789abcdef\n"), "0123456789abcdef");
}

TEST(SecretFile, BadFilesAreRefused) {
  for (const std::string& text :
       {std::string(), std::string("too short"), std::string(1025, 'x'), std::string(2000, 'x'),
        std::string("0123456789 abcdef"), std::string("0123456789abcde\x01")}) {
    EXPECT_EQ(Read(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ReadSecretFile("/nonexistent/secret").status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringattn
