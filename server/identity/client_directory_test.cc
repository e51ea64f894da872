#include "server/identity/client_directory.h"

#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr char kToken[] = "0123456789abcdef";
constexpr char kNextToken[] = "fedcba9876543210";

std::string FileWith(const std::string& token, const std::string& name = "a") {
  return absl::StrCat(R"({"clients": [{"name": ")", name, R"(", "token_sha256": [")",
                      SecretDigest::Of(token).ToHex(), R"("]}]})");
}

class Directory : public testing::Test {
 protected:
  Directory()
      : path_(absl::StrCat(testing::TempDir(), "/clients-",
                           testing::UnitTest::GetInstance()->current_test_info()->name())) {}

  // Replaces the file by a rename.
  void Put(const std::string& text) {
    std::ofstream(path_ + ".new") << text;
    ASSERT_EQ(std::rename((path_ + ".new").c_str(), path_.c_str()), 0);
  }

  // Returns the client's name, or the reason of the failure.
  static std::string IdentifiedAs(const ClientDirectory& directory,
                                  const std::vector<std::string>& values) {
    CallMetadata metadata;
    for (const std::string& value : values) metadata.emplace("authorization", value);
    const auto who = directory.Identify(metadata, nullptr);
    const auto* failure = std::get_if<Failure>(&who);
    if (failure == nullptr) return std::get<KnownClient>(who).name;
    EXPECT_EQ(failure->code, absl::StatusCode::kUnauthenticated);
    return failure->reason;
  }

  const std::string path_;
};

TEST_F(Directory, IdentifiesByBearerToken) {
  Put(FileWith(kToken));
  const auto directory = ClientDirectory::Open(path_);
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kToken)}), "a");
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("bearer ", kToken)}), "a");
  EXPECT_EQ(IdentifiedAs(**directory, {}), "CREDENTIALS_MISSING");
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kNextToken)}), "TOKEN_UNKNOWN");
  EXPECT_EQ(IdentifiedAs(**directory, {"Bearer "}), "TOKEN_UNKNOWN");
  EXPECT_EQ(IdentifiedAs(**directory, {kToken}), "CREDENTIALS_MALFORMED");
  const std::string good = absl::StrCat("Bearer ", kToken);
  EXPECT_EQ(IdentifiedAs(**directory, {good, good}), "CREDENTIALS_MALFORMED");
}

TEST_F(Directory, ReloadsItsFileAndKeepsTheOldOneIfTheNewIsInvalid) {
  Put(FileWith(kToken));
  const auto directory = ClientDirectory::Open(path_);
  ASSERT_TRUE(directory.ok()) << directory.status();
  const auto wait = [&](const auto& condition) {
    for (int i = 0; i < 500 && !condition((*directory)->stats()); ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    return condition((*directory)->stats());
  };
  Put("rubbish");
  EXPECT_TRUE(wait([](const DirectoryStats& s) { return s.refused_reloads == 1; }));
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kToken)}), "a");
  Put(FileWith(kNextToken, "b"));
  EXPECT_TRUE(wait([](const DirectoryStats& s) { return s.reloads == 1; }));
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kToken)}), "TOKEN_UNKNOWN");
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kNextToken)}), "b");
  std::remove(path_.c_str());
  EXPECT_TRUE(wait([](const DirectoryStats& s) { return s.refused_reloads == 2; }));
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kNextToken)}), "b");
}

// Nobody writes to the FIFO, so opening it for reading would wait. Calls are identified meanwhile.
TEST_F(Directory, AFileThatCannotBeReadAtOnceDelaysNoCall) {
  Put(FileWith(kToken));
  const auto directory = ClientDirectory::Open(path_);
  ASSERT_TRUE(directory.ok()) << directory.status();
  ASSERT_EQ(mkfifo((path_ + ".fifo").c_str(), 0600), 0);
  ASSERT_EQ(std::rename((path_ + ".fifo").c_str(), path_.c_str()), 0);
  for (int i = 0; i < 500 && (*directory)->stats().refused_reloads == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ((*directory)->stats().refused_reloads, 1);
  EXPECT_EQ(IdentifiedAs(**directory, {absl::StrCat("Bearer ", kToken)}), "a");
}

TEST_F(Directory, ErrorsNameTheFile) {
  EXPECT_EQ(ClientDirectory::Open("/no/such/file").status().message(),
            "/no/such/file: cannot read the clients file");
  Put("{}");
  EXPECT_EQ(ClientDirectory::Open(path_).status().message(),
            absl::StrCat(path_, ": it is not a JSON object with a list \"clients\""));
}

}  // namespace
}  // namespace ringattn::server
