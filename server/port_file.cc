#include "server/port_file.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/observability/log.h"

namespace ringattn::server {
namespace {

bool SystemChoosesAPort(const ServerOptions& options) {
  for (const std::string& address :
       {options.listen, options.control_listen, options.metrics_listen, options.health_listen}) {
    if (absl::EndsWith(address, ":0")) return true;
  }
  return false;
}

bool Replace(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".", getpid());
  std::ofstream file(temporary);
  file << text;
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  unlink(temporary.c_str());
  return false;
}

}  // namespace

absl::Status WritePortFile(const std::string& path, const ServerOptions& options,
                           const ServerAddresses& addresses) {
  if (path.empty()) return absl::OkStatus();
  const nlohmann::ordered_json json = {{"listen", addresses.listen},
                                       {"control", addresses.control},
                                       {"metrics", addresses.metrics},
                                       {"health", addresses.health}};
  if (Replace(path, absl::StrCat(json.dump(), "\n"))) return absl::OkStatus();
  if (SystemChoosesAPort(options)) {
    return absl::UnavailableError(absl::StrCat(
        "cannot write the port file ", path, ", and the system chose a port that only it reports"));
  }
  LogWarning("the port file cannot be written; the ports are those of the flags", {{"file", path}});
  return absl::OkStatus();
}

}  // namespace ringattn::server
