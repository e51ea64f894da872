#include "common/security/tls_material.h"

#include <sys/stat.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/security/test_certificates.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(ReadTlsFiles, GivesWhatIsInForceAndWhenItExpires) {
  const TestAuthority authority("ca");
  const TestCertificate soon = authority.Issue("soon", -10, 3600);
  const TestCertificate late = authority.Issue("late", -10, 7200);
  const std::string key = PutFile("key", late.key);
  const std::string ca = PutFile("ca", authority.pem());
  const std::string chain = PutFile("crt", late.certificate + soon.certificate);
  const auto read = ReadTlsFiles({chain, key, ca}, absl::Now());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->authorities_pem, authority.pem());
  EXPECT_EQ(read->identity_pem, absl::StrCat(late.key, "\n", late.certificate, soon.certificate));
  // The chain expires with its first certificate to expire.
  EXPECT_LT(absl::AbsDuration(read->expires - absl::Now() - absl::Hours(1)), absl::Minutes(1));
  const auto only_authorities = ReadTlsFiles({"", "", ca}, absl::Now());
  ASSERT_TRUE(only_authorities.ok());
  EXPECT_EQ(only_authorities->expires, absl::InfiniteFuture());
}

TEST(ReadTlsFiles, ErrorsNameTheFileAndWhatIsWrong) {
  const TestAuthority authority("ca");
  const TestCertificate mine = authority.Issue("mine"), other = authority.Issue("other");
  const TestCertificate old = authority.Issue("old", -7200, -3600);
  const TestCertificate early = authority.Issue("early", 3600, 7200);
  const std::string crt = PutFile("crt", mine.certificate), key = PutFile("key", mine.key);
  const auto why = [&](const TlsFiles& files) {
    const auto read = ReadTlsFiles(files, absl::Now());
    EXPECT_FALSE(read.ok());
    return std::string(read.status().message());
  };
  EXPECT_EQ(why({"/no/such.crt", key, ""}), "/no/such.crt: cannot read the certificate");
  EXPECT_EQ(why({crt, "/no/such.key", ""}), "/no/such.key: cannot read the key");
  EXPECT_EQ(why({crt, key, "/no/such.ca"}), "/no/such.ca: cannot read the authorities");
  const std::string rubbish = PutFile("rubbish", "rubbish");
  EXPECT_EQ(why({rubbish, key, ""}), rubbish + ": it holds no certificate in PEM");
  EXPECT_EQ(why({crt, rubbish, ""}), rubbish + ": it holds no key in PEM without a pass phrase");
  EXPECT_EQ(why({crt, key, rubbish}), rubbish + ": it holds no certificate in PEM");
  std::string text = mine.certificate;
  text[text.size() / 2] = '!';
  const std::string damaged = PutFile("damaged", text);
  EXPECT_TRUE(absl::StartsWith(why({damaged, key, ""}), damaged)) << why({damaged, key, ""});
  const std::string others = PutFile("others", other.key);
  EXPECT_EQ(why({crt, others, ""}), absl::StrCat(others, ": it is not the key of ", crt));
  const std::string expired = PutFile("expired", old.certificate);
  EXPECT_TRUE(absl::StartsWith(why({expired, PutFile("old.key", old.key), ""}),
                               expired + ": it expired at "));
  const std::string later = PutFile("later", early.certificate);
  EXPECT_TRUE(absl::StartsWith(why({later, PutFile("early.key", early.key), ""}),
                               later + ": it is not valid before "));
  const std::string large = PutFile("large", std::string((1 << 20) + 1, 'x'));
  EXPECT_EQ(why({large, key, ""}), large + ": the certificate has over 1 MiB");
  const std::string fifo = testing::TempDir() + "/fifo.key";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);  // nobody writes
  EXPECT_EQ(why({crt, fifo, ""}), fifo + ": cannot read the key: it is not a regular file");
}

}  // namespace
}  // namespace ringattn
