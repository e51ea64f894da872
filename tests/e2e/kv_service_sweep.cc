// The programs of the K/V sweep once more, through the public API and a running service, with the
// oracle as the judge.
//
//   kv_service_sweep --server=127.0.0.1:7700 --cases=100 --world_size=2
//
// Prints a line per failure and a summary. Exits 1 unless every program that was run passed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/api/error.h"
#include "client/api/kv_cache.h"
#include "common/kv/shard_cut.h"
#include "tests/sweep/kv_program.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int64_t, cases, 100, "number of programs");
ABSL_FLAG(int64_t, case, -1, "run this program alone");
ABSL_FLAG(uint64_t, seed, 1, "seed of the programs");
ABSL_FLAG(int, world_size, 1, "workers of each cache, which divide heads and positions");
ABSL_FLAG(std::string, transport, "auto", "auto, relay, direct or host_memory");
ABSL_FLAG(absl::Duration, budget, absl::InfiniteDuration(), "begin no program after this long");

namespace ringattn::tests {

using namespace ringattn::client;  // what is under test
namespace {

ConstBytes Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}
MutableBytes Bytes(std::string* text) {
  return {reinterpret_cast<uint8_t*>(text->data()), text->size()};
}

// The service is the program's only rank: the client library cuts and joins calls.
class ServiceProgram : public KvProgram {
 public:
  ServiceProgram(Client* client, uint64_t seed, int64_t index)
      : KvProgram(seed, index, Mode::kPlain, nullptr), client_(client) {
    world_size_ = absl::GetFlag(FLAGS_world_size);
  }
  ~ServiceProgram() override {
    if (cache_ != nullptr) (void)cache_->Delete();
  }

  int64_t refused() const { return refused_; }

 protected:
  void MakeRanks() override {
    per_entry_ = EntriesPerTableEntry(spec_, PlaceKvCache(spec_, world_size_));
    placement_ = {1, 1};
    const std::string& transport = absl::GetFlag(FLAGS_transport);
    KvOpenOptions open;
    open.transport = transport == "direct"        ? TransportPreference::kDirect
                     : transport == "relay"       ? TransportPreference::kRelay
                     : transport == "host_memory" ? TransportPreference::kHostMemory
                                                  : TransportPreference::kAuto;
    KvCreateOptions create;
    create.world_size = absl::GetFlag(FLAGS_world_size);
    auto cache = KvCache::Create(client_, ToProto(spec_), create, open);
    if (Check(cache.status(), "create")) cache_ = *std::move(cache);
  }

  // The description travels with the first call, which reports a refusal.
  bool SendBegin(int rank, const KvStep& step, v1::StepResponse* response) override {
    response->mutable_accepted();
    return Check(cache_->BeginStep(ToProto(step)), "begin");
  }

  bool SendCall(int rank, const KvStep& step, const v1::LayerCall& call,
                v1::LayerResult* result) override {
    const KvLayerLocation location = *FindLayer(spec_, call.layer());
    const KvCallBytes bytes = CallBytes(spec_, step, location.group, call.output());
    result->mutable_out()->resize(bytes.out);
    result->mutable_lse()->resize(bytes.lse);
    KvLayerArgs args;
    args.layer = call.layer();
    args.output = call.output() == v1::KV_OUTPUT_UNSPECIFIED ? v1::KV_OUTPUT_OUT : call.output();
    args.q = Bytes(call.q());
    args.k = Bytes(call.k());
    args.v = Bytes(call.v());
    const auto report = cache_->CallLayer(
        args, {.out = Bytes(result->mutable_out()), .lse = Bytes(result->mutable_lse())},
        {.deadline = absl::Seconds(60)});
    if (report.ok()) return true;
    if (DetailsOf(report.status()).reason != kStepRefused) return Check(report.status(), "call");
    ++refused_;
    v1::StepResponse response;
    *response.mutable_refused() = cache_->refusal();
    if (CheckRefusals({response})) DropOne();
    return false;  // the step ends here, and has changed nothing
  }

 private:
  // Makes room for later steps.
  void DropOne() {
    if (model_.empty()) return;
    const auto victim = std::next(model_.begin(), Pick(static_cast<int64_t>(model_.size())));
    if (spec_.numbering == KvNumbering::kSequences || victim->second.tables_sent) {
      v1::KvCommand command;
      command.mutable_drop()->add_sequences(victim->first);
      if (!Check(cache_->RunCommands({command}), "drop")) return;
    }
    model_.erase(victim);
  }

  Client* const client_;
  std::unique_ptr<KvCache> cache_;
  int64_t refused_ = 0;
};

int Run() {
  auto client = Client::Connect(absl::GetFlag(FLAGS_server));
  if (!client.ok()) {
    std::fprintf(stderr, "%s\n", client.status().ToString().c_str());
    return 2;
  }
  const int64_t only = absl::GetFlag(FLAGS_case);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const absl::Time end = absl::Now() + absl::GetFlag(FLAGS_budget);
  int64_t programs = 0, results = 0, refused = 0, failed = 0;
  for (int64_t index = 0; index < std::max<int64_t>(only + 1, absl::GetFlag(FLAGS_cases));
       ++index) {
    if (only >= 0 && index != only) continue;
    if (absl::Now() >= end) break;
    ++programs;
    ServiceProgram program(client->get(), seed, index);
    const std::string failure = program.Run();
    results += program.results();
    refused += program.refused();
    if (failure.empty()) continue;
    ++failed;
    std::printf("FAILED --seed=%llu --case=%lld: %s\n", static_cast<unsigned long long>(seed),
                static_cast<long long>(index), failure.c_str());
  }
  std::printf(
      "kv service sweep: %lld programs, %lld results compared, %lld steps refused, %lld failed\n",
      static_cast<long long>(programs), static_cast<long long>(results),
      static_cast<long long>(refused), static_cast<long long>(failed));
  return failed == 0 && results > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}
