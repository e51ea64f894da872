#include "client/cli/region_stage.h"

namespace ringattn::client::cli {
namespace {

CallResult Call(Client& client, const ForwardArgs& args, const ForwardResults& results,
                const CallOptions& options) {
  return client.Forward(args, results, options);
}

CallResult Call(Client& client, const BackwardArgs& args, const BackwardResults& results,
                const CallOptions& options) {
  return client.Backward(args, results, options);
}

template <typename Args, typename Results>
CallResult Stage(Client& client, const Args& args, const Results& results,
                 const CallOptions& options) {
  if (options.transport != TransportWish::kHost) return Call(client, args, results, options);
  auto stage = RegionStage<Args, Results>::Make(&client, args, results);
  if (!stage.ok()) return stage.status();
  CallResult report = Call(client, stage->args(), stage->results(), options);
  if (report.ok()) stage->CopyBack();
  return report;
}

}  // namespace

void AddTransportFlag(CLI::App* command, std::string* transport) {
  command
      ->add_option("--transport", *transport,
                   "How tensors travel. host: workers of this machine copy them out of and into "
                   "memory that they are shown (--local_memory of ringattn-worker), or the call "
                   "fails; direct: straight to the workers (their --client_data_listen), or the "
                   "call fails; relay: through the coordinator; auto: the best that serves the "
                   "tensors where they lie: of files, direct, else relay")
      ->check(CLI::IsMember({"auto", "relay", "direct", "host"}))
      ->capture_default_str();
}

void AddChannelsFlag(CLI::App* command, int* channels) {
  command
      ->add_option("--channels_per_worker", *channels,
                   "Connections to each worker that tensors go straight to")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
}

void SetTransport(const std::string& transport, CallOptions* options) {
  if (transport == "auto") return;
  options->transport = transport == "host"     ? TransportWish::kHost
                       : transport == "direct" ? TransportWish::kDirect
                                               : TransportWish::kRelay;
  options->transport_required = transport != "relay";
}

CallResult CallStaged(Client& client, const ForwardArgs& args, const ForwardResults& results,
                      const CallOptions& options) {
  return Stage(client, args, results, options);
}

CallResult CallStaged(Client& client, const BackwardArgs& args, const BackwardResults& results,
                      const CallOptions& options) {
  return Stage(client, args, results, options);
}

}  // namespace ringattn::client::cli
