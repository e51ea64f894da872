#include "client/split_plan.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/call_split.h"
#include "client/merged_progress.h"
#include "client/part_args.h"
#include "client/transfer/tensor_bytes.h"

namespace ringattn::client {
namespace {

// Both ways, without what travels in the header.
double BytesOf(const CallPlan& plan) {
  size_t bytes = 0;
  for (const InputTensor& input : plan.inputs) bytes += input.bytes.size();
  for (const OutputTensor& output : plan.outputs) bytes += output.bytes.size();
  return static_cast<double>(bytes);
}

// Has all requests report to one `report`.
void MergeProgress(const std::function<void(const v1::Progress&)>& report,
                   std::vector<PlannedRequest>* requests) {
  if (!report) return;
  std::vector<double> bytes;
  for (const PlannedRequest& request : *requests) bytes.push_back(BytesOf(request.plan));
  const auto merged = std::make_shared<MergedProgress>(std::move(bytes), report);
  for (size_t i = 0; i < requests->size(); ++i) {
    (*requests)[i].plan.on_progress = [merged, i](const v1::Progress& progress) {
      merged->Update(i, progress);
    };
  }
}

// `plan_part(part, request)` fills in plan and, if need be, collect.
template <typename PlanPart>
absl::StatusOr<std::vector<PlannedRequest>> PlanParts(const std::vector<CallPart>& parts,
                                                      const CallOptions& options,
                                                      const PlanPart& plan_part) {
  std::vector<PlannedRequest> requests(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    requests[i].request_id =
        parts.size() == 1 ? options.request_id : absl::StrCat(options.request_id, "/", i);
    absl::Status status = plan_part(parts[i], &requests[i]);
    if (!status.ok()) return status;
  }
  if (requests.size() > 1) MergeProgress(options.on_progress, &requests);
  return requests;
}

absl::Status RefuseStreams(const std::string& reason) {
  return MakeError(absl::StatusCode::kInvalidArgument, absl::StrCat("streams: ", reason),
                   {{"streams", reason}});
}

// Tensors without a name in the arguments are not cut.
template <typename Args, typename Results>
absl::Status CheckCut(const std::vector<CallPart>& parts, const Args& args,
                      const Results& results) {
  if (parts.size() > 1 && args.lse_format != v1::LSE_FORMAT_UNSPECIFIED) {
    return RefuseStreams("lse_format cannot be split, only 1 is possible");
  }
  if (parts.size() == 1 || (args.more.empty() && results.more.empty())) return absl::OkStatus();
  const v1::TensorId tensor =
      args.more.empty() ? results.more.begin()->first : args.more.begin()->first;
  return RefuseStreams(absl::StrCat(TensorIdName(tensor), " cannot be split, only 1 is possible"));
}

bool HasTensors(const BackwardArgs& args) {
  return !args.q.empty() || !args.k.empty() || !args.v.empty() || args.has_forward_result ||
         args.more.count(v1::TENSOR_ID_QKV) > 0 || args.more.count(v1::TENSOR_ID_KV) > 0;
}

// One request, and with the tensors the one that takes its place should the residual be gone.
absl::StatusOr<std::vector<PlannedRequest>> PlanWithResidual(const BackwardArgs& args,
                                                             const BackwardResults& results,
                                                             const CallOptions& options,
                                                             const ChunkLimits& limits,
                                                             const RegionIndex& regions) {
  if (options.streams > 1) {
    return RefuseStreams("a residual is of one request, only 1 is possible");
  }
  absl::StatusOr<CallPlan> plan =
      PlanResidualBackward(args, results, options, options.request_id, limits, &regions);
  if (!plan.ok()) return plan.status();
  std::vector<PlannedRequest> requests(1);
  if (HasTensors(args)) {
    BackwardArgs tensors = args;
    tensors.residual_handle.clear();
    tensors.keep_residual = false;
    auto full = PlanBackwardRequests(tensors, results, options, limits, regions);
    if (!full.ok()) return full.status();
    requests = *std::move(full);
    requests[0].fallback = std::make_shared<const CallPlan>(std::move(requests[0].plan));
  }
  requests[0].request_id = options.request_id;
  requests[0].plan = *std::move(plan);
  return requests;
}

// Each part has some of the K/V heads, which must be whole groups of them.
absl::Status CheckHeadGroups(const std::vector<CallPart>& parts, const BackwardArgs& args) {
  const uint32_t heads = args.plan.heads_per_step();
  for (const CallPart& part : parts) {
    if (parts.size() > 1 && heads != 0 && part.kv_heads.size() % heads != 0) {
      return RefuseStreams(absl::StrCat("plan.heads_per_step is ", heads,
                                        ", but a part would have ", part.kv_heads.size(),
                                        " key/value heads"));
    }
  }
  return absl::OkStatus();
}

absl::Status Take(absl::StatusOr<CallPlan> plan, CallPlan* target) {
  if (!plan.ok()) return plan.status();
  *target = *std::move(plan);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<PlannedRequest>> PlanForwardRequests(const ForwardArgs& args,
                                                                const ForwardResults& results,
                                                                const CallOptions& options,
                                                                const ChunkLimits& limits,
                                                                const RegionIndex& regions) {
  if (options.retain && options.streams > 1) {
    return RefuseStreams("only one request can leave a residual");
  }
  const int streams = LiesInRegions(args, results, options, regions) ? 1 : options.streams;
  const auto parts = SplitForward(args.shape, args.options, streams);
  if (!parts.ok()) return parts.status();
  if (absl::Status status = CheckCut(*parts, args, results); !status.ok()) return status;
  // Before anything points into the buffers.
  if (absl::Status status = CheckForwardSizes(args, results); !status.ok()) return status;
  return PlanParts(*parts, options, [&](const CallPart& part, PlannedRequest* request) {
    ForwardPartResults target = PartOf(args, results, part);
    request->collect = std::move(target.collect);
    return Take(PlanForward(PartOf(args, part), target.results, options, request->request_id,
                            limits, &regions),
                &request->plan);
  });
}

absl::StatusOr<std::vector<PlannedRequest>> PlanBackwardRequests(const BackwardArgs& args,
                                                                 const BackwardResults& results,
                                                                 const CallOptions& options,
                                                                 const ChunkLimits& limits,
                                                                 const RegionIndex& regions) {
  if (options.retain) {
    return absl::InvalidArgumentError("retain: only a Forward leaves a residual");
  }
  if (!args.residual_handle.empty()) {
    return PlanWithResidual(args, results, options, limits, regions);
  }
  if (args.keep_residual) {
    return absl::InvalidArgumentError("keep_residual is set, but residual_handle is not");
  }
  const int streams = LiesInRegions(args, results, options, regions) ? 1 : options.streams;
  const auto parts = SplitBackward(args.shape, args.options, streams);
  if (!parts.ok()) return parts.status();
  if (absl::Status status = CheckCut(*parts, args, results); !status.ok()) return status;
  if (absl::Status status = CheckHeadGroups(*parts, args); !status.ok()) return status;
  if (absl::Status status = CheckBackwardSizes(args, results); !status.ok()) return status;
  return PlanParts(*parts, options, [&](const CallPart& part, PlannedRequest* request) {
    BackwardPartArgs source = PartOf(args, part);
    // Until the request has ended, its lse has to stay.
    if (source.lse != nullptr) request->collect = [lse = std::move(source.lse)] {};
    return Take(PlanBackward(source.args, PartOf(args, results, part), options, request->request_id,
                             limits, &regions),
                &request->plan);
  });
}

}  // namespace ringattn::client
