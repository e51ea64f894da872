#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/api/client.h"
#include "client/api/kv_cache.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/proto_json.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "common/wire/durations.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

constexpr absl::Duration kCacheDeadline = absl::Seconds(30);

struct CacheFlags {
  ServerFlags server;
  uint32_t layers = 1;
  uint32_t heads = 1;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 64;
  uint32_t head_dim_v = 0;
  std::string dtype = "bf16";
  uint64_t tokens = 0;
  uint32_t block_tokens = 64;
  std::optional<uint64_t> window;
  std::optional<double> softcap;
  std::optional<double> softmax_scale;
  bool non_causal = false;
  std::string numbering = "sequences";
  std::string label;
  std::string ttl;
  std::optional<uint32_t> world_size;
  std::vector<std::string> members;
  std::string divide_blocks;  // empty: the default
  std::vector<std::string> ids;
  bool json = false;
};

std::string HexId(const std::string& id) { return absl::BytesToHexString(id); }

absl::StatusOr<std::string> ParseCacheId(const std::string& text) {
  const bool is_hex = !text.empty() && text.size() % 2 == 0 &&
                      text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (!is_hex) {
    return UsageError(absl::StrCat("cache id \"", text,
                                   "\" is not hexadecimal; use an id that "
                                   "`ringattn cache create` or `list` has printed"));
  }
  return absl::HexStringToBytes(text);
}

v1::KvCacheSpec CacheSpecOf(const CacheFlags& flags) {
  v1::KvCacheSpec spec;
  v1::KvLayerGroup* group = spec.add_groups();
  for (uint32_t layer = 0; layer < flags.layers; ++layer) group->add_layers(layer);
  group->set_num_heads(flags.heads);
  group->set_num_kv_heads(flags.kv_heads == 0 ? flags.heads : flags.kv_heads);
  group->set_head_dim(flags.head_dim);
  group->set_head_dim_v(flags.head_dim_v);
  if (flags.window.has_value()) group->set_window_left(*flags.window);
  if (flags.softcap.has_value()) group->set_softcap(*flags.softcap);
  if (flags.softmax_scale.has_value()) group->set_softmax_scale(*flags.softmax_scale);
  group->set_non_causal(flags.non_causal);
  spec.set_dtype(flags.dtype == "fp32"   ? v1::DATA_TYPE_FLOAT32
                 : flags.dtype == "fp16" ? v1::DATA_TYPE_FLOAT16
                                         : v1::DATA_TYPE_BFLOAT16);
  spec.set_block_tokens(flags.block_tokens);
  const uint64_t block = flags.block_tokens == 0 ? 64 : flags.block_tokens;
  spec.set_blocks(flags.tokens / block + (flags.tokens % block != 0 ? 1 : 0));
  spec.set_numbering(flags.numbering == "blocks" ? v1::KV_NUMBERING_BLOCKS
                                                 : v1::KV_NUMBERING_SEQUENCES);
  spec.set_label(flags.label);
  return spec;
}

int RunCacheCreate(const CacheFlags& flags) {
  KvCreateOptions options;
  options.deadline = kCacheDeadline;
  options.world_size = flags.world_size;
  options.members = flags.members;
  if (!flags.divide_blocks.empty()) options.divide_blocks = flags.divide_blocks == "true";
  if (!flags.ttl.empty() &&
      (!absl::ParseDuration(flags.ttl, &options.ttl) || options.ttl <= absl::ZeroDuration())) {
    return Fail(UsageError(absl::StrCat("--ttl=", flags.ttl,
                                        ": expected a positive duration like 60s or 10m")),
                flags.json);
  }
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  const auto created = KvCache::Reserve(client->get(), CacheSpecOf(flags), options);
  if (!created.ok()) return Fail(created.status(), flags.json);
  if (flags.json) {
    Json object = {{"command", "cache create"},
                   {"cache_id", HexId(created->cache_id())},
                   {"placement", ProtoJson(created->placement())},
                   {"bytes_per_worker", created->bytes_per_worker()}};
    Print(object);
    return kSuccess;
  }
  std::printf("%s\n%s on each of %d workers (%u head parts, %u position parts: %s)\n",
              HexId(created->cache_id()).c_str(),
              HumanBytes(static_cast<double>(created->bytes_per_worker())).c_str(),
              created->placement().members_size(), created->placement().head_parts(),
              created->placement().position_parts(), created->placement().reason().c_str());
  return kSuccess;
}

std::string StateOf(const v1::KvCacheInfo& cache) {
  if (cache.has_ended()) return absl::StrCat("ended: ", cache.ended().message());
  return absl::StrCat(
      cache.open() ? "open" : "idle", ", expires in ",
      absl::FormatDuration(absl::Trunc(ToDuration(cache.expires_in()), absl::Seconds(1))));
}

