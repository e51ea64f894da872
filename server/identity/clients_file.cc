#include "server/identity/clients_file.h"

#include <algorithm>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace ringattn::server {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxNameBytes = 64;
constexpr size_t kMaxCertificateBytes = 1024;

// The first error in the file, beginning with the field's name.
class Faults {
 public:
  void Add(absl::string_view field, absl::string_view why) {
    Add(absl::InvalidArgumentError(absl::StrCat(field, " ", why)));
  }
  void Add(const absl::Status& status) { first_.Update(status); }
  const absl::Status& first() const { return first_; }

 private:
  absl::Status first_;
};

// Returns a discarded value if the text is not JSON. Detects repeated field names, of which the
// library would silently use the last.
Json ParseJson(absl::string_view text, std::string* repeated) {
  std::vector<std::set<std::string>> fields;  // of the open objects
  const auto look = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) fields.emplace_back();
    if (event == Json::parse_event_t::object_end) fields.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string field = parsed.get<std::string>();
      if (!fields.back().insert(field).second && repeated->empty()) *repeated = field;
    }
    return true;
  };
  return Json::parse(text.begin(), text.end(), look, /*allow_exceptions=*/false);
}

bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(c) || absl::string_view("._-/@").find(c) != std::string::npos;
         });
}

// Returns the list of strings in a field; empty if the field is missing.
std::vector<std::string> Texts(const Json& client, const char* field, size_t most, Faults* faults) {
  std::vector<std::string> texts;
  if (!client.contains(field)) return texts;
  const Json& list = client[field];
  const bool is_list = list.is_array() && std::all_of(list.begin(), list.end(),
                                                      [](const Json& e) { return e.is_string(); });
  if (!is_list || list.size() > most) {
    faults->Add(field, absl::StrCat("must be a list of at most ", most, " texts"));
    return texts;
  }
  for (const Json& each : list) texts.push_back(each.get<std::string>());
  return texts;
}

// Returns a whole number of at least 1; nullopt if the field is missing.
std::optional<int64_t> Count(const Json& client, const char* field, Faults* faults) {
  if (!client.contains(field)) return std::nullopt;
  const Json& value = client[field];
  if (value.is_number_unsigned() && value.get<uint64_t>() >= 1 &&
      value.get<uint64_t>() <= uint64_t{1} << 62) {
    return static_cast<int64_t>(value.get<uint64_t>());
  }
  faults->Add(field, "must be a whole number, at least 1");
  return std::nullopt;
}

double Weight(const Json& client, Faults* faults) {
  if (!client.contains("weight")) return 1.0;
  const Json& value = client["weight"];
  const double weight = value.is_number() ? value.get<double>() : 0.0;
  if (weight >= kMinWeight && weight <= kMaxWeight) return weight;
  faults->Add("weight", absl::StrCat("must be a number from ", kMinWeight, " to ", kMaxWeight));
  return 1.0;
}

std::string NameIn(const Json& client, Faults* faults) {
  const bool is_text = client.contains("name") && client["name"].is_string();
  std::string name = is_text ? client["name"].get<std::string>() : "";
  if (!IsName(name)) {
    faults->Add("name", absl::StrCat("must be 1 to ", kMaxNameBytes,
                                     " letters, digits and characters of ._-/@"));
  }
  return name;
}

void RefuseUnknownFields(const Json& object, const std::set<std::string>& known, Faults* faults) {
  for (const auto& [field, value] : object.items()) {
    if (known.count(field) > 0) continue;
    faults->Add(field,
                absl::StrCat("is not a field of clients files; use ", absl::StrJoin(known, ", ")));
  }
}

// Returns the form of Principal::id(); empty if the text is neither a SPIFFE ID nor a subject.
std::string CertificateId(absl::string_view text) {
  if (text.size() > kMaxCertificateBytes) return "";
  Principal principal{Principal::Kind::kSpiffe, std::string(text)};
  if (!absl::StartsWith(text, "spiffe://")) {
    absl::ConsumePrefix(&text, "x509:");
    if (!absl::StrContains(text, '=')) return "";
    principal = {Principal::Kind::kX509Subject, std::string(text)};
  }
  return principal.id();
}

