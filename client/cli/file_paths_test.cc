#include "client/cli/file_paths.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

using ::testing::HasSubstr;

class FilePathsTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/file_paths";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ + "/sub");
    std::ofstream(At("in")) << "tensors";
    std::filesystem::create_symlink(At("in"), At("symbolic"));
    std::filesystem::create_hard_link(At("in"), At("hard"));
  }
  std::string At(const std::string& name) const { return folder_ + "/" + name; }
  std::string ErrorOf(const std::string& output, const std::string& trace = "") const {
    return std::string(
        CheckFilePaths({{"--input", At("in")}}, {{"--output", output}, {"--trace", trace}})
            .message());
  }

  std::string folder_;
};

TEST_F(FilePathsTest, OtherFilesPass) {
  EXPECT_EQ(ErrorOf(At("out")), "");
  EXPECT_EQ(ErrorOf(At("out"), At("trace")), "");
  EXPECT_EQ(ErrorOf("/dev/null", "/dev/null"), "");
}

TEST_F(FilePathsTest, TheInputIsRejectedUnderAnyName) {
  for (const char* name : {"in", "symbolic", "hard", "sub/../in"}) {
    EXPECT_THAT(ErrorOf(At(name)), HasSubstr("is the same file as --input=")) << name;
    EXPECT_THAT(ErrorOf(At("out"), At(name)), HasSubstr("--trace=")) << name;
  }
}

TEST_F(FilePathsTest, TwoOutputsThatDoNotExistYetMustDiffer) {
  EXPECT_THAT(ErrorOf(At("new"), At("sub/../new")), HasSubstr("is the same file as --output="));
}

}  // namespace
}  // namespace ringattn::client::cli
