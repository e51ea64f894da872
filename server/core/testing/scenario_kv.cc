#include "server/core/testing/scenario_kv.h"

#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/kv/cache_spec.h"
#include "common/wire/durations.h"

namespace ringattn::server {
namespace {

uint64_t NumberAt(const Args& args, size_t index) {
  return index < args.size() ? std::strtoull(args[index].c_str(), nullptr, 10) : 0;
}

// One layer in fp32 with 16 elements per head, so that a block of 16 entries and one head takes
// 2,048 bytes.
KvCacheSpec ScenarioSpec(const Args& args) {
  KvCacheSpec spec;
  KvLayerGroup& group = spec.groups.emplace_back();
  group.layers = {0};
  group.num_kv_heads = std::atoll(Option(args, "heads", "4").c_str());
  group.num_heads = group.num_kv_heads * std::atoll(Option(args, "group", "1").c_str());
  group.head_dim = group.head_dim_v = 16;
  group.softmax_scale = 0.25;
  spec.block_tokens = std::atoll(Option(args, "block_tokens", "16").c_str());
  spec.blocks = std::atoll(Option(args, "blocks", "1").c_str());
  return spec;
}

std::string FailureText(const Failure& failure) {
  return absl::StrCat(absl::StatusCodeToString(failure.code), " ", failure.reason,
                      failure.retry_after ? " retry" : "",
                      failure.field.empty() ? "" : absl::StrCat(" field ", failure.field), ": ",
                      failure.message);
}

std::optional<int64_t> Quota(const Args& args, const char* option) {
  const std::string text = Option(args, option, "");
  return text.empty() ? std::nullopt : std::optional<int64_t>(std::atoll(text.c_str()));
}

}  // namespace

void AddKvCaches(const Args& args, v1::Register* registration) {
  registration->set_max_kv_cache_bytes(
      static_cast<uint64_t>(std::atoll(Option(args, "kv", "0").c_str())));
  for (const std::string& arg : args) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(arg, absl::MaxSplits('=', 1));
    if (pair.first != "holds") continue;
    const std::vector<std::string> parts = absl::StrSplit(pair.second, ':');
    v1::KvHeldCache* held = registration->add_kv_caches();
    held->set_epoch(std::strtoull(parts[2].c_str(), nullptr, 10));
    held->set_committed_step(std::strtoull(parts[3].c_str(), nullptr, 10));
    held->set_complete_step(held->committed_step());
    held->mutable_lease_left()->set_seconds(30);
    v1::KvReserve* reserve = held->mutable_reserve();
    reserve->set_cache_id(parts[0]);
    *reserve->mutable_spec() = ToProto(ScenarioSpec({}));
    reserve->set_rank(static_cast<uint32_t>(std::atoi(parts[1].c_str())));
    reserve->mutable_ttl()->set_seconds(60);
    for (absl::string_view member : absl::StrSplit(parts[4], ',')) {
      reserve->mutable_placement()->add_members(std::string(member));
    }
    const KvPlacement placement =
        PlaceKvCache(ScenarioSpec({}), reserve->placement().members_size());
    reserve->mutable_placement()->set_head_parts(placement.head_parts);
    reserve->mutable_placement()->set_position_parts(placement.position_parts);
  }
}

bool FillKvMessage(const Args& args, v1::JoinRequest* message) {
  const std::string& verb = args[1];
  if (verb == "kv_reserved" || verb == "kv_refused" || verb == "kv_malformed" ||
      verb == "kv_unsupported") {
    v1::KvReserved* reserved = message->mutable_kv_reserved();
    reserved->set_cache_id(args[2]);
    reserved->set_ok(verb == "kv_reserved");
    reserved->set_malformed(verb == "kv_malformed");
    reserved->set_unsupported(verb == "kv_unsupported");
    if (!reserved->ok()) reserved->set_reason(Rest(args, 3));
    reserved->set_bytes(static_cast<uint64_t>(Number(args, "bytes")));
  } else if (verb == "kv_opened" || verb == "kv_missing") {
    v1::KvOpened* opened = message->mutable_kv_opened();
    opened->set_cache_id(args[2]);
    opened->set_epoch(NumberAt(args, 3));
    opened->set_committed_step(NumberAt(args, 4));
    opened->set_complete_step(NumberAt(args, 5));
    opened->set_missing(verb == "kv_missing");
  } else if (verb == "kv_settled" || verb == "kv_unsettled") {
    v1::KvSettled* settled = message->mutable_kv_settled();
    settled->set_cache_id(args[2]);
    settled->set_epoch(NumberAt(args, 3));
    settled->set_ok(verb == "kv_settled");
    settled->set_reason(Rest(args, 4));
  } else if (verb == "kv_touched" || verb == "kv_failed") {
    v1::KvTouched* touched = message->mutable_kv_touched();
    touched->set_cache_id(args[2]);
    if (verb == "kv_failed") {
      touched->set_failure(Rest(args, 3));
    } else {
      touched->set_epoch(NumberAt(args, 3));
      touched->set_step(NumberAt(args, 4));
    }
  } else {
    return false;
  }
  return true;
}

