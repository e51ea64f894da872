#include "worker/service/run_report.h"

#include "common/plan/cost_model.h"
#include "common/wire/durations.h"

namespace ringattn::worker {
namespace {

v1::TimelineEvent* AddBar(const std::string& name, v1::TimelineCategory category, absl::Time origin,
                          absl::Time begin, absl::Time end, v1::RankReport* report) {
  v1::TimelineEvent* event = report->add_timeline();
  event->set_name(name);
  event->set_category(category);
  SetDuration(begin - origin, event->mutable_begin());
  SetDuration(end - origin, event->mutable_end());
  return event;
}

void AddKernel(const KernelUse& use, v1::RankReport* report) {
  v1::KernelUse* kernel = report->add_kernels();
  kernel->set_call(use.call);
  kernel->set_family(std::string(use.kernel.family));
  kernel->set_kernel_class(std::string(use.kernel.kernel_class));
  kernel->set_instructions(std::string(use.kernel.instructions));
  kernel->set_calls(use.calls);
}

v1::TimelineCategory ToProto(TimelineBar::Kind kind) {
  switch (kind) {
    case TimelineBar::Kind::kCompute:
      return v1::TIMELINE_CATEGORY_COMPUTE;
    case TimelineBar::Kind::kExchange:
      return v1::TIMELINE_CATEGORY_EXCHANGE;
    case TimelineBar::Kind::kWait:
      return v1::TIMELINE_CATEGORY_WAIT;
  }
  return v1::TIMELINE_CATEGORY_UNSPECIFIED;
}

}  // namespace

v1::RankReport MakeRankReport(ShardOperation& operation, const ExecutionReport& report,
                              const std::string& worker_name) {
  v1::RankReport proto;
  proto.set_rank(operation.operation().program().rank);
  proto.set_worker(worker_name);
  SetDuration(report.compute_time, proto.mutable_compute_time());
  SetDuration(report.ring_wait_time, proto.mutable_ring_wait_time());
  proto.set_sent_bytes(report.sent_bytes);
  proto.set_tiles(report.tiles);
  for (const KernelUse& use : report.kernels) AddKernel(use, &proto);
  if (!operation.info().with_timeline) return proto;
  const absl::Time origin = operation.reserved_time();
  if (operation.uploaded_time() > origin) {
    AddBar("upload", v1::TIMELINE_CATEGORY_UPLOAD, origin, origin, operation.uploaded_time(),
           &proto);
  }
  const ShardOperation::CopyTimes copies = operation.upload_copies();
  if (copies.begin < copies.end) {
    AddBar("copy to device", v1::TIMELINE_CATEGORY_H2D, origin, copies.begin, copies.end, &proto);
  }
  for (const TimelineBar& bar : report.timeline) {
    v1::TimelineEvent* event =
        AddBar(bar.name, ToProto(bar.kind), origin, bar.begin, bar.end, &proto);
    event->set_kernel_family(std::string(bar.kernel.family));
    event->set_kernel_class(std::string(bar.kernel.kernel_class));
  }
  return proto;
}

double FlopsOf(const Operation& operation) {
  double forward_pairs = 0, backward_pairs = 0;
  for (const Step& step : operation.program().steps) {
    for (const ComputeCall& call : step.calls) {
      const double pairs = static_cast<double>(call.pairs) * call.share_of_heads();
      if (call.op == ComputeCall::Op::kForward) forward_pairs += pairs;
      if (call.op == ComputeCall::Op::kBackward) backward_pairs += pairs;
    }
  }
  return FlopsOfPairs(operation.spec(), Direction::kForward, false, forward_pairs) +
         FlopsOfPairs(operation.spec(), Direction::kBackward, false, backward_pairs);
}

}  // namespace ringattn::worker
