#include "server/core/testing/scenario_args.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"
#include "server/core/testing/scenario_kv.h"

namespace ringattn::server {
namespace {

template <typename Message>
void Name(Message* message, const std::string& operation_id) {
  message->set_operation_id(operation_id);
  message->set_generation(std::atoll(operation_id.c_str()));  // "generation-number"
}

void AddRates(const std::string& option, const Args& args, const std::vector<DType>& dtypes,
              v1::Register* registration) {
  const double flops = Number(args, option);
  if (flops <= 0) return;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    *registration->add_kernel_rates() = ToProto(
        KernelRate{option, dtypes, direction, flops, {.score_terms = option == "flops_terms"}});
  }
}

// Fills in a message about a generation; returns false for another verb.
bool FillGenerationMessage(const std::string& name, const Args& args,
                           const std::string& operation_id, v1::JoinRequest* message) {
  const std::string& verb = args[1];
  const uint64_t generation = args.size() > 2 ? std::atoll(args[2].c_str()) : 0;
  if (verb == "prepared") {
    message->mutable_prepared()->set_generation(generation);
    message->mutable_prepared()->set_blob(name);
  } else if (verb == "committed") {
    v1::Committed* committed = message->mutable_committed();
    committed->set_generation(generation);
    committed->set_link_bytes_per_second(Number(args, "link"));
    SetSeconds(Number(args, "exchange"), committed->mutable_exchange_overhead());
    committed->set_host_link_bytes_per_second(Number(args, "host_link"));
    SetSeconds(Number(args, "host_exchange"), committed->mutable_host_exchange_overhead());
    committed->set_host_total_bytes_per_second(Number(args, "host_total"));
  } else if (verb == "leaving") {
    message->mutable_leaving();
  } else if (verb == "torn_down") {
    message->mutable_torn_down()->set_generation(generation);
  } else if (verb == "generation_failed") {
    v1::GenerationFailed* failed = message->mutable_generation_failed();
    failed->set_generation(generation);
    failed->set_operation_id(operation_id);
    const std::string unreached = Option(args, "unreached", "");
    for (absl::string_view rank : absl::StrSplit(unreached, ',', absl::SkipEmpty())) {
      failed->add_unreached(std::atoi(std::string(rank).c_str()));
    }
    failed->set_reason(Rest(args, unreached.empty() ? 3 : 4));
  } else if (verb == "probed") {
    message->mutable_probed()->set_id(generation);
  } else {
    return false;
  }
  return true;
}

bool FillTransferMessage(const Args& args, v1::JoinRequest* message) {
  const std::string& verb = args[1];
  if (verb != "transferred" && verb != "region_released" && verb != "transfer_failed" &&
      verb != "bad_chunk") {
    return false;
  }
  v1::TransferProgress* progress = message->mutable_transfer_progress();
  Name(progress, args[2]);
  if (verb == "transferred") {
    progress->set_received(std::atoll(args[3].c_str()));
    progress->set_sent(std::atoll(args[4].c_str()));
    progress->set_waits_for_client(args.back() == "waits");
  }
  progress->set_region_released(verb == "region_released");
  if (verb == "transfer_failed") progress->set_failure(Rest(args, 3));
  if (verb == "bad_chunk") progress->set_bad_chunk(Rest(args, 3));
  return true;
}

bool FillOperationMessage(const Args& args, v1::JoinRequest* message) {
  const std::string& verb = args[1];
  if (verb == "reserved" || verb == "rejected" || verb == "residual_missing" ||
      verb == "malformed" || verb == "not_kept") {
    v1::Reserved* reserved = message->mutable_reserved();
    Name(reserved, args[2]);
    reserved->set_ok(verb == "reserved");
    reserved->set_residual_missing(verb == "residual_missing");
    reserved->set_malformed(verb == "malformed");
    reserved->set_not_kept(verb == "not_kept");
    reserved->set_found(args.back() == "found");
    reserved->set_residual_bytes(static_cast<uint64_t>(Number(args, "residual")));
    reserved->set_reason(Rest(args, 3));
    reserved->set_workspace_bytes(static_cast<uint64_t>(Number(args, "workspace")));
  } else if (verb == "uploaded") {
    Name(message->mutable_uploaded(), args[2]);
  } else if (verb == "released") {
    Name(message->mutable_released(), args[2]);
  } else if (verb == "finished" || verb == "cancelled" || verb == "failed") {
    v1::Finished* finished = message->mutable_finished();
    Name(finished, args[2]);
    finished->set_ok(verb == "finished");
    finished->set_cancelled(verb == "cancelled");
    if (const std::string data = Option(args, "output", ""); !data.empty()) {
      finished->add_outputs()->set_data(data);
      finished->mutable_reserved()->set_workspace_bytes(
          static_cast<uint64_t>(Number(args, "workspace")));
    } else {
      finished->set_reason(Rest(args, 3));
    }
  } else if (verb == "delivered") {
    Name(message->mutable_delivered(), args[2]);
  } else {
    return FillTransferMessage(args, message) || FillKvMessage(args, message);
  }
  return true;
}

}  // namespace