std::string KvCommandText(const v1::JoinResponse& message) {
  switch (message.message_case()) {
    case v1::JoinResponse::kKvReserve:
      return absl::StrCat("kv_reserve ", message.kv_reserve().cache_id(), " on ",
                          absl::StrJoin(message.kv_reserve().placement().members(), " "));
    case v1::JoinResponse::kKvOpen:
      return absl::StrCat("kv_open ", message.kv_open().cache_id(), " epoch ",
                          message.kv_open().epoch());
    case v1::JoinResponse::kKvSettle:
      return absl::StrCat("kv_settle ", message.kv_settle().cache_id(), " epoch ",
                          message.kv_settle().epoch(), " step ", message.kv_settle().step());
    case v1::JoinResponse::kKvFree:
      return absl::StrCat("kv_free ", absl::StrJoin(message.kv_free().cache_ids(), " "), " (",
                          message.kv_free().reason(), ")");
    default:
      return "";
  }
}

uint64_t ScenarioKvClients::Call(const std::string& name) {
  const uint64_t call = calls_.size() + 1;
  calls_[call] = name;
  return call;
}

std::optional<Event> ScenarioKvClients::EventOf(const Args& args) {
  const std::string& verb = args[0];
  const std::string principal = Option(args, "principal", "");
  if (verb == "cache") {
    KvCacheRequested event;
    event.call = Call(args[1]);
    event.principal = principal;
    event.client = Option(args, "client", principal);
    event.terms.max_kv_caches = Quota(args, "max_caches");
    event.terms.max_kv_cache_bytes = Quota(args, "max_bytes");
    event.request_id = Option(args, "id", "");
    event.fingerprint = static_cast<uint64_t>(Number(args, "header"));
    event.id = args[1];
    event.spec = std::make_shared<const KvCacheSpec>(ScenarioSpec(args));
    event.ttl = Duration(Option(args, "ttl", "60s"));
    if (const int world = std::atoi(Option(args, "world", "0").c_str()); world > 0) {
      event.world_size = world;
    }
    event.divide_blocks = Option(args, "divide", "") == "1";
    const std::string members = Option(args, "members", "");
    if (!members.empty()) event.members = absl::StrSplit(members, ',');
    return event;
  }
  if (verb == "open") {
    KvWriterRequested event;
    event.call = Call(args[2]);
    event.principal = principal;
    event.id = args[1];
    event.token_seed = absl::StrCat("seed of ", args[2]);
    event.accepts_direct = Option(args, "direct", "") == "1";
    event.accepts_relay = Option(args, "required", "") != "1";
    event.answered_step = static_cast<uint64_t>(Number(args, "answered"));
    return event;
  }
  if (verb == "hold_cache") return KvCachesRenewed{{args[1]}, principal, Duration(args[2])};
  if (verb == "delete_cache") return KvCacheDeleted{args[1], principal};
  if (verb == "ranks_differ") {
    return KvCacheFailed{args[1], NumberAt(args, 2), KvCacheEnd::kRanksDiffer};
  }
  return std::nullopt;
}

ScenarioLines ScenarioKvClients::LinesOf(const KvCacheAnswered& answer) const {
  const std::string& name = calls_.at(answer.call);
  if (answer.failure) return {{name, absl::StrCat("not created ", FailureText(*answer.failure))}};
  const v1::CreateCacheResponse& response = answer.response;
  return {
      {name,
       absl::StrCat("created ", response.cache_id(), " on ",
                    absl::StrJoin(response.placement().members(), " "), " as ",
                    response.placement().head_parts(), " x ", response.placement().position_parts(),
                    ", ", response.bytes_per_worker(), " bytes each in blocks of ",
                    response.placement().block_tokens(), ": ", response.placement().reason())}};
}

ScenarioLines ScenarioKvClients::LinesOf(const KvWriterAnswered& answer) {
  const std::string& name = calls_.at(answer.call);
  if (answer.failure) return {{name, absl::StrCat("not opened ", FailureText(*answer.failure))}};
  const v1::OpenCacheResponse& response = answer.response;
  std::string text = absl::StrCat("opened epoch ", response.epoch(), ", next step ",
                                  response.next_step(), " (", response.transport_reason(), ")");
  std::vector<std::string> tokens = {response.token()};
  for (const v1::KvShardTicket& ticket : response.shards()) {
    absl::StrAppend(&text, " ", ticket.endpoints(0));
    tokens.push_back(ticket.token());
  }
  for (const std::string& token : tokens) {
    if (!token.empty() && !tokens_.emplace(token, name).second) text += " REPEATED TOKEN";
  }
  return {{name, text}};
}

ScenarioLines ScenarioKvClients::LinesOf(const KvWriterEnded& ended) const {
  return {{ended.id,
           absl::StrCat("writers up to epoch ", ended.epoch, " end: ", ended.failure.reason)}};
}

ScenarioLines ScenarioKvClients::Show(const Coordinator& core, const Args& args) {
  ScenarioLines lines;
  const std::string principal = Option(args, "principal", "");
  for (const v1::KvCacheInfo& info :
       core.ListKvCaches(principal, Option(args, "client", principal), "", 1000)) {
    lines.push_back({info.cache_id(),
                     absl::StrCat("epoch ", info.epoch(), info.open() ? " open" : "", ", ",
                                  absl::FormatDuration(ToDuration(info.expires_in())), " left")});
  }
  const KvCacheCounts counts = core.stats().kv_caches;
  std::string text =
      absl::StrCat(counts.caches, " of ", counts.bytes, " bytes, open ", counts.open, " created ",
                   counts.created, " refused ", counts.refused, " adopted ", counts.adopted);
  for (const KvCacheEnd end : kKvCacheEnds) {
    const int64_t ended = counts.ended[static_cast<size_t>(end)];
    if (ended > 0) absl::StrAppend(&text, " ", KvCacheEndName(end), " ", ended);
  }
  lines.push_back({"", text});
  return lines;
}

}  // namespace ringattn::server