int RunCacheList(const CacheFlags& flags) {
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  const auto caches = KvCache::List(client->get(), kCacheDeadline);
  if (!caches.ok()) return Fail(caches.status(), flags.json);
  if (flags.json) {
    Json object = {{"command", "cache list"}, {"caches", Json::array()}};
    for (const v1::KvCacheInfo& cache : *caches) {
      Json entry = ProtoJson(cache);
      entry["cache_id"] = HexId(cache.cache_id());
      object["caches"].push_back(entry);
    }
    Print(object);
    return kSuccess;
  }
  std::printf("%-32s  %7s  %10s  %17s  %9s  %-20s  %s\n", "id", "workers", "per worker",
              "blocks used", "sequences", "label", "state");
  for (const v1::KvCacheInfo& cache : *caches) {
    std::printf("%-32s  %7d  %10s  %8llu/%8llu  %9llu  %-20s  %s\n",
                HexId(cache.cache_id()).c_str(), cache.placement().members_size(),
                HumanBytes(static_cast<double>(cache.bytes_per_worker())).c_str(),
                static_cast<unsigned long long>(cache.blocks_used()),
                static_cast<unsigned long long>(cache.spec().blocks()),
                static_cast<unsigned long long>(cache.sequences()), cache.spec().label().c_str(),
                StateOf(cache).c_str());
  }
  return kSuccess;
}

int RunCacheDelete(const CacheFlags& flags) {
  std::vector<std::string> ids;
  for (const std::string& text : flags.ids) {
    auto id = ParseCacheId(text);
    if (!id.ok()) return Fail(id.status(), flags.json);
    ids.push_back(*std::move(id));
  }
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  for (const std::string& id : ids) {
    if (auto status = KvCache::Delete(client->get(), id, kCacheDeadline); !status.ok()) {
      return Fail(status, flags.json);
    }
  }
  if (flags.json) Print({{"command", "cache delete"}, {"deleted", ids.size()}});
  return kSuccess;
}

void AddCacheShape(FlagSet& command, CacheFlags* flags) {
  command.Add("--layers", &flags->layers, "Layers, numbered from 0").Positive().ShowDefault();
  command.Add("--heads", &flags->heads, "Query heads").Positive().ShowDefault();
  command.Add("--kv_heads", &flags->kv_heads, "Key and value heads; default: --heads");
  command.Add("--head_dim", &flags->head_dim, "Elements of a head").Positive().ShowDefault();
  command.Add("--head_dim_v", &flags->head_dim_v, "Of a value's head; default: --head_dim");
  command.Add("--dtype", &flags->dtype, "Type of all tensors")
      .OneOf({"fp32", "bf16", "fp16"})
      .ShowDefault();
  command.Add("--tokens", &flags->tokens, "Entries of all sequences together")
      .Required()
      .Positive();
  command.Add("--block_tokens", &flags->block_tokens, "Entries of a block: 16, 32, ... 256")
      .ShowDefault();
  command.Add("--window", &flags->window, "Entries that a query sees before its own; default: all");
  command.Add("--softcap", &flags->softcap, "Limit of scores: softcap * tanh(score / softcap)");
  command.Add("--softmax_scale", &flags->softmax_scale,
              "Factor of scores; default: 1/sqrt(head_dim)");
  command.Add("--non_causal", &flags->non_causal, "Every query sees every entry");
  command.Add("--numbering", &flags->numbering, "Who allocates blocks: the service, or the client")
      .OneOf({"sequences", "blocks"})
      .ShowDefault();
}

}  // namespace

void AddCache(FlagSet& program, Run& run) {
  FlagSet& cache =
      program.AddCommand("cache", "K/V caches that stay with the workers (docs/inference.md)");
  cache.RequireCommand();

  auto create = std::make_shared<CacheFlags>();
  FlagSet& created = cache.AddCommand(
      "create", "Reserve a cache and print its id; it ends after --ttl without a step or a hold");
  create->server.AddTo(created);
  AddCacheShape(created, create.get());
  created.Add("--label", &create->label, "Text for people");
  created.Add("--ttl", &create->ttl, "Lease; default: the server's, 60s");
  created.Add("--world_size", &create->world_size, "Workers; default: the coordinator chooses");
  created.Add("--members", &create->members, "Workers by name, separated by commas").Delimiter(',');
  created
      .Add("--divide_blocks", &create->divide_blocks,
           "Position parts divide the blocks; default: true, unless --world_size or --members are "
           "given. False without them: no position parts")
      .OneOf({"true", "false"});
  created.Add("--json", &create->json, "Print one JSON object (docs/cli-json.md)");
  created.OnChosen([create, &run] { run = [create] { return RunCacheCreate(*create); }; });

  auto list = std::make_shared<CacheFlags>();
  FlagSet& listed = cache.AddCommand(
      "list",
      "This client's caches. Needs a token or a certificate: the service lists the caches of a "
      "client without authentication only on the connection that created them");
  list->server.AddTo(listed);
  listed.Add("--json", &list->json, "Print one JSON object (docs/cli-json.md)");
  listed.OnChosen([list, &run] { run = [list] { return RunCacheList(*list); }; });

  auto gone = std::make_shared<CacheFlags>();
  FlagSet& deleted = cache.AddCommand("delete", "Free caches");
  gone->server.AddTo(deleted);
  deleted.Add("ids", &gone->ids, "Ids, as `ringattn cache create` and `list` print them")
      .Required();
  deleted.Add("--json", &gone->json, "Print one JSON object (docs/cli-json.md)");
  deleted.OnChosen([gone, &run] { run = [gone] { return RunCacheDelete(*gone); }; });
}

}  // namespace ringattn::client::cli
