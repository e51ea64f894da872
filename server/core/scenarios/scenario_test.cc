// Runs every scenario of testdata/*.txt; server/core/testing/scenario.h documents the format.
//
//   bazel test //server/core/scenarios:scenario_test --test_arg=--gtest_filter='loss.*'
//   bazel run //server/core/scenarios:scenario_test -- --rewrite
//
// --rewrite replaces the expected traces in the source tree by those that occur; review the diff.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

namespace fs = std::filesystem;

constexpr char kFolder[] = "server/core/scenarios/testdata";

// The folder's text files in order of their names; empty if there is no such folder.
std::vector<fs::path> ScenarioFiles(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class ScenarioTest : public testing::Test {
 public:
  explicit ScenarioTest(ScenarioSection section) : section_(std::move(section)) {}

  void TestBody() override {
    const absl::StatusOr<std::string> result = RunScenario(section_);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(*result, section_.text) << "to accept the new traces, run with --rewrite";
  }

 private:
  const ScenarioSection section_;
};

// A file that cannot be tested.
class InvalidFileTest : public testing::Test {
 public:
  explicit InvalidFileTest(std::string error) : error_(std::move(error)) {}
  void TestBody() override { FAIL() << error_; }

 private:
  const std::string error_;
};

void RegisterInvalid(const std::string& suite, const std::string& error) {
  testing::RegisterTest(absl::StrCat(suite, "Invalid").c_str(), "File", nullptr, nullptr, __FILE__,
                        __LINE__,
                        [error]() -> testing::Test* { return new InvalidFileTest(error); });
}

// Registers one test for each scenario of the file.
void RegisterFile(const fs::path& path) {
  const std::string suite = path.stem().string();
  const std::string text = ReadFile(path);
  const std::vector<ScenarioSection> sections = SplitScenarios(text);
  if (sections.size() < 2)
    return RegisterInvalid(suite, absl::StrCat(path.string(), ": no scenario"));
  if (JoinScenarios(sections) != text) {
    return RegisterInvalid(suite, absl::StrCat(path.string(), ": run with --rewrite to format it"));
  }
  std::set<std::string> names;
  for (const ScenarioSection& section : sections) {
    if (section.name.empty()) continue;
    if (!names.insert(section.name).second) {
      return RegisterInvalid(suite, absl::StrCat(path.string(), ": two scenarios ", section.name));
    }
    testing::RegisterTest(suite.c_str(), section.name.c_str(), nullptr, nullptr, path.c_str(), 1,
                          [section]() -> testing::Test* { return new ScenarioTest(section); });
  }
}

// Replaces the traces of all files in the source tree. Returns the exit code.
int Rewrite() {
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  if (workspace == nullptr) {
    std::fprintf(stderr, "--rewrite needs \"bazel run\", which names the source tree\n");
    return 2;
  }
  for (const fs::path& path : ScenarioFiles(fs::path(workspace) / kFolder)) {
    const std::string before = ReadFile(path);
    std::vector<ScenarioSection> sections = SplitScenarios(before);
    for (ScenarioSection& section : sections) {
      const absl::StatusOr<std::string> result = RunScenario(section);
      if (!result.ok()) {
        std::fprintf(stderr, "%s: %s\n", path.c_str(), result.status().ToString().c_str());
        return 1;
      }
      section.text = *result;
    }
    const std::string after = JoinScenarios(sections);
    if (after == before) continue;
    std::ofstream(path, std::ios::binary) << after;
    std::printf("rewrote %s\n", path.c_str());
  }
  return 0;
}

}  // namespace

int RunMain(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--rewrite") return Rewrite();
    std::fprintf(stderr, "unknown argument %s; the only one is --rewrite\n", argv[i]);
    return 2;
  }
  const std::vector<fs::path> files = ScenarioFiles(kFolder);
  if (files.empty()) RegisterInvalid("testdata", absl::StrCat(kFolder, " has no .txt files"));
  for (const fs::path& path : files) RegisterFile(path);
  return RUN_ALL_TESTS();
}

}  // namespace ringattn::server

int main(int argc, char** argv) { return ringattn::server::RunMain(argc, argv); }