std::string Rest(const Args& args, size_t begin) {
  return absl::StrJoin(args.begin() + std::min(begin, args.size()), args.end(), " ");
}

std::string Option(const Args& args, const std::string& key, const std::string& otherwise) {
  for (const std::string& arg : args) {
    absl::string_view value = arg;
    if (absl::ConsumePrefix(&value, absl::StrCat(key, "="))) return std::string(value);
  }
  return otherwise;
}

double Number(const Args& args, const std::string& key) {
  return std::atof(Option(args, key, "0").c_str());
}

absl::Duration Duration(const std::string& text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) std::abort();
  return duration;
}

v1::Register RegistrationOf(const Args& args) {
  v1::Register registration;
  registration.set_name(args[1]);
  registration.set_preempts(Option(args, "preempts", "true") == "true");
  registration.set_runs_inline(Option(args, "runs_inline", "true") == "true");
  registration.set_version(Option(args, "version", "1"));
  registration.set_memory_bytes(std::atoll(Option(args, "memory", "0").c_str()));
  AddRates("flops_terms", args, {DType::kFloat32}, &registration);
  AddRates("flops_bf16", args, {DType::kBFloat16},
           &registration);  // the first that applies is used
  AddRates("flops", args, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, &registration);
  registration.set_device(Option(args, "device", ""));
  v1::WorkerLocation* location = registration.mutable_location();
  location->set_host(Option(args, "host", ""));
  location->set_zone(Option(args, "zone", ""));
  location->set_accelerator_domain(Option(args, "domain", ""));
  if (const std::string slot = Option(args, "slot", ""); !slot.empty()) {
    location->set_slot(std::atoll(slot.c_str()));
  }
  AddKvCaches(args, &registration);
  const std::string served = Option(args, "options", "");
  if (!served.empty()) registration.add_options(served);
  if (const int tile = std::atoi(Option(args, "tile_q", "0").c_str()); tile > 0) {
    registration.mutable_tuning()->add_tile_q(tile);
  }
  SetSeconds(Number(args, "call"), registration.mutable_call_overhead());
  registration.set_local_socket(absl::StrCat("/", args[1]));
  registration.set_data_address(absl::StrCat(args[1], ":1"));
  if (Option(args, "probe", "true") == "true") {
    registration.set_probe_address(absl::StrCat(args[1], ":3"));
  }
  if (!absl::StartsWith(args[1], "hidden")) {
    registration.set_client_data_address(absl::StrCat(args[1], ":2"));
  }
  return registration;
}

std::optional<v1::JoinRequest> MessageOf(const std::string& name, const Args& args,
                                         const std::string& operation_id) {
  v1::JoinRequest message;
  const bool is_known = FillGenerationMessage(name, args, operation_id, &message) ||
                        FillOperationMessage(args, &message);
  return is_known ? std::optional(std::move(message)) : std::nullopt;
}

void SetPosition(const Args& args, v1::Heartbeat* heartbeat) {
  Name(heartbeat, args[2]);
  heartbeat->set_step(std::atoi(args[3].c_str()));
  heartbeat->set_progress(std::atoll(args[4].c_str()));
  heartbeat->set_waits_for_peer(args.back() == "waits");
}

}  // namespace ringattn::server
