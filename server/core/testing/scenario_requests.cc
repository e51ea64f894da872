#include "server/core/testing/scenario_requests.h"

#include <cstdlib>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ringattn::server {
namespace {

AttentionSpec SpecOf(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.seq_len_q = tokens;
  spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = {0, tokens};
  spec.shape.cu_seqlens_k = {0, tokens};
  return spec;
}

// Copies the Forward's values, as the edge does.
void FillFromResidual(const Args& args, const Coordinator& core, RequestArrived* request) {
  request->direction = Direction::kBackward;
  request->keep_residual = args.back() == "keep";
  const ResidualView view =
      core.FindResidual(request->residual, request->principal, request->request_id);
  if (view.failure) return;
  request->spec = *view.spec;
  request->choice = view.choice;
}

}  // namespace

std::string RegionId(const std::string& name) { return name + std::string(16 - name.size(), '.'); }

RequestArrived RequestOf(const Args& args, StreamId stream, absl::Time now,
                         const Coordinator& core) {
  RequestArrived request;
  request.stream = stream;
  request.request_id = Option(args, "id", args[1]);
  request.principal = Option(args, "principal", "");
  request.client = Option(args, "client", request.principal);
  request.terms.weight = std::atof(Option(args, "weight", "1").c_str());
  const auto own = [&](const char* option) -> std::optional<int64_t> {
    const std::string text = Option(args, option, "");
    return text.empty() ? std::nullopt : std::optional<int64_t>(std::atoll(text.c_str()));
  };
  request.terms.max_requests_in_flight = own("in_flight");
  request.terms.max_queued_bytes = own("queued_bytes");
  request.fingerprint = std::atoll(Option(args, "header", "0").c_str());
  request.spec = SpecOf(std::atoll(Option(args, "tokens", "8").c_str()));
  if (Option(args, "option", "") == "segment_ids") request.spec.options.segment_ids = true;
  if (const int64_t length = std::atoll(Option(args, "segment_length", "0").c_str()); length > 0) {
    request.spec.options.dilation_levels = {{length, 1, std::nullopt, 0, 1}};
  }
  request.choice.tuning.tile_q = std::atoi(Option(args, "tile_q", "0").c_str());
  const std::string members = Option(args, "members", "");
  if (!members.empty()) request.choice.members = absl::StrSplit(members, ',');
  if (Option(args, "dtype", "") == "bf16") request.spec.dtype = DType::kBFloat16;
  const int world = std::atoi(Option(args, "world", "0").c_str());
  if (world > 0) request.choice.world_size = world;
  const std::string region = Option(args, "region", "");
  if (const std::string spans = Option(args, "direct", ""); !spans.empty()) {
    request.transport.accept = {TransportKind::kDirectStream};
    request.transport.required = Option(args, "required", "") == "1";
    request.token_seed = absl::StrCat("seed of ", args[1]);
  } else if (!region.empty()) {
    request.transport.accept = {TransportKind::kHostMemory};
    request.transport.places = {{TensorId::kQ, RegionId(region), 0, 8}};
    request.transport.required = Option(args, "required", "") == "1";
  }
  const std::string deadline = Option(args, "deadline", "");
  if (!deadline.empty()) request.deadline = now + Duration(deadline);
  const std::string ttl = Option(args, "retain", "");
  if (!ttl.empty()) {
    request.retain = RequestArrived::Retain{absl::StrCat("h-", args[1]), Duration(ttl)};
  }
  if (const std::string prepare = Option(args, "prepare", ""); !prepare.empty()) {
    request.prepare_ttl = Duration(prepare);
  }
  request.recipe_fingerprint = std::atoll(Option(args, "recipe", "0").c_str());
  if (const std::string data = Option(args, "inline", ""); !data.empty()) {
    request.inline_inputs =
        std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kQ, data}});
  }
  request.terms.max_residual_bytes = own("residual_bytes");
  request.residual = Option(args, "residual", "");
  if (!request.residual.empty()) FillFromResidual(args, core, &request);
  return request;
}

}  // namespace ringattn::server
