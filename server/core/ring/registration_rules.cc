#include "server/core/ring/registration_rules.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/wire/durations.h"

namespace ringattn::server {
namespace {

// More than any device has, and small enough that sums over all workers do not overflow.
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 50;
constexpr int kMaxListEntries = 4096;
// More than a machine's network cards, with their virtual interfaces.
constexpr int kMaxInterfaces = 64;
constexpr int kMaxInterfaceAddresses = 64;

bool IsPrintable(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
}

bool IsRate(double value) { return std::isfinite(value) && value >= 0; }

// Empty if the text is valid.
std::string CheckText(absl::string_view field, absl::string_view text, size_t max_bytes) {
  if (text.size() > max_bytes) {
    return absl::StrCat(field, " has ", text.size(), " bytes; at most ", max_bytes, " are allowed");
  }
  if (!IsPrintable(text)) return absl::StrCat(field, " must be printable ASCII");
  return "";
}

std::string CheckTexts(const v1::Register& registration) {
  const std::pair<const char*, const std::string*> texts[] = {
      {"incarnation", &registration.incarnation()},
      {"device", &registration.device()},
      {"version", &registration.version()},
      {"data_address", &registration.data_address()},
      {"metrics_address", &registration.metrics_address()},
      {"client_data_address", &registration.client_data_address()},
      {"probe_address", &registration.probe_address()},
      {"local_socket", &registration.local_socket()},
      {"host_id", &registration.host_id()}};
  for (const auto& [field, text] : texts) {
    std::string why = CheckText(field, *text, kMaxWorkerTextBytes);
    if (!why.empty()) return why;
  }
  for (const std::string& option : registration.options()) {
    std::string why = CheckText("options", option, kMaxWorkerTextBytes);
    if (!why.empty()) return why;
  }
  return "";
}

std::string CheckLocation(const v1::WorkerLocation& location) {
  const std::pair<const char*, const std::string*> texts[] = {
      {"location.host", &location.host()},
      {"location.accelerator_domain", &location.accelerator_domain()},
      {"location.zone", &location.zone()}};
  for (const auto& [field, text] : texts) {
    std::string why = CheckText(field, *text, kMaxWorkerNameBytes);
    if (!why.empty()) return why;
  }
  if (location.interfaces_size() > kMaxInterfaces) {
    return absl::StrCat("location.interfaces has ", location.interfaces_size(),
                        " entries; at most ", kMaxInterfaces, " are allowed");
  }
  for (const v1::NetworkInterface& interface : location.interfaces()) {
    std::string why = CheckText("location.interfaces.name", interface.name(), kMaxWorkerNameBytes);
    if (!why.empty()) return why;
    if (interface.addresses_size() > kMaxInterfaceAddresses) {
      return absl::StrCat("location.interfaces.addresses has ", interface.addresses_size(),
                          " entries; at most ", kMaxInterfaceAddresses, " are allowed");
    }
    for (const std::string& address : interface.addresses()) {
      why = CheckText("location.interfaces.addresses", address, kMaxWorkerNameBytes);
      if (!why.empty()) return why;
    }
  }
  return "";
}

}  // namespace

std::string CheckRegistration(const v1::Register& registration) {
  if (registration.name().empty()) return "a worker needs a name";
  std::string why = CheckText("name", registration.name(), kMaxWorkerNameBytes);
  if (!why.empty()) return why;
  why = CheckTexts(registration);
  if (!why.empty()) return why;
  why = CheckLocation(registration.location());
  if (!why.empty()) return why;
  if (registration.options_size() > kMaxListEntries ||
      registration.kernel_rates_size() > kMaxListEntries) {
    return absl::StrCat("options and kernel_rates may have ", kMaxListEntries, " entries each");
  }
  for (const auto& [field, bytes] :
       {std::pair{"memory_bytes", registration.memory_bytes()},
        std::pair{"max_kv_cache_bytes", registration.max_kv_cache_bytes()}}) {
    if (bytes <= kMaxMemoryBytes) continue;
    return absl::StrCat(field, " is ", bytes, "; at most ", kMaxMemoryBytes, " are allowed");
  }
  for (const v1::KernelRate& rate : registration.kernel_rates()) {
    why = CheckText("kernel_rates.family", rate.family(), kMaxWorkerTextBytes);
    if (!why.empty()) return why;
    if (IsRate(rate.flops_per_second())) continue;
    return absl::StrCat("kernel_rates.flops_per_second is ", rate.flops_per_second(),
                        "; it must be finite and not negative");
  }
  if (!IsRate(ToSeconds(registration.call_overhead()))) return "call_overhead must not be negative";
  return "";
}

v1::Committed Sanitized(v1::Committed committed) {
  if (!IsRate(committed.link_bytes_per_second())) committed.set_link_bytes_per_second(0);
  if (!IsRate(ToSeconds(committed.exchange_overhead()))) committed.clear_exchange_overhead();
  if (!IsRate(committed.host_link_bytes_per_second())) {
    committed.set_host_link_bytes_per_second(0);
  }
  if (!IsRate(committed.host_total_bytes_per_second())) {
    committed.set_host_total_bytes_per_second(0);
  }
  if (!IsRate(ToSeconds(committed.host_exchange_overhead()))) {
    committed.clear_host_exchange_overhead();
  }
  if (!CheckText("next_transport", committed.next_transport(), kMaxWorkerTextBytes).empty()) {
    committed.clear_next_transport();
  }
  return committed;
}

}  // namespace ringattn::server