// Reads an entry without its tokens and certificates.
KnownClient ReadTerms(const Json& entry, Faults* faults) {
  KnownClient client;
  client.name = NameIn(entry, faults);
  RefuseUnknownFields(
      entry,
      {"name", "token_sha256", "certificates", "weight", "max_requests_in_flight",
       "max_queued_bytes", "max_residual_bytes", "max_kv_caches", "max_kv_cache_bytes"},
      faults);
  client.terms.weight = Weight(entry, faults);
  client.terms.max_requests_in_flight = Count(entry, "max_requests_in_flight", faults);
  client.terms.max_queued_bytes = Count(entry, "max_queued_bytes", faults);
  client.terms.max_residual_bytes = Count(entry, "max_residual_bytes", faults);
  client.terms.max_kv_caches = Count(entry, "max_kv_caches", faults);
  client.terms.max_kv_cache_bytes = Count(entry, "max_kv_cache_bytes", faults);
  return client;
}

}  // namespace

absl::Status KnownClients::AddTokens(const std::vector<std::string>& digests) {
  for (const std::string& text : digests) {
    const std::optional<SecretDigest> digest = SecretDigest::FromHex(text);
    if (!digest) {
      return absl::InvalidArgumentError(
          "token_sha256 must hold SHA-256 digests of 64 hexadecimal digits");
    }
    for (const auto& [known, index] : tokens_) {
      if (known == *digest) {
        return absl::InvalidArgumentError("token_sha256 holds a digest for the second time");
      }
    }
    tokens_.emplace_back(*digest, clients_.size());
  }
  return absl::OkStatus();
}

absl::Status KnownClients::AddCertificates(const std::vector<std::string>& ids) {
  for (const std::string& text : ids) {
    const std::string id = CertificateId(text);
    if (id.empty()) {
      return absl::InvalidArgumentError(
          "certificates must hold SPIFFE IDs (spiffe://...) and subjects (x509:O=lab,CN=trainer)");
    }
    if (!certificates_.emplace(id, clients_.size()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("certificates holds ", id, " for the second time"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<KnownClients> KnownClients::Parse(absl::string_view json) {
  std::string repeated;
  const Json root = ParseJson(json, &repeated);
  if (!root.is_object() || !root.contains("clients") || !root["clients"].is_array()) {
    return absl::InvalidArgumentError("it is not a JSON object with a list \"clients\"");
  }
  if (!repeated.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(repeated, " stands twice in one object"));
  }
  Faults faults;
  RefuseUnknownFields(root, {"clients"}, &faults);
  if (!faults.first().ok()) return faults.first();
  const Json& list = root["clients"];
  if (list.empty() || list.size() > kMaxClients) {
    return absl::InvalidArgumentError(absl::StrCat("clients must name 1 to ", kMaxClients));
  }
  KnownClients known;
  std::set<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_object()) {
      return absl::InvalidArgumentError(absl::StrCat("clients[", i, "] is not an object"));
    }
    KnownClient client = ReadTerms(list[i], &faults);
    const auto tokens = Texts(list[i], "token_sha256", kMaxTokensPerClient, &faults);
    const auto certificates = Texts(list[i], "certificates", kMaxCertificatesPerClient, &faults);
    if (!names.insert(client.name).second) faults.Add("name", "is another client's too");
    if (tokens.empty() && certificates.empty()) {
      faults.Add("token_sha256", "is missing; a client needs token_sha256 or certificates");
    }
    faults.Add(known.AddTokens(tokens));
    faults.Add(known.AddCertificates(certificates));
    if (!faults.first().ok()) {
      const std::string who = client.name.empty() ? "" : absl::StrCat(" (", client.name, ")");
      return absl::InvalidArgumentError(
          absl::StrCat("clients[", i, "]", who, ".", faults.first().message()));
    }
    known.clients_.push_back(std::move(client));
  }
  return known;
}

const KnownClient* KnownClients::ByToken(absl::string_view token) const {
  const SecretDigest digest = SecretDigest::Of(token);
  const KnownClient* found = nullptr;
  for (const auto& [known, index] : tokens_) {
    if (known == digest) found = &clients_[index];
  }
  return found;
}

const KnownClient* KnownClients::ByCertificate(const Principal& principal) const {
  if (principal.kind == Principal::Kind::kAnonymous) return nullptr;
  const auto found = certificates_.find(principal.id());
  return found == certificates_.end() ? nullptr : &clients_[found->second];
}

}  // namespace ringattn::server
