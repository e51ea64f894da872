#include "server/identity/clients_file.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

// SHA-256 of "abc" (FIPS 180-2, B.1).
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kOther[] = "0000000000000000000000000000000000000000000000000000000000000000";

std::string Clients(const std::string& entries) {
  return absl::StrCat(R"({"clients": [)", entries, "]}");
}

std::string ErrorOf(const std::string& json) {
  return std::string(KnownClients::Parse(json).status().message());
}

// Returns the error for a client "a" with these additional fields.
std::string CheckWith(const std::string& fields) {
  return ErrorOf(Clients(absl::StrCat(R"({"name": "a", )", fields, "}")));
}

TEST(KnownClients, AreFoundByTokenAndByCertificate) {
  const auto known = KnownClients::Parse(Clients(absl::StrCat(
      R"({"name": "by-token", "token_sha256": [")", kOther, R"(", ")", kAbc, R"("], "weight": 2.5,
          "max_requests_in_flight": 32, "max_queued_bytes": 8589934592,
          "max_kv_caches": 7, "max_kv_cache_bytes": 4096},
         {"name": "by/certificate@1.x_", "certificates": ["spiffe://lab.example/a",
          "O=lab,CN=trainer", "x509:CN=second"]})")));
  ASSERT_TRUE(known.ok()) << known.status();
  const KnownClient* by_token = known->ByToken("abc");
  ASSERT_NE(by_token, nullptr);
  EXPECT_EQ(by_token->name, "by-token");
  EXPECT_EQ(by_token->terms, (ClientTerms{2.5, 32, 8589934592, std::nullopt, 7, 4096}));
  EXPECT_EQ(known->ByToken("abd"), nullptr);
  EXPECT_EQ(known->ByToken(""), nullptr);

  using Kind = Principal::Kind;
  const auto name = [&](Kind kind, const char* text) {
    const KnownClient* found = known->ByCertificate({kind, text});
    return found == nullptr ? std::string() : found->name;
  };
  EXPECT_EQ(name(Kind::kSpiffe, "spiffe://lab.example/a"), "by/certificate@1.x_");
  EXPECT_EQ(name(Kind::kX509Subject, "O=lab,CN=trainer"), "by/certificate@1.x_");
  EXPECT_EQ(name(Kind::kX509Subject, "CN=second"), "by/certificate@1.x_");
  EXPECT_EQ(known->ByCertificate({Kind::kSpiffe, "spiffe://lab.example/a"})->terms, ClientTerms());
  EXPECT_EQ(name(Kind::kSpiffe, "spiffe://lab.example/ab"), "");
  // A subject may be any text, including another client's SPIFFE ID.
  EXPECT_EQ(name(Kind::kX509Subject, "spiffe://lab.example/a"), "");
  EXPECT_EQ(name(Kind::kAnonymous, ""), "");
}

TEST(KnownClients, EveryBadFieldIsNamed) {
  const std::string token = absl::StrCat(R"("token_sha256": [")", kAbc, R"("])");
  EXPECT_EQ(CheckWith(token), "");
  const struct {
    std::string fields;
    std::string says;
  } rows[] = {
      {R"("weight": 1)",
       "clients[0] (a).token_sha256 is missing; a client needs token_sha256 or certificates"},
      {R"("token_sha256": "x")", "clients[0] (a).token_sha256 must be a list of at most 4 texts"},
      {R"("token_sha256": [1])", "clients[0] (a).token_sha256 must be a list"},
      {R"("token_sha256": ["abc"])", "clients[0] (a).token_sha256 must hold SHA-256 digests"},
      {absl::StrCat(R"("token_sha256": [")", kAbc, R"(", ")", kAbc, R"("])"),
       "clients[0] (a).token_sha256 holds a digest for the second time"},
      {R"("token_sha256": ["", "", "", "", ""])", "must be a list of at most 4"},
      {R"("certificates": ["trainer"])", "clients[0] (a).certificates must hold SPIFFE IDs"},
      {R"("certificates": [""])", "clients[0] (a).certificates must hold"},
      {R"("certificates": {})", "clients[0] (a).certificates must be a list of at most 64 texts"},
      {R"("certificates": ["CN=x", "x509:CN=x"])",
       "clients[0] (a).certificates holds x509:CN=x for the second time"},
      {token + R"(, "weight": 0)", "clients[0] (a).weight must be a number from 0.01 to 100"},
      {token + R"(, "weight": -1)", "clients[0] (a).weight must be"},
      {token + R"(, "weight": "2")", "clients[0] (a).weight must be"},
      {token + R"(, "weight": 1e9)", "clients[0] (a).weight must be"},
      {token + R"(, "max_requests_in_flight": 0)",
       "clients[0] (a).max_requests_in_flight must be a whole number, at least 1"},
      {token + R"(, "max_requests_in_flight": 1.5)", "clients[0] (a).max_requests_in_flight must"},
      {token + R"(, "max_queued_bytes": -5)", "clients[0] (a).max_queued_bytes must be"},
      {token + R"(, "max_queued_bytes": null)", "clients[0] (a).max_queued_bytes must be"},
      {token + R"(, "tokens": [])",
       "clients[0] (a).tokens is not a field of clients files; use certificates, "
       "max_kv_cache_bytes, max_kv_caches, max_queued_bytes, max_requests_in_flight, "
       "max_residual_bytes, name, token_sha256, weight"},
      {token + R"(}, {"name": "a", "certificates": ["CN=b"])",
       "clients[1] (a).name is another client's too"},
      {token + R"(}, {"name": "b", )" + token,
       "clients[1] (b).token_sha256 holds a digest for the second time"},
  };
  for (const auto& row : rows) {
    EXPECT_NE(CheckWith(row.fields).find(row.says), std::string::npos)
        << row.fields << "\nsays: " << CheckWith(row.fields);
  }
  for (const char* name : {R"("")", "7", R"("a b")", R"("ä")", R"("a\n")"}) {
    const std::string why = ErrorOf(Clients(absl::StrCat(R"({"name": )", name, ", ", token, "}")));
    EXPECT_NE(why.find(".name must be 1 to 64 letters"), std::string::npos) << name << why;
  }
  EXPECT_NE(ErrorOf(Clients("{" + token + "}")).find("clients[0].name must be"), std::string::npos);
}

TEST(KnownClients, AFileIsAnObjectWithANonemptyList) {
  for (const char* json : {"", "rubbish", "[]", "{}", R"({"clients": {}})", R"({"clients": [)"}) {
    EXPECT_EQ(ErrorOf(json), "it is not a JSON object with a list \"clients\"") << json;
  }
  EXPECT_EQ(CheckWith(R"("weight": 1, "weight": 2)"), "weight stands twice in one object");
  EXPECT_EQ(ErrorOf(R"({"clients": [], "clients": []})"), "clients stands twice in one object");
  EXPECT_EQ(ErrorOf(R"({"clients": []})"), "clients must name 1 to 1024");
  EXPECT_EQ(ErrorOf(R"({"clients": [1]})"), "clients[0] is not an object");
  EXPECT_EQ(ErrorOf(R"({"clients": [], "client": 1})"),
            "client is not a field of clients files; use clients");
}

}  // namespace
}  // namespace ringattn::server
